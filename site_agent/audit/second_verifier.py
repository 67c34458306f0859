"""Where the second verifier's program lies: it is handed out here, and never imported.

There is one copy of it, ``tools/verify_ledger.py``. The wheel carries that file as ``verify_ledger.txt`` beside this
module (``force-include`` in pyproject.toml). An editable installation has no such file: there it is read from the
``tools`` folder beside the package, in the same checkout.
"""

from pathlib import Path

from wardround.errors import NeedsPerson

INSTALLED = Path(__file__).with_name("verify_ledger.txt")
CHECKOUT = Path(__file__).parents[2] / "tools" / "verify_ledger.py"


def program(places: tuple[Path, ...] = (INSTALLED, CHECKOUT)) -> bytes:
    """The program's bytes, from the first place where it lies.

    Raises:
        NeedsPerson: the installation lacks it.
    """
    for place in places:
        if place.is_file():
            return place.read_bytes()
    raise NeedsPerson(
        f"this installation of wardround lacks the second verifier: there is no {places[0]}",
        hint="install wardround again from its wheel, or take tools/verify_ledger.py from the release",
    )
