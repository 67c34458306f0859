"""The attempt under way of each study, on disk: `secure/STUDY.json`, and the models that its sum is checked with.

The file holds 32 random bytes from which all secrets of the attempt follow. It is durable before a message that depends
on it is sent, and belongs into no backup: what a restored one would mask again has a difference without a mask.
"""

import json
import os
from dataclasses import dataclass
from pathlib import Path

from wardround.errors import BadData
from wardround.local import durable
from wardround.records.secure_messages import AttemptRef
from wardround.records.study import STUDY_NAME
from wardround.secure.documents import site_document, site_from_document
from wardround.secure.site import SiteRound
from wardround.signing import canonical


@dataclass(frozen=True)
class Attempt:
    """One attempt as this site stands in it. ``closing``: numbers alone are summed."""

    ref: AttemptRef
    state: SiteRound
    closing: bool


class Attempts:
    """The files in ``folder``, which the gateway's user alone reads."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def load(self, study: str) -> Attempt | None:
        """Raises BadData: the file is damaged."""
        path = self._path(study)
        if not path.exists():
            return None
        try:
            document = json.loads(path.read_bytes())
            ref = AttemptRef(**document["attempt"])
            return Attempt(ref, site_from_document(document["state"]), bool(document["closing"]))
        except (OSError, ValueError, KeyError, TypeError, RecursionError):
            raise BadData(
                f"{path} is damaged: this site's secrets of an attempt under way are lost",
                hint="check the disk; this site is not in that attempt's sum, and takes part again in the next one",
            ) from None

    def save(self, attempt: Attempt) -> None:
        """Durable when this returns."""
        durable.make_folder(self._folder)
        document = {
            "attempt": vars(attempt.ref), "closing": attempt.closing, "state": site_document(attempt.state),
        }  # fmt: skip
        durable.write_file(self._path(attempt.ref.study), canonical.dumps(document))

    def forget(self, study: str) -> None:
        """Erase the secrets, and the models."""
        durable.remove(self._path(study))
        self.keep_models(study, ())

    def model(self, study: str, digest: str) -> Path:
        """Where a model of a study is kept for the check of a sum."""
        durable.make_folder(self._folder)
        return self._path(study).with_suffix(f".{digest[:32]}.safetensors")

    def keep_models(self, study: str, digests: tuple[str, ...]) -> None:
        """Remove the study's other models."""
        kept = {self.model(study, digest).name for digest in digests}
        for path in self._folder.glob(f"{study}.*.safetensors"):
            if path.name not in kept:
                durable.remove(path)

    def _path(self, study: str) -> Path:
        assert STUDY_NAME.fullmatch(study)
        return self._folder / f"{study}.json"


def fresh_root() -> bytes:
    """The secrets of one attempt: drawn for it alone."""
    return os.urandom(32)
