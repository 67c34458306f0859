"""Runs side by side: what a worker that ends does, which card a worker has, and the seam to Ray."""

import json
import sys
import time
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from typer.testing import CliRunner

from fl_algorithms.engine.hardware import Hardware
from fl_algorithms.lab import comparison, executors
from fl_algorithms.lab.cli import app
from fl_algorithms.lab.executors import NO_CARDS, Placement, RayExecutor, card_share, on_ray, placement, processes
from fl_algorithms.lab.study_run import Plan, side_by_side
from tests.fl_algorithms.executor_calls import card_and_process, die_until, double, refuse
from tests.fl_algorithms.test_lab_compare import FEDAVG, FENDA, HEAD, STUDY, compared, hospitals, run_files, suite_file
from tests.fl_algorithms.toys import toy_study
from wardround.errors import BadData, NeedsPerson, TryAgain, UsageProblem

# Processes


def test_calls_are_answered_and_what_they_raise_is_raised() -> None:
    with processes(1) as pool:
        assert [pool.submit(double, n).result() for n in range(3)] == [0, 2, 4]
        with pytest.raises(BadData) as refused:
            pool.submit(refuse, "this").result()
        assert (refused.value.message, refused.value.hint, refused.value.code) == (
            "not this",
            "another",
            "MANIFEST_NAMES",
        )
        assert pool.submit(double, 4).result() == 8  # the same worker goes on


def test_the_call_of_a_worker_that_is_killed_is_made_again(tmp_path: Path) -> None:
    with processes(1) as pool:
        assert pool.submit(die_until, 2, tmp_path).result() == 2
        assert pool.submit(double, 4).result() == 8


def test_a_call_that_kills_every_worker_is_given_up_and_the_others_go_on(tmp_path: Path) -> None:
    with processes(1) as pool:
        asked = [pool.submit(double, 1), pool.submit(die_until, 99, tmp_path), pool.submit(double, 2)]
        with pytest.raises(TryAgain) as refused:
            asked[1].result()
        assert [asked[0].result(), asked[2].result()] == [2, 4]
    assert refused.value.message == "its worker process was ended from outside, 3 times"
    assert refused.value.hint == "most often memory ran out: fewer --jobs; what is done stays done"
    assert len(list(tmp_path.iterdir())) == 3


def test_leaving_by_an_exception_ends_what_is_under_way(tmp_path: Path) -> None:
    asked = []

    def interrupted() -> None:
        with processes(1) as pool:
            asked.append(pool.submit(card_and_process, tmp_path, 99))  # it would never end
            asked.append(pool.submit(double, 1))
            while not list(tmp_path.iterdir()):
                pass
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert isinstance(asked[0].exception(), TryAgain)
    assert asked[1].cancelled()


# Cards


def test_each_worker_has_its_card(tmp_path: Path) -> None:
    with processes(2, Placement(("3", "5"))) as pool:
        asked = [pool.submit(card_and_process, tmp_path, 2) for _ in range(2)]
        found = dict(future.result() for future in asked)
    assert set(found) == {"3", "5"}
    assert len(set(found.values())) == 2


def test_workers_go_round_the_cards() -> None:
    two = Placement(("0", "1"), per_card=3)
    assert [two.card_of(slot) for slot in range(6)] == ["0", "1", "0", "1", "0", "1"]
    assert NO_CARDS.card_of(4) is None


def test_on_a_cluster_a_run_asks_for_its_share_of_a_card() -> None:
    assert [card_share(Hardware(device), 4) for device in ("cuda", "auto", "cpu")] == [0.25, 0, 0]  # type: ignore[arg-type]


