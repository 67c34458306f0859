"""What comes of a moment without a file descriptor is told from what stays wrong."""

import errno
import os
from pathlib import Path

import pytest

from wardround.errors import BadData, CannotWrite, NeedsPerson
from wardround.local import descriptors, durable

FULL = OSError(errno.EMFILE, os.strerror(errno.EMFILE))


def test_an_error_that_was_raised_for_it_is_known(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert descriptors.ran_out(FULL)
    assert descriptors.ran_out(OSError(errno.ENFILE, os.strerror(errno.ENFILE)))
    monkeypatch.setattr(durable, "_create", lambda path, mode: (_ for _ in ()).throw(FULL))
    with pytest.raises(CannotWrite) as named:
        durable.write_file(tmp_path / "file", b"")
    assert descriptors.ran_out(named.value)
    with pytest.raises(NeedsPerson) as hidden:
        hide(named.value)
    assert descriptors.ran_out(hidden.value)


def hide(error: CannotWrite) -> None:
    try:
        raise error
    except CannotWrite:
        raise NeedsPerson("the certificate cannot be renewed") from None


def test_other_errors_are_not() -> None:
    assert not descriptors.ran_out(OSError(errno.ENOENT, os.strerror(errno.ENOENT)))
    assert not descriptors.ran_out(BadData("damaged"))
