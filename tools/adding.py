"""What must be touched to add one more of a kind: `python -m tools.adding KIND`.

Each list is kept true by a test: one that exists already stands in each of the files that its list names.
"""

import sys
from dataclasses import dataclass


@dataclass(frozen=True)
class Step:
    """One file, and what to do there. ``example`` stands in the file: the same thing for one that exists already."""

    path: str
    what: str
    example: str


@dataclass(frozen=True)
class Kind:
    """How one more of something is added, in order."""

    what: str
    steps: tuple[Step, ...]


KINDS = {
    "refusal": Kind(
        "a code with which the coordinator refuses",
        (
            Step(
                "proto/wardround/v1/federation.proto",
                "a new number, never one that was used; `make proto`",
                "TENSOR_NORM",
            ),
            Step("proto/wardround/refusals.py", "the sentence and the hint that a site's people read", "TENSOR_NORM"),
            Step("coordinator/updates/admission.py", "where it is decided, as a check of its own", "TENSOR_NORM"),
            Step("tests/coordinator/test_admission.py", "what is refused with it, and what just passes", "TENSOR_NORM"),
            Step("docs/operators.md", "what the operator does; docs/troubleshooting.md: the hospital", "TENSOR_NORM"),
        ),
    ),
    "record": Kind(
        "a record that crosses the wire",
        (
            Step(
                "proto/wardround/v1/federation.proto", "the message, with new numbers; `make proto`", "DeclareRequest"
            ),
            Step(
                "proto/wardround/records/assignment.py", "the class and both codecs, or a module beside", "Declaration"
            ),
            Step("tests/wardround/test_assignment.py", "its round trip, and what is refused", "Declaration"),
            Step("coordinator/servicers.py", "the call, with its limits on the first message", "Declaration"),
            Step("site_agent/gateway/connection/client.py", "the site's side of the call", "Declaration"),
            Step(
                "tools/fuzz/coordinator_doors.py",
                "a door for the fuzzer, if the bytes are foreign there",
                "DeclareRequest",
            ),
        ),
    ),
    "ledger": Kind(
        "a type of ledger entry",
        (
            Step("proto/wardround/records/ledger/entries.py", "the class, strict in its fields", "class ResendEntry"),
            Step("tests/wardround/golden/ledger.jsonl", "a line of it, as it must stay on disk", '"resend"'),
            Step(
                "site_agent/gateway/exit/ledger_state.py",
                "what it changes in the ledger's state, if anything",
                "ResendEntry",
            ),
            Step("site_agent/audit/chain.py", "what a verifier must hold against it, if anything", "ResendEntry"),
            Step("site_agent/audit/show.py", "how it reads in `audit show`", "ResendEntry"),
            Step(
                "tools/verify_ledger.py",
                "the same for the second verifier; its SHA-256 in docs/auditors.md",
                '"resend"',
            ),
            Step("tools/evidence_tamper.py", "one in the ledgers that are changed in every way", '"resend"'),
            Step("docs/auditors.md", "its fields, in the table of entries", "`resend`"),
        ),
    ),
    "command": Kind(
        "a command of `site-agent` that asks the running service",
        (
            Step("site_agent/cli/study.py", "the command: it asks and prints; or a module beside", "Withdraw"),
            Step("site_agent/gateway/requests.py", "its request and its answer", "class Withdraw"),
            Step("site_agent/gateway/service.py", "where the service answers it", "Withdraw"),
            Step("site_agent/gateway/commands.py", "what it does, with or without the service", "def withdraw"),
            Step("tests/site_agent/test_state_records.py", "the round trip of its request", "Withdraw"),
            Step("tests/site_agent/test_cli.py", "what a person reads, also when it fails", "withdraw"),
            Step("docs/hospital-it.md", "when to use it", "site-agent withdraw"),
        ),
    ),
    "method": Kind(
        "a federated method",
        (
            Step(
                "fl_algorithms/methods/feddyn/__init__.py",
                "its card, and its settings with their ranges; no torch. The registry finds the folder",
                "ROWS",
            ),
            Step("fl_algorithms/methods/feddyn/client.py", "the client, as long as the paper's idea", "def feddyn"),
            Step(
                "fl_algorithms/methods/feddyn/server.py", "its server aggregator, if that is not the mean", "def feddyn"
            ),
            Step("tests/fl_algorithms/test_feddyn.py", "its equations against a slow version, and its promise", "slow"),
            Step("docs/methods.md", "`python -m tools.methods_page` writes it", "feddyn"),
        ),
    ),
}


def main() -> int:
    names = sys.argv[1:]
    if len(names) != 1 or names[0] not in KINDS:
        print(f"usage: python -m tools.adding {'|'.join(KINDS)}", file=sys.stderr)
        return 64
    kind = KINDS[names[0]]
    print(f"To add {kind.what}:\n")
    for number, step in enumerate(kind.steps, 1):
        print(f"{number}. {step.path}\n   {step.what}. One that is there: {step.example}")
    print("\nThen: make check")
    return 0


if __name__ == "__main__":
    sys.exit(main())