def test_a_plan_has_its_jobs_and_their_cards(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    plan = Plan(toy_study(), tmp_path, hardware=Hardware("cuda"))
    assert side_by_side(plan, None, 1) == plan
    assert (side_by_side(plan, 4, 2).jobs, side_by_side(plan, 4, 2).where) == (4, Placement(("0", "1"), 2))
    on_cluster = side_by_side(replace(plan, executor="ray"), 9, 2)
    assert (on_cluster.jobs, on_cluster.card) == (9, 0.5)
    with pytest.raises(UsageProblem, match="--jobs 3 on 2 cards with 1 runs each: there is room for 2"):
        side_by_side(plan, 3, 1)


@pytest.mark.parametrize(
    ("where", "wanted", "jobs"),
    [
        pytest.param(NO_CARDS, None, 8, id="one-a-core"),
        pytest.param(NO_CARDS, 3, 3, id="as-was-said"),
        pytest.param(Placement(("0", "1")), None, 2, id="one-a-card"),
        pytest.param(Placement(("0", "1"), 3), None, 6, id="as-many-as-the-cards-take"),
        pytest.param(Placement(("0", "1"), 3), 4, 4, id="fewer"),
    ],
)
def test_how_many_runs_there_are_at_once(where: Placement, wanted: int | None, jobs: int) -> None:
    assert where.jobs(wanted, 8) == jobs


def test_more_runs_than_the_cards_take_are_refused() -> None:
    with pytest.raises(UsageProblem) as refused:
        Placement(("0", "1")).jobs(5, 8)
    assert refused.value.message == "--jobs 5 on 2 cards with 1 runs each: there is room for 2"
    assert refused.value.hint == "`--jobs 2`, or `--per-card 3`"


def test_the_cards_are_those_that_the_environment_leaves_else_all(tmp_path: Path) -> None:
    for name in ("nvidia0", "nvidia10", "nvidia2", "nvidiactl", "nvidia-uvm"):
        (tmp_path / name).touch()
    cuda = Hardware("cuda")
    assert placement(cuda, 1, None, tmp_path) == Placement(("0", "2", "10"))
    assert placement(cuda, 2, "GPU-a, 1", tmp_path) == Placement(("GPU-a", "1"), 2)
    assert placement(cuda, 1, "", tmp_path) == Placement(())
    assert placement(Hardware("cpu"), 1, "0", tmp_path) == NO_CARDS


# Runs


@pytest.mark.chaos
def test_a_run_in_a_worker_gives_the_digests_of_this_process(tmp_path: Path) -> None:
    (tmp_path / "study.toml").write_text(STUDY)
    words = ["run", str(tmp_path / "study.toml"), "--data", str(hospitals(tmp_path / "data")), "--json"]
    alone = json.loads(CliRunner().invoke(app, words, catch_exceptions=False).stdout)
    out = ["--jobs", "2", "--out", str(tmp_path / "out")]
    assert json.loads(CliRunner().invoke(app, [*words, *out], catch_exceptions=False).stdout) == alone


def test_a_run_whose_workers_end_is_reported_and_the_others_are_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = hospitals(tmp_path / "data")
    real = comparison.runs.attempt

    def lost(job: Any, *given: Any) -> Any:
        if job.seed == 6:
            raise TryAgain("its worker process was ended from outside, 3 times", hint="fewer --jobs")
        return real(job, *given)

    monkeypatch.setattr(comparison.runs, "attempt", lost)
    tally = compared(suite_file(tmp_path, HEAD + FEDAVG), data, tmp_path / "out")
    assert tally.failed == ["fedavg: seed 6: its worker process was ended from outside, 3 times (hint: fewer --jobs)"]
    assert tally.done == 1
    assert set(run_files(tmp_path / "out")) == {"runs/fedavg/5.json", "runs/fedavg/6.failed.json"}


def test_a_run_of_another_kind_of_machine_is_not_mixed_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = comparison.runs.survey

    def elsewhere(*given: Any) -> Any:
        found = real(*given)
        found.versions["instruction_set"] = "of the head node"
        return found

    monkeypatch.setattr(comparison.runs, "survey", elsewhere)
    tally = compared(suite_file(tmp_path, HEAD + FEDAVG), hospitals(tmp_path / "data"), tmp_path / "out", seeds=1)
    (said,) = tally.failed
    assert said.startswith(
        'fedavg: seed 5: it was made with other versions: instruction_set was "of the head node", is now'
    )
    assert said.endswith("(hint: nodes of one cluster must be alike)")


# Ray, without Ray


class Task:
    def __init__(self, future: Any) -> None:
        self.future = future


class Ray:
    """What the executor asks of Ray, in this process: tasks are made when their future is asked for."""

    def __init__(self, loses: int = 0) -> None:
        self.options: dict[str, Any] = {}
        self.cancelled: list[Any] = []
        self.loses = loses

    def remote(self, call: Any) -> Any:
        def options(**given: Any) -> Any:
            self.options = given
            return SimpleNamespace(remote=lambda *args: Task(lambda: self._made(call, args)))

        return SimpleNamespace(options=options)

    def cancel(self, task: Any, force: bool) -> None:
        self.cancelled.append((task, force))

    def _made(self, call: Any, args: Any) -> Future[Any]:
        future: Future[Any] = Future()
        if self.loses:
            self.loses -= 1
            future.set_exception(RuntimeError("the node died"))
        else:
            future.set_result(call(*args))
        return future


def test_a_task_of_ray_is_a_call() -> None:
    ray = Ray()
    pool = RayExecutor(ray, {"num_cpus": 2})
    assert pool.submit(double, 4).result() == 8
    with pytest.raises(BadData, match="not this"):
        pool.submit(refuse, "this").result()
    assert ray.options == {"num_cpus": 2}
    pool.shutdown(cancel_futures=True)
    assert ray.cancelled == []  # all were answered


def test_what_ray_loses_for_good_is_said() -> None:
    with pytest.raises(TryAgain) as refused:
        RayExecutor(Ray(loses=1), {}).submit(double, 4).result()
    assert refused.value.message == "Ray lost its worker or its node, 3 times: RuntimeError"
    assert refused.value.hint == "`ray status` says which nodes are there; what is done stays done"


def test_without_ray_the_way_out_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(NeedsPerson) as refused, on_ray(1):
        pass
    assert (refused.value.message, refused.value.hint) == (
        "Ray is not installed",
        "`pip install 'wardround[ray]'`, on every node",
    )


def test_a_cluster_that_does_not_answer_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    def init(**_: Any) -> None:
        raise ConnectionError

    silent = SimpleNamespace(is_initialized=lambda: False, init=init)
    monkeypatch.setattr(executors, "_ray", lambda: silent)
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:1")
    with (
        pytest.raises(TryAgain, match=r"the Ray cluster at 127\.0\.0\.1:1 does not answer: ConnectionError"),
        on_ray(1),
    ):
        pass


# Ray itself

LOOPBACK = "127.0.0.2"  # Ray takes 127.0.0.1 to mean this machine's address in its network
LONGER = STUDY.replace("rounds = 2", "rounds = 20").replace("local_steps = 3", "local_steps = 40")


@pytest.mark.chaos
@pytest.mark.timeout(170)
@pytest.mark.filterwarnings("ignore")
def test_a_comparison_on_two_nodes_of_which_one_is_killed_gives_the_digests_of_one_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("ray")
    import ray
    from ray.cluster_utils import Cluster

    monkeypatch.setenv("PYTHONPATH", ":".join(path for path in sys.path if path))
    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    monkeypatch.setenv("RAY_DISABLE_IMPORT_WARNING", "1")
    path = suite_file(tmp_path, HEAD + FEDAVG + FENDA, LONGER)
    data, seen = hospitals(tmp_path / "data"), 0
    whole = compared(path, data, tmp_path / "whole")
    assert whole.done == 4
    node = {"num_cpus": 1, "object_store_memory": 80 * 2**20, "node_ip_address": LOOPBACK}
    cluster = Cluster(initialize_head=True, head_node_args={**node, "include_dashboard": False})
    doomed = cluster.add_node(**node)
    real = comparison._Work._keep

    def kill_after_the_first(work: Any, *given: Any) -> None:
        nonlocal seen
        real(work, *given)
        seen += 1
        if seen == 1:
            cluster.remove_node(doomed, allow_graceful=False)

    monkeypatch.setattr(comparison._Work, "_keep", kill_after_the_first)
    try:
        ray.init(address=cluster.address, log_to_driver=False, configure_logging=False, _node_ip_address=LOOPBACK)
        assert len([n for n in ray.nodes() if n["Alive"]]) == 2
        tally = compared(path, data, tmp_path / "out", pool=on_ray, jobs=2)
        deadline = time.monotonic() + 30
        while len([n for n in ray.nodes() if n["Alive"]]) == 2 and time.monotonic() < deadline:
            time.sleep(0.1)  # the head hears of it a little later
        assert len([n for n in ray.nodes() if n["Alive"]]) == 1
    finally:
        ray.shutdown()
        cluster.shutdown()
    assert (tally.done, tally.failed) == (4, [])
    assert run_files(tmp_path / "out") == run_files(tmp_path / "whole")
