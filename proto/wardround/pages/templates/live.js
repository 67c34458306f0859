// Shows a page anew when its server says that something changed. Without this file the page loads itself each 30 s.
"use strict";
(() => {
  const said = document.getElementById("live");
  const shownAnew = document.body.dataset.live === "shown";
  const fine = shownAnew ? "Live: changes are shown at once" : "This page stays as it is; if something changes, it is said here";
  let version = Number(document.body.dataset.version);
  let source = null, loading = false, again = false, old = false;

  function say(text) {
    if (said.textContent !== text) said.textContent = text;
  }

  function kept(main) {  // what a person opened, scrolled or stands on
    return {
      open: [...main.querySelectorAll("details")].map((one) => one.open),
      left: [...main.querySelectorAll(".wide")].map((one) => one.scrollLeft),
      at: [...main.querySelectorAll("a, button, input, summary, [tabindex]")].indexOf(document.activeElement),
    };
  }

  function put(main, before) {
    main.querySelectorAll("details").forEach((one, index) => { one.open = before.open[index] === true; });
    main.querySelectorAll(".wide").forEach((one, index) => { one.scrollLeft = before.left[index] || 0; });
    const stood = main.querySelectorAll("a, button, input, summary, [tabindex]")[before.at];
    if (before.at >= 0 && stood) stood.focus({preventScroll: true});
  }

  async function load() {
    if (loading) { again = true; return; }
    loading = true;
    try {
      const answer = await fetch(location.href, {credentials: "same-origin", redirect: "manual"});
      if (!answer.ok) { location.reload(); return; }
      const page = new DOMParser().parseFromString(await answer.text(), "text/html");
      const main = document.querySelector("main"), before = kept(main);
      main.replaceChildren(...page.querySelector("main").childNodes);
      document.querySelector("h1").textContent = page.querySelector("h1").textContent;
      document.title = page.title;
      version = Math.max(version, Number(page.body.dataset.version));
      put(main, before);
      say(fine);
    } catch (error) {
      say("The server is not reached; trying again");
    } finally {
      loading = false;
      if (again) { again = false; load(); }
    }
  }

  function listen() {
    source = new EventSource("/events");
    source.onopen = () => { if (!old) say(fine); };
    source.onmessage = (event) => {
      if (Number(event.data) <= version) return;
      version = Number(event.data);
      if (shownAnew) { load(); } else { old = true; say("Something changed since: load this page again before you decide"); }
    };
    source.onerror = () => {
      say("The server is not reached; trying again");
      if (source.readyState === EventSource.CLOSED) location.reload();  // logged out, or refused
    };
  }

  document.addEventListener("visibilitychange", () => {  // a tab that nobody sees holds no connection
    if (document.hidden) { source.close(); } else { listen(); if (shownAnew) load(); }
  });
  window.addEventListener("pagehide", () => source.close());
  listen();
})();
