"""What a call may keep the coordinator waiting for, and how a ledger is followed between calls."""

import inspect
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from typer.testing import CliRunner

from coordinator import calls, server
from coordinator.cli import main, setup
from coordinator.updates.allowance import HOUR_S, Allowance
from tests.attacks.places import Hung, bootstrap_pems, open_channel, own_pems
from tests.coordinator.conftest import Place, refused
from tests.coordinator.fake_site import FakeSite, delta
from tests.coordinator.shaped import shaped
from tests.coordinator.test_rounds import SPECS
from tools.world import wait_until
from wardround.errors import TryAgain
from wardround.records.update import LedgerStatement
from wardround.tensors.files import file_header
from wardround.tensors.manifests import TensorSpec
from wardround.v1 import federation_pb2 as pb
from wardround.v1 import federation_pb2_grpc, tensors_pb2


@pytest.mark.parametrize(
    ("messages", "said"),
    [
        pytest.param([], "`Declare` wants a message, and none came", id="none"),
        pytest.param([b"\xff\xff"], "a message that is no DeclareRequest", id="undecodable"),
        pytest.param([bytes(8193)], "a message of 8193 bytes for `Declare`, at most 8192 are taken", id="long"),
    ],
)
def test_a_first_message_has_its_form_and_length(place: Place, messages: list[bytes], said: str) -> None:
    alpha = place.join("alpha")
    call = alpha.channel.stream_unary("/wardround.v1.Federation/Declare")
    with refused(f"MESSAGE_MALFORMED\n{said}"):
        call(iter(messages), timeout=20)


