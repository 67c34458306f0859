"""A hospital and code of others: who says that it may run here, and where it is named."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from site_agent.audit import bundle
from site_agent.cli.main import app
from site_agent.gateway.policy.policy import parse
from site_agent.gateway.policy.text import differences
from tests.plugin_world import FILES, found, install, link, on_the_path
from tests.site_agent.fake_trainer import SHARED, write_tensors
from tests.site_agent.site_world import STUDY, SiteWorld, document
from tests.site_agent.test_cli_policy import edit
from tests.site_agent.trainer_world import Hospital
from wardround.errors import BadData, NotPermitted

POLICY = """
[study]
coordinator = "spiffe://test/coordinator"
studies = ["hearts"]
[quotas]
bytes_per_round = 1
bytes_per_day = 1
numbers_per_round = 1
numbers_per_day = 1
"""


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    with on_the_path(tmp_path / "site-packages") as folder:
        install(folder)
        yield folder


@pytest.fixture
def site(tmp_path: Path, folder: Path) -> Iterator[SiteWorld]:
    world = SiteWorld(tmp_path)
    try:
        world.join()
        world.start()
        yield world
    finally:
        world.close()


class Commands:
    """``site-agent`` in this process."""

    def __init__(self, site: SiteWorld, capsys: pytest.CaptureFixture[str]) -> None:
        self._state, self._capsys = str(site.state.root), capsys

    def run(self, *line: str) -> str:
        """What it prints."""
        self._capsys.readouterr()
        app([*line, "--state", self._state], standalone_mode=False)
        return self._capsys.readouterr().out

    def json(self, *line: str) -> Any:
        return json.loads(self.run(*line, "--json"))

    def denied(self, *line: str) -> NotPermitted:
        with pytest.raises(NotPermitted) as refusal:
            self.run(*line)
        return refusal.value


def offer(site: SiteWorld) -> None:
    tables: dict[str, Any] = {**document(), "model": {"name": "lungnet"}}
    pin = {"version": "1.2", "sha256": found().sha256, "brings": ["model lungnet"]}
    model = write_tensors(site.folder / "initial", SHARED, 0)
    site.coordinator.offer({**tables, "plugins": {"lungnets": pin}}, model)
    site.wait_offered(STUDY)


def test_a_person_lets_code_of_others_run_here_and_it_is_named_everywhere(
    site: SiteWorld, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    offer(site)
    assert site.trainer is not None
    command, policy, digest = Commands(site, capsys), site.state.policy, found().sha256
    line = f'{{ name = "lungnets", version = "1.2", sha256 = "{digest}" }}'
    denied = f"code of plug-in lungnets 1.2: no rule of plugins.allow names it; to allow it, add {line} there"

    command.run("policy", "draft", STUDY)
    assert f"\n[plugins]\nallow = [\n  # {line},\n]\n" in policy.read_text()
    who = "`site-agent preview` says who would have what of this study, when its plug-ins may run here"
    assert f"# {who}" in policy.read_text()
    refusal = command.denied("preview", STUDY)
    assert refusal.message == (f"the policy does not let study `hearts` run here: {denied}; nothing of it was imported")
    assert refusal.hint == f"if this hospital trusts that code, write the line into `allow` of [plugins] in {policy}"
    assert denied in command.denied("policy", "explain", STUDY).message
    assert denied in command.denied("data", "check", "patients", "--study", STUDY).message
    assert denied in command.denied("data", "fit", "patients", "--study", STUDY).message
    assert denied in command.denied("data", "fit", "patients", "--study", STUDY, "--send").message
    assert site.trainer.asked == []

    edit(policy, f"# {line}", line)
    assert f"plug-ins that may run here: lungnets 1.2, SHA-256 {digest}" in command.run("policy", "check")
    shown = command.json("preview", STUDY, "--data", "patients")
    lines = {row["name"]: row["value"] for group in shown["groups"] for row in group["lines"]}
    assert lines["plugins.lungnets.version"] == "1.2"
    assert lines["plugins.lungnets.sha256"] == digest
    assert lines["plugins.lungnets.brings"] == "model lungnet"
    command.run("approve", STUDY, "--data", "patients", "--digest", shown["digest"])
    (consent,) = site.lines("consent")
    assert consent["plugins"] == [{"name": "lungnets", "version": "1.2", "sha256": digest}]

    assert f"with code of plug-in lungnets 1.2 (SHA-256 {digest})" in bundle.look(site.state.root).page()
    assert ", code of plug-in lungnets 1.2" in command.run("audit", "show")

    install(folder, version="1.3")
    said = command.run("status")
    assert f"hearts runs code of plug-in lungnets 1.2, SHA-256 {digest}\n" in said
    assert "hearts changed since it was approved: plug-in lungnets is 1.3 here, the study pins 1.2; `pip inst" in said
    link(folder)
    (row,) = command.json("status")["studies"]
    assert row["state"] == "changed"
    assert row["plugins"] == [f"lungnets 1.2, SHA-256 {digest}"]
    assert row["changes"][0].startswith("plug-in lungnets 1.3 cannot be pinned: it is installed as a link to its")


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ('allow = [{ name = "lungnets", version = "1.2" }]', "`sha256` in [plugins.allow] is missing"),
        ('allow = [{ name = "lungnets", version = "1.2", sha256 = "" }]', "`allow` has no `sha256` for lungnets 1.2"),
        ('allow = [{ name = "Lung_Nets", version = "1", sha256 = "" }]', "'Lung_Nets' is not a distribution's name"),
        ('allow = [{ name = "lungnets", version = "1 2", sha256 = "" }]', "'1 2' is no version"),
        ('allow = ["lungnets"]', "is not a table"),
        ('deny = ["lungnets"]', "unknown key `deny` in [plugins]"),
        (
            f'allow = [{{ name = "a", version = "1", sha256 = "{"ab" * 32}" }},'
            f'{{ name = "a", version = "1", sha256 = "{"ab" * 32}" }}]',
            "a plug-in stands twice in `allow`",
        ),
    ],
    ids=["no digest", "an empty digest", "a name", "a version", "a text", "a key", "twice"],
)
def test_a_policy_that_names_plugins_wrongly_says_how(table: str, message: str) -> None:
    with pytest.raises(BadData) as refusal:
        parse(f"{POLICY}[plugins]\n{table}\n".encode(), Path("policy.toml"))
    assert message in refusal.value.message


def test_how_two_policies_differ_names_the_plugin() -> None:
    old = parse(POLICY.encode(), Path("old.toml"))
    allow = f'[plugins]\nallow = [{{ name = "lungnets", version = "1.2", sha256 = "{"ab" * 32}" }}]\n'
    new = parse((POLICY + allow).encode(), Path("new.toml"))
    assert not old.plugins.allow
    assert differences(old, new) == [f"plugins.allow: now name lungnets, version 1.2, sha256 {'ab' * 32}"]


BROKEN = "import nosuchthing\n"
NO_ROW = "LUNGNET = 4711\n"


@pytest.mark.parametrize(
    ("init", "message", "hint"),
    [
        (
            None, "plug-in lungnets 1.2 is not installed here",
            "`pip install --no-deps lungnets==1.2` where the trainer runs",
        ),
        (
            BROKEN, "plug-in lungnets 1.2 cannot be imported (lungnets:LUNGNET): ModuleNotFoundError: No module named "
            "'nosuchthing'",
            "install it again with what it needs: `pip install --force-reinstall lungnets==1.2`; other studies are not "
            "affected",
        ),
        (
            NO_ROW, "plug-in lungnets 1.2: its entry point `lungnet` in wardround.models (lungnets:LUNGNET) is no "
            "ModelRow of that name",
            "tell whoever made it, or `pip uninstall lungnets`; other studies are not affected",
        ),
    ],
    ids=["not installed at this site", "import error", "no row"],
)  # fmt: skip
def test_a_plugin_that_cannot_be_had_stops_its_study_alone(
    tmp_path: Path, folder: Path, init: str | None, message: str, hint: str
) -> None:
    hospital = Hospital.make(tmp_path, "fedavg")
    if init is None:
        pinned = found().sha256
        shutil.rmtree(folder)
    else:
        install(folder, files={**FILES, "lungnets/__init__.py": init})
        pinned = found().sha256
    pin = {"version": "1.2", "sha256": pinned, "brings": ["model lungnet"]}
    study = {**hospital.document, "model": {"name": "lungnet"}, "plugins": {"lungnets": pin}}
    with pytest.raises(BadData) as refusal:
        hospital.ask("describe", study=study, site="north")
    assert (refusal.value.message, refusal.value.hint) == (message, hint)
    assert refusal.value.code == "DECLINED_MODEL_MISMATCH"
    assert hospital.ask("describe", study=hospital.document, site="north")["model"] == "mlp"
