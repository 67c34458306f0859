"""Where a program logs to: stderr, one line a record, what strangers can cause bounded."""

import logging
import sys

from wardround.local.rate_limit import LimitedLibrary
from wardround.terminal import OneLine


def log_to_stderr(form: str = "%(asctime)s %(levelname)s %(message)s") -> None:
    """Have this process log there from INFO on."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(OneLine(form))
    handler.addFilter(LimitedLibrary("grpc"))
    logging.basicConfig(level=logging.INFO, handlers=[handler])
