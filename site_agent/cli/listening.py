"""Where the trainer has a user of its own: what only that user may read is asked of its listener."""

import os
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from wardround.errors import NeedsPerson

if TYPE_CHECKING:
    from site_agent import handoff
    from wardround.records import trainer as records

A = TypeVar("A", bound="records.Answer")


def is_open(state: Path) -> bool:
    """Whether this user may read the models, which belong to the trainer's user."""
    folder = state / "studies"
    return not folder.exists() or os.access(folder, os.R_OK | os.X_OK)


def ask_listener(state: Path, request: "records.Request[A]", progress: "handoff.OnProgress | None" = None) -> A:
    """What the trainer's listener answers. Raises NeedsPerson: it does not run."""
    from site_agent import handoff

    trainer = handoff.Trainer(state)
    if not trainer.available():
        raise NeedsPerson(
            f"{state / 'studies'} belongs to the trainer's user, and the trainer does not run",
            hint="start it: `site-agent run --only trainer`; or give this command as that user",
        )
    return trainer.ask(request, progress)


def absolute(path: Path) -> Path:
    """From the root on; symbolic links stay, so that a link may be pointed at next month's table."""
    return Path(os.path.abspath(path))  # noqa: PTH100  Path.resolve would follow links