def test_invitations_together_have_a_bounded_number_of_calls(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """However many invitations somebody holds, members are not kept out."""
    monkeypatch.setattr(calls, "MAX_BOOTSTRAP_CALLS", 4)
    alpha = place.join("alpha")
    held = [Hung(place, bootstrap_pems(place.invite(site)), "Enrolment/Enrol", 2) for site in ("x", "y")]
    try:
        wait_until(lambda: len(place.coordinator.calls.all()) == 5, "they have arrived, beside alpha's watch", 20)
        with refused("TOO_BUSY\n4 calls with invitations are under way"):
            FakeSite(place.invite("z"))
        assert alpha.enrolment is not None
        place.create(sites=["alpha"])
        assert alpha.offer("trial").study == "trial"
    finally:
        for hung in held:
            hung.close()


def test_a_call_that_its_peer_gives_up_is_no_fault_in_the_log(place: Place, caplog: pytest.LogCaptureFixture) -> None:
    """Each left a traceback of gRPC's, which found no reply to serialize: a full disk, one cancelled call at a time."""
    hung = Hung(place, bootstrap_pems(place.invite("x")), "Enrolment/Enrol", 2)
    wait_until(lambda: len(place.coordinator.calls.all()) == 2, "they have arrived", 20)
    hung.close()
    wait_until(lambda: not place.coordinator.calls.all(), "they are forgotten", 20)
    place.restart()  # its workers have ended
    assert not [record for record in caplog.records if record.levelname == "ERROR"]


def test_an_allowance_is_for_an_hour_and_what_came_to_something_is_not_counted() -> None:
    now = [0.0]
    allowance = Allowance("uploads without a result", lambda: now[0])
    for _ in range(3):
        allowance.take("alpha", 3)
    with pytest.raises(TryAgain, match="3 uploads without a result of site `alpha` in an hour"):
        allowance.take("alpha", 3)
    allowance.take("bravo", 3)
    allowance.give_back("alpha")
    with pytest.raises(TryAgain, match="4 uploads"):
        allowance.take("alpha", 3, others=2)
    allowance.take("alpha", 3)
    now[0] = HOUR_S + 1
    allowance.take("alpha", 1)


def test_a_ledger_that_was_confirmed_anew_while_a_statement_was_judged_is_judged_again(place: Place) -> None:
    alpha = place.join("alpha")
    alpha.ledger.write()
    head = alpha.ledger.head()
    statement = LedgerStatement(head, head.sign(alpha.ledger.key).signature, tuple(alpha.ledger.hashes))
    with place.coordinator.uploads.ledgers.judged("alpha", statement) as judged:
        assert judged.refusal is None
        place.ask("rollover", site="alpha", ledger="0" * 32)
        with (
            pytest.raises(TryAgain, match="site `alpha` has just changed its ledger here"),
            place.coordinator.context.store.write() as session,
        ):
            judged.remember(session)


@pytest.mark.parametrize(
    "change",
    [{"new_line_hashes": [b"short"]}, {"new_line_hashes": [bytes(32)] * 1001}, {"ledger": pb.LedgerHead(lines=2**60)}],
    ids=["a short hash", "too many", "no head"],
)
def test_a_page_without_its_form_is_refused(place: Place, change: dict[str, Any]) -> None:
    alpha = place.join("alpha")
    page = pb.LedgerPage(ledger=alpha.signed(alpha.ledger.head()), new_line_hashes=alpha.ledger.hashes)
    for name, value in change.items():
        page.ClearField(name)
        page.MergeFrom(pb.LedgerPage(**{name: value}))
    with refused("MESSAGE_MALFORMED\nwhat is said of the ledger has not its form"):
        alpha.federation.Ledger(page, timeout=20)


def test_a_page_that_does_not_continue_the_ledger_changes_nothing(place: Place) -> None:
    alpha = place.join("alpha")
    known = len(alpha.ledger.hashes)

    def show() -> int:
        page = pb.LedgerPage(ledger=alpha.signed(alpha.ledger.head()), new_line_hashes=alpha.ledger.hashes)
        return int(alpha.federation.Ledger(page, timeout=20).lines)

    assert show() == known
    alpha.ledger.hashes[0] = bytes(32)
    alpha.ledger.write()
    assert show() == known
    alpha.ledger.ledger_id = "another"
    assert show() == 0


def test_the_bounds_of_serve_are_those_that_it_has_without_a_word() -> None:
    said = {name: option.default for name, option in inspect.signature(setup.serve).parameters.items()}
    bounds = calls.Bounds()
    names = ("first_message_s", "rate_bytes", "rate_s", "burst", "calls_a_second")
    assert {name: said[name] for name in names} == {name: getattr(bounds, name) for name in names}
    assert bounds.left_s == bounds.rate_s


def test_serve_keeps_the_bounds_that_it_is_given(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[calls.Bounds] = []
    monkeypatch.setattr(server, "serve", lambda state, listen, bounds, **more: given.append(bounds))
    options = {"--first-message-s": 7, "--rate-bytes": 2048, "--rate-s": 60, "--burst": 100, "--calls-a-second": 9}
    words = [str(word) for option in options.items() for word in option]
    done = CliRunner().invoke(main.app, ["serve", "--state", str(tmp_path), *words])
    assert done.exit_code == 0, done.output
    assert given == [calls.Bounds(7, 2048, 60, 100, 9, left_s=60)]
    for name in options:
        refusal = CliRunner().invoke(main.app, ["serve", "--state", str(tmp_path), name, "0"])
        assert refusal.exit_code == 2
        assert f"Invalid value for '{name}'" in refusal.output
    assert len(given) == 1


def test_an_upload_in_small_pieces_that_moves_enough_is_not_ended(place: Place) -> None:
    """It may take longer in all than what each piece may take."""
    place.bound(rate_s=3.0, rate_bytes=8)
    (alpha,) = place.begin(sites=["alpha"])
    update = delta("alpha", 1, SPECS)
    opening = alpha.opening(alpha.next_assignment(), update)
    line = threading.Event()

    def crawl() -> Iterator[Any]:
        yield pb.UploadRequest(open=opening)
        for offset in range(0, len(update.payload), 8):
            line.wait(0.9)
            yield pb.UploadRequest(chunk=tensors_pb2.Chunk(offset=offset, data=update.payload[offset : offset + 8]))
        yield pb.UploadRequest(commit=pb.UploadCommit(manifest_sha256=bytes.fromhex(update.manifest.digest())))

    replies = list(alpha.federation.Upload(crawl(), timeout=60))
    assert alpha.take(replies[-1].receipt).decision == "accepted"


RATE_BYTES, RATE_S = 64 * 1024, 2.0  # 32 KiB/s


@pytest.mark.parametrize(
    ("up", "ends"),
    [pytest.param(8 * 1024, True, id="below the rate"), pytest.param(96 * 1024, False, id="slow and lawful")],
)
def test_an_upload_over_a_slow_line_is_ended_below_the_rate_and_not_above_it(
    place: Place, up: float, ends: bool
) -> None:
    """The whole takes longer than ``RATE_S`` in both cases."""
    specs = (TensorSpec("w", "F32", (96 * 1024,)),)
    place.initial.write_bytes(file_header(specs) + bytes(specs[0].bytes))
    (alpha,) = place.begin(sites=["alpha"])
    update = delta("alpha", 1, specs)
    opening = alpha.opening(alpha.next_assignment(), update)
    place.bound(rate_bytes=RATE_BYTES, rate_s=RATE_S)
    with shaped(place.address, up=up) as address, open_channel(place, own_pems(alpha), address) as channel:
        line = federation_pb2_grpc.FederationStub(channel)  # type: ignore[no-untyped-call]
        began = time.monotonic()
        if ends:
            with pytest.raises(grpc.RpcError) as ended:
                alpha.send(opening, update.payload, chunk=8 * 1024, over=line)
            assert ended.value.code() == grpc.StatusCode.CANCELLED
        else:
            receipt = alpha.send(opening, update.payload, chunk=8 * 1024, over=line)
            assert receipt is not None
            assert receipt.decision == "accepted"
        assert time.monotonic() - began > RATE_S
