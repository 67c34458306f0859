"""What must be touched to add one more of a kind: `python -m tools.adding KIND`.

Each list is kept true by a test: one that exists already is mentioned in each of the files that its list names.
"""

import sys
from dataclasses import dataclass


@dataclass(frozen=True)
class Kind:
    """How one more of something is added.

    Attributes:
        steps: file or folder, and what to do there.
        example: something of the kind that exists: each file of ``steps`` has this word in it.
    """

    what: str
    steps: tuple[tuple[str, str], ...]
    example: str


KINDS = {
    "refusal": Kind(
        "a refusal code, that the coordinator answers an update or a call with",
        (
            (
                "proto/wardround/v1/federation.proto",
                "a new number in `RefusalCode`, never one that was used; then `make proto`",
            ),
            ("proto/wardround/refusals.py", "the sentence and the hint that a site's people read for it"),
            ("coordinator/updates/admission.py", "where it is decided, as a numbered check of its own"),
            ("tests/coordinator/test_admission.py", "the test that is refused with it, and one that just passes"),
            (
                "docs/operators.md",
                "what the operator does when it is seen; docs/troubleshooting.md has what a hospital does",
            ),
        ),
        "TENSOR_NORM",
    ),
}


def main() -> int:
    names = sys.argv[1:]
    if len(names) != 1 or names[0] not in KINDS:
        print(f"usage: python -m tools.adding {'|'.join(KINDS)}", file=sys.stderr)
        return 64
    kind = KINDS[names[0]]
    print(f"To add {kind.what}:\n")
    for number, (path, step) in enumerate(kind.steps, 1):
        print(f"{number}. {path}\n   {step}")
    print(f"\n`{kind.example}` is in all of them: `git grep -n {kind.example}`. Then: make check")
    return 0


if __name__ == "__main__":
    sys.exit(main())
