"""What a site's trainer trains with: its own choice, made where it is started, and said where people look."""

import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from fl_algorithms.engine.hardware import Hardware
from site_agent import handoff
from site_agent.gateway import trainer_process
from site_agent.handoff import Trainer
from site_agent.trainer.listener import Listener
from site_agent.trainer.requests import Requests
from tests.fl_algorithms.image_toys import CLASSES, IMAGES, image_study, pictures, write_images, write_table
from tests.site_agent.test_cli_images import ImageHospital, hospital_of
from tests.site_agent.trainer_world import Hospital
from wardround.errors import UsageProblem
from wardround.local import control
from wardround.records.trainer import Commit, GetStatus, Progress, Train

WAIT_S = 120
SIDE, ROWS = 300, 12  # 1,080,000 bytes: more than the smallest cache, 1 MiB
WITHOUT_CUDA = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")


@contextmanager
def listening(state: Path, hardware: Hardware) -> Iterator[Trainer]:
    with Listener(state, threading.Event(), hardware) as listener:
        server = control.ControlServer(handoff.trainer_socket(state), listener.answer)
        try:
            yield Trainer(state)
        finally:
            server.close()


def large(folder: Path) -> ImageHospital:
    """A hospital whose images do not fit into the study's cache."""
    task = IMAGES | {"size": [SIDE, SIDE], "cache_mib": 1, "augment": {"flip_vertical": True, "rotate_degrees": 5}}
    hospital = hospital_of(folder, image_study(task, local_steps=2, batch_size=5))
    names = write_images(folder / "images", list(pictures(ROWS, side=SIDE)[0]))
    shapes = [CLASSES[place % 2] for place in range(ROWS)]
    table = write_table(folder / "labels.csv", {"image": names, "shape": shapes})
    source = {"images": str(folder / "images"), "labels": str(table)}
    hospital.name(*(word for role, path in source.items() for word in (f"--{role}", path)))
    return hospital


@pytest.mark.chaos
def test_worker_processes_in_the_isolated_trainer_change_no_bit(tmp_path: Path) -> None:
    for name in ("alone", "helped"):
        (tmp_path / name).mkdir()
    alone, helped = large(tmp_path / "alone"), large(tmp_path / "helped")
    steps: list[Progress] = []
    checked = alone.ask("check", study=alone.document, site="ash", data="patients")
    assert "are read and decoded again in each epoch" in " ".join(checked["warnings"])
    with listening(helped.state, Hardware(workers=2)) as trainer:
        for number in (1, 2):
            answer = trainer.ask(Train.model_validate(helped.request(number)), steps.append).to_document()
            trainer.ask(Commit(study="toy", revision=1, round=number))
            expected = alone.answer(alone.request(number))
            alone.ask("commit", study="toy", revision=1, round=number)
            assert helped.update_digest(answer) == alone.update_digest(expected)
            assert answer["metrics"] == expected["metrics"]
    assert steps[-1] == Progress(step=2, steps=2)


@WITHOUT_CUDA
def test_trainer_on_a_device_that_is_not_there_does_not_start(tmp_path: Path) -> None:
    hospital = Hospital.make(tmp_path)
    with pytest.raises(UsageProblem, match="finds no CUDA device") as refused:
        Listener(hospital.state, threading.Event(), Hardware("cuda"))
    assert "`--device cpu`" in refused.value.hint


@WITHOUT_CUDA
def test_auto_is_the_cpu_where_there_is_nothing_else_and_status_says_so(tmp_path: Path) -> None:
    hospital = Hospital.make(tmp_path)
    with listening(hospital.state, Hardware("auto")) as trainer:
        assert trainer.ask(GetStatus()).device == "cpu"


@WITHOUT_CUDA
def test_a_round_on_a_device_that_is_gone_is_declined_for_resources(tmp_path: Path) -> None:
    hospital = Hospital.make(tmp_path)
    hospital.requests = Requests(hospital.state, Hardware("cuda"))
    with pytest.raises(UsageProblem, match="finds no CUDA device") as declined:
        hospital.train(1)
    assert declined.value.code == "DECLINED_RESOURCES"


@WITHOUT_CUDA
@pytest.mark.parametrize("by", ["option", "environment"])
def test_the_command_says_what_is_missing_and_exits_64(tmp_path: Path, by: str) -> None:
    hospital = Hospital.make(tmp_path)
    line = [sys.executable, "-m", "site_agent.cli.main", "run", "--only", "trainer", "--state", str(hospital.state)]
    line += ["--device", "cuda"] if by == "option" else []
    environment = {"WARDROUND_DEVICE": "cuda"} if by == "environment" else {}
    done = subprocess.run(
        line, capture_output=True, text=True, timeout=WAIT_S, check=False, env={**os.environ, **environment}
    )
    assert done.returncode == 64
    assert "finds no CUDA device" in done.stderr
    assert "ready" not in done.stdout


def test_one_command_for_both_hands_the_choice_to_its_trainer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[Any] = []

    def start(line: list[str], **_: Any) -> None:
        started.append(line)
        raise OSError("seen")

    monkeypatch.setattr(trainer_process.subprocess, "Popen", start)
    with pytest.raises(OSError, match="seen"):
        trainer_process.TrainerProcess(tmp_path, Hardware("auto", 3).options)
    assert started[0][-4:] == ["--device", "auto", "--workers", "3"]


def test_a_card_names_the_device(tmp_path: Path) -> None:
    hospital = Hospital.make(tmp_path)
    hospital.train(1)
    hospital.commit(1)
    hospital.train(2)
    hospital.commit(2)
    (card, *_) = (hospital.state / "studies").rglob("card.json")
    assert json.loads(card.read_text())["device"] == hospital.ask("device")["device"] == "cpu"
