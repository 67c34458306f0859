"""Which of a study's models a site keeps, by kind. Light to import: the commands' help names them."""

from typing import Literal, get_args

CheckpointKind = Literal["selected", "best_local", "fine_tuned", "latest", "best_global", "alone"]
CHECKPOINT_KINDS: tuple[CheckpointKind, ...] = get_args(CheckpointKind)
