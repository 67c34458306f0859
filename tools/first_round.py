"""How many commands, and how long, until two hospitals have closed their first round together.

    python -m tools.first_round

Each command that a person would give is given here, one after the other, on loopback, and counted; installing is one
command a machine and is counted, but not timed (`make install` prints its own time). Reading what `preview` prints, and
sending an invitation to a hospital, take as long as people take.
"""

import tempfile
import time
from pathlib import Path

from tools.world import World, command, wait_until

SITES = ("ashford", "birchwood")
STUDY_FILE = Path(__file__).resolve().parent.parent / "examples" / "breast_cancer.toml"


def main() -> None:
    with tempfile.TemporaryDirectory(prefix="wardround-first-") as folder:
        root = Path(folder)
        data = root / "data"
        command("fl-lab", "data", "breast-cancer", "--out", data)
        study = root / "study.toml"
        study.write_text(
            STUDY_FILE.read_text().replace(
                'sites = ["ashford", "birchwood", "calder", "dunmore"]', 'sites = ["ashford", "birchwood"]'
            )
        )
        given: list[str] = ["pip install wardround", *("pip install 'wardround[site]'" for _ in SITES)]
        began = time.monotonic()
        with World(root / "state") as world:
            given.append("coordinator init")
            world.init()
            given.append("coordinator serve")
            world.serve()
            for site in SITES:
                given.append(f"coordinator invite {site}")
                given.append("site-agent join")
                world.join(site)
                given.append("site-agent data add")
                world.add_data(site, data / site, "diagnosis")
                given.append("site-agent run")
                world.run_agent(site)
            given.append("coordinator study create")
            name = world.create_study(study, "--set", "study.quorum=2")
            for site in SITES:
                given += ["site-agent preview", "site-agent policy draft", "site-agent approve"]
                world.ask_site(site, "preview", name)
                world.approve(name, [site])
            given.append("coordinator study start")
            world.ask_coordinator("study", "start", name)
            wait_until(lambda: world.study_status(name)["sites"][SITES[0]]["rounds_contributed"], "round 1", 60)
            seconds = time.monotonic() - began
        for line in given:
            print(f"  {line}")
        operator = sum(not line.startswith(("site-agent", "pip install 'w")) for line in given)
        hospital = (len(given) - operator) // len(SITES)
        print(f"{len(given)} commands: {operator} by the operator, {hospital} at each hospital;")
        print(f"1 file written by hand (the study), {len(SITES)} invitations handed over")
        print(f"first round closed {seconds:.0f} s after the first command, installing aside")


if __name__ == "__main__":
    main()
