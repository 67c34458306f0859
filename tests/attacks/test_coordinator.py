"""A malicious coordinator."""

from pathlib import Path

import pytest

from site_agent.gateway.messages import offer_from
from site_agent.gateway.rounds import Rounds
from site_agent.handoff import staged
from site_agent.state import SiteState
from site_agent.trainer.vault import study_folder
from tests.attacks.held import NAMES_OUT, calls_in_our_code, imports_in_our_code
from wardround.errors import BadData, UsageProblem, WardroundError
from wardround.v1 import federation_pb2 as pb

RUNS_WHAT_IT_READS = frozenset(
    {"pickle", "cPickle", "dill", "cloudpickle", "joblib", "marshal", "shelve", "jsonpickle", "yaml", "runpy", "code"}
)
CALLS_THAT_RUN_WHAT_THEY_READ = frozenset(
    {"eval", "exec", "compile", "__import__", "torch.load", "torch.hub.load", "torch.jit.load", "os.system", "os.popen"}
)


@pytest.mark.attack(promise="P3", refused_by="site_agent/gateway/messages.py")
def test_code_in_a_message() -> None:
    """Nothing in the programs can run what it reads: no pickle, no torch.load, no eval, no array of objects."""
    bad = [(file, module) for file, module in imports_in_our_code() if module.split(".")[0] in RUNS_WHAT_IT_READS]
    assert not bad
    for file, name, call in calls_in_our_code():
        assert name not in CALLS_THAT_RUN_WHAT_THEY_READ, f"{file}:{call.lineno} calls {name}"
        for keyword in call.keywords:
            value = getattr(keyword.value, "value", None)
            odd = (keyword.arg, value) in (("allow_pickle", True), ("shell", True), ("verify", False))
            assert not odd, f"{file}:{call.lineno}"
            assert keyword.arg != "weights_only", f"{file}:{call.lineno}"
        if name == "np.load":
            assert any(keyword.arg == "allow_pickle" for keyword in call.keywords), f"{file}:{call.lineno}"


@pytest.mark.attack(promise="P3", refused_by="site_agent/state.py")
@pytest.mark.parametrize("name", NAMES_OUT, ids=ascii)
def test_path_in_a_studys_name(tmp_path: Path, name: str) -> None:
    """A study's name becomes a file's at the site: in offers, consents, journals, private state and staging."""
    with pytest.raises(BadData):
        offer_from(pb.StudyOffer(study=name, revision=1), "alpha")
    state = SiteState(tmp_path)
    for look in (state.offer, state.consent, state.journal):
        with pytest.raises(UsageProblem):
            look(name)
    with pytest.raises(UsageProblem):
        study_folder(tmp_path, name)
    with pytest.raises(WardroundError):
        staged(tmp_path, name)
    rounds = Rounds.__new__(Rounds)
    rounds._state = state
    with pytest.raises(BadData):
        rounds._file(name)
    assert not list(tmp_path.iterdir())
