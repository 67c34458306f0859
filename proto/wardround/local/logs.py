"""Where a program logs to: stderr, one line a record, what strangers can cause bounded.

A line is text, or one JSON object with the same words, for those who collect logs. Child processes log as their parent.
"""

import datetime
import json
import logging
import os
import sys
from typing import Literal

from wardround.local.rate_limit import LimitedLibrary
from wardround.terminal import OneLine, escaped

FORMAT = "WARDROUND_LOG_FORMAT"
TEXT = "%(asctime)s %(levelname)s %(message)s"


class JsonLines(logging.Formatter):
    """A record is one JSON object: time (RFC 3339, UTC), level, logger, message, and the exception's lines if any.

    Its words are those of the text form, and no more: what the record was made of does not stand in it apart.
    """

    def __init__(self, part: str = "") -> None:
        super().__init__()
        self._part = part

    def format(self, record: logging.LogRecord) -> str:
        """The record's line."""
        at = datetime.datetime.fromtimestamp(record.created, datetime.UTC).isoformat(timespec="milliseconds")
        said = {
            "time": at.replace("+00:00", "Z"), "level": record.levelname.lower(), "logger": record.name,
            "message": escaped(record.getMessage()),
        }  # fmt: skip
        if self._part:
            said["part"] = self._part
        if record.exc_info:
            said["exception"] = "\n".join(map(escaped, self.formatException(record.exc_info).splitlines()))
        return json.dumps(said)


def use_format(name: Literal["text", "json"]) -> None:
    """Log so from now on, here and in the processes that are started from here."""
    os.environ[FORMAT] = name


def log_to_stderr(part: str = "") -> None:
    """Have this process log there from INFO on.

    Args:
        part: of the program, where its lines stand among another process's; such lines have no time of their own.
    """
    handler = logging.StreamHandler(sys.stderr)
    as_json = os.environ.get(FORMAT) == "json"
    handler.setFormatter(JsonLines(part) if as_json else OneLine(f"{part}: %(message)s" if part else TEXT))
    for library in ("grpc", "uvicorn"):
        handler.addFilter(LimitedLibrary(library))
    logging.basicConfig(level=logging.INFO, handlers=[handler])
