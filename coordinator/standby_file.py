"""A coordinator's keys and settings in one file under a passphrase, from which a standby is made on another machine.

    wardround-standby-v1, a line    16 bytes of salt    12 bytes of nonce    AES-256-GCM of JSON: name -> base64

The key is scrypt's of the passphrase (RFC 7914). In it are config.toml and what lies in authority/ and keys/: whoever
opens it has the federation's identity.
"""

import base64
import json
import os
from pathlib import Path

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.kdf.scrypt import Scrypt

from coordinator.state_directory import Config, State, write_config
from wardround.errors import BadData, NeedsPerson, UsageProblem
from wardround.local import directory
from wardround.local.directory import quoted
from wardround.local.durable import make_folder, write_file
from wardround.local.state_lock import StateLock
from wardround.records.schema import check, parse_toml

HEAD = b"wardround-standby-v1\n"
SALT, NONCE = 16, 12
LEAST_PASSPHRASE = 12  # characters
SETTINGS = "config.toml"
NAMES = (SETTINGS, "authority/certificate.pem", "keys/receipt.pem")  # without which there is no coordinator
MAX_FILE = 1024 * 1024


def exported(state: State, passphrase: bytes) -> bytes:
    """The file for a standby of the coordinator at ``state``.

    Raises:
        NeedsPerson: a standby could not go on: the database or the models are on this machine alone.
        UsageProblem: the passphrase is too short.
    """
    storage = state.config().storage
    if not storage.database or not storage.blobs:
        what = "database is a file" if not storage.database else "models and updates are in the state directory"
        raise NeedsPerson(
            f"the coordinator's {what} on this machine: a standby elsewhere could not go on",
            hint="`coordinator backup`, then `coordinator restore BACKUP --database URL --blobs FOLDER` with a server "
            "and a folder that both machines reach",
        )
    if len(passphrase.decode(errors="replace")) < LEAST_PASSPHRASE:
        raise UsageProblem(f"the passphrase has fewer than {LEAST_PASSPHRASE} characters")
    paths = [state.config_file]
    for folder in (state.authority, state.receipt_key_file.parent):
        paths += sorted(path for path in folder.iterdir() if path.is_file() and not path.name.startswith("."))
    files = {str(path.relative_to(state.root)): base64.b64encode(path.read_bytes()).decode() for path in paths}
    salt, nonce = os.urandom(SALT), os.urandom(NONCE)
    sealed = AESGCM(_key(passphrase, salt)).encrypt(nonce, json.dumps(files).encode(), HEAD)
    return HEAD + salt + nonce + sealed


def imported(state: State, data: bytes, passphrase: bytes, blobs: str = "", *, force: bool = False) -> Config:
    """Make a standby's state directory of what ``exported`` gave. The configuration comes last and completes it.

    Args:
        blobs: the folder of models and updates as this machine names it, if otherwise.
        force: replace the keys and settings of a standby that is there.

    Raises:
        BadData: it is no such file, or under another passphrase; nothing was made.
        NeedsPerson: there is a coordinator at ``state`` already.
        TryAgain: the one that is there runs.
    """
    directory.refuse_other(state.root, "coordinator")
    files = _opened(data, passphrase)
    config = check(Config, parse_toml(files[SETTINGS]), SETTINGS)
    there = state.config_file.exists()
    if there and (not force or state.config().federation != config.federation):
        raise NeedsPerson(
            f"{state.root} holds a coordinator already; nothing was changed",
            hint="another --state; or --force, to give newer keys to a standby of this federation",
        )
    make_folder(state.root)
    with StateLock(state.root, "coordinator standby import"):
        for name, content in files.items():
            if name != SETTINGS:
                make_folder((state.root / name).parent)
                write_file(state.root / name, content)
        gone = {path for folder in ("authority", "keys") for path in (state.root / folder).iterdir()}
        for path in gone - {state.root / name for name in files}:
            path.unlink()  # of an older import: a root's key that was taken away must not stay here
        if blobs:
            config = config.model_copy(update={"storage": config.storage.model_copy(update={"blobs": blobs})})
        write_config(state, config)
    return config


def _opened(data: bytes, passphrase: bytes) -> dict[str, bytes]:
    """Name -> content. Raises BadData: not such a file, or another passphrase."""
    begin = len(HEAD)
    if not data.startswith(HEAD):
        raise BadData("this is no file of `coordinator standby export`")
    salt, nonce = data[begin : begin + SALT], data[begin + SALT : begin + SALT + NONCE]
    try:
        opened = AESGCM(_key(passphrase, salt)).decrypt(nonce, data[begin + SALT + NONCE :], HEAD)
    except (InvalidTag, ValueError):
        raise BadData("the file is damaged, or under another passphrase; nothing was made") from None
    files = {name: base64.b64decode(text) for name, text in json.loads(opened).items()}
    odd = [name for name in files if name != SETTINGS and Path(name).parts[:-1] not in (("authority",), ("keys",))]
    if odd or not set(NAMES) <= files.keys():
        raise BadData("the file has not what a standby needs; nothing was made", hint="export it again")
    return files


def _key(passphrase: bytes, salt: bytes) -> bytes:
    return Scrypt(salt=salt, length=32, n=2**15, r=8, p=1).derive(passphrase)


def next_step(state: State) -> str:
    """What to do after an import."""
    return f"`coordinator serve --state {quoted(state.root)}` waits here until it must take over"
