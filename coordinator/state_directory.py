"""The state directory: its paths, its configuration file, its receipt key, and how one is made.

<state>/config.toml                        federation, address, plug-ins that may run here, lifetimes of certificates
<state>/coordinator.db                     what it remembers
<state>/authority/                         who is who; see ``coordinator.members.authority``
<state>/keys/receipt.pem                   signs receipts
<state>/blobs/{models,uploads}/            tensors
<state>/{lock,control.sock,read.sock}      of the running service
<state>/dashboard/users.json               who may log in to the dashboard
"""

import ipaddress
import re
from dataclasses import dataclass
from pathlib import Path

from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from pydantic import field_validator

from coordinator.members.authority import Authority, Lifetimes
from coordinator.requests import READ_SOCKET
from coordinator.storage import database
from wardround.errors import BadData, NeedsPerson, UsageProblem
from wardround.local import directory
from wardround.local.directory import quoted
from wardround.local.durable import make_folder, remove, sweep, write_file
from wardround.records.plugins import PluginTable
from wardround.records.schema import Strict, check, read_toml, toml_bytes
from wardround.signing.certificates import FEDERATION_NAME, private_key, refuse_readable

SNAPSHOT_S = 86400  # within which a backup is copied
_HOST = re.compile(
    r"(?=.{1,253}$)[A-Za-z0-9]([A-Za-z0-9-]{0,61}[A-Za-z0-9])?(\.[A-Za-z0-9]([A-Za-z0-9-]{0,61}[A-Za-z0-9])?)*"
)


class Config(Strict):
    """``config.toml``."""

    federation: str
    address: str  # HOST:PORT that the sites connect to
    plugins: PluginTable = PluginTable()  # whose code may run here beside ours
    certificates: Lifetimes = Lifetimes()

    @field_validator("federation")
    @classmethod
    def _federation(cls, name: str) -> str:
        if not FEDERATION_NAME.fullmatch(name):
            raise ValueError(f"{name[:80]!r} is not a name of 1 to 63 of a-z, 0-9, . and - (. and - not at either end)")
        return name

    @field_validator("address")
    @classmethod
    def _address(cls, address: str) -> str:
        split_address(address)
        return address


@dataclass(frozen=True)
class State:
    """The paths of one state directory."""

    root: Path

    @property
    def config_file(self) -> Path:
        return self.root / "config.toml"

    @property
    def control(self) -> Path:
        return self.root / "control.sock"

    @property
    def read(self) -> Path:
        """The socket on which questions alone are answered."""
        return self.root / READ_SOCKET

    @property
    def database(self) -> Path:
        return self.root / "coordinator.db"

    @property
    def authority(self) -> Path:
        return self.root / "authority"

    @property
    def receipt_key_file(self) -> Path:
        return self.root / "keys" / "receipt.pem"

    @property
    def blobs(self) -> Path:
        return self.root / "blobs"

    @property
    def snapshots(self) -> str:
        """How the folders begin that a backup is copied from."""
        return ".backup-"

    def sweep(self, now_s: float) -> None:
        """Remove what killed processes left half written, and snapshots that nobody can still copy from."""
        for folder in (self.root, self.authority, self.receipt_key_file.parent):
            sweep(folder)
        for folder in self.root.glob(f"{self.snapshots}*"):
            if now_s - folder.stat().st_mtime > SNAPSHOT_S:
                remove(folder)

    def config(self) -> Config:
        """What ``config.toml`` says.

        Raises:
            NeedsPerson: there is no coordinator here.
            BadData: the file is damaged, or a value is not valid.
        """
        if not directory.exists(self.config_file):
            raise NeedsPerson(
                f"{self.root} holds no coordinator",
                hint=f"make one: `coordinator init --state {quoted(self.root)} --federation NAME --address HOST:PORT`",
            )
        return check(Config, read_toml(self.config_file), str(self.config_file))

    def receipt_key(self) -> Ed25519PrivateKey:
        """The key that signs receipts.

        Raises:
            BadData: the file is not an Ed25519 key.
            NotPermitted: others may read it.
        """
        path = self.receipt_key_file
        refuse_readable(path)
        try:
            pem = path.read_bytes()
        except OSError as error:
            raise BadData(f"{path}: {error.strerror}", hint="restore the state directory from a backup") from None
        key = private_key(pem, str(path))
        if not isinstance(key, Ed25519PrivateKey):
            raise BadData(f"{path}: not an Ed25519 key")
        return key


def create(state: State, federation: str, address: str, now_s: float) -> Authority:
    """Make a coordinator at ``state``: keys, database, configuration. The configuration comes last and completes it.

    Raises:
        NeedsPerson: there is one already.
        UsageProblem: the federation's name or the address is not valid.
    """
    directory.refuse_other(state.root, "coordinator")
    if state.config_file.exists():
        raise NeedsPerson(
            f"{state.root} holds a coordinator already; nothing was changed",
            hint=f"`coordinator serve --state {quoted(state.root)}`, or choose another --state",
        )
    try:
        config = check(Config, {"federation": federation, "address": address}, "command line")
    except BadData as error:
        raise UsageProblem(error.message, hint="as in --federation north --address fed.example.org:8443") from None
    make_folder(state.root)
    authority = Authority.create(state.authority, config.federation, now_s)
    make_folder(state.receipt_key_file.parent)
    write_file(state.receipt_key_file, _pem(Ed25519PrivateKey.generate()))
    make_folder(state.blobs)
    database.upgrade(state.database)
    about = b"# address is HOST:PORT, as the sites connect to it\n"
    write_file(state.config_file, about + toml_bytes(config.model_dump(exclude_defaults=True)))
    return authority


def split_address(address: str) -> tuple[str, int]:
    """HOST and PORT of "HOST:PORT"; an IPv6 address stands in brackets.

    Raises:
        ValueError: not of that form.
    """
    host, colon, port = address.rpartition(":")
    if not colon or not port.isdecimal() or not 1 <= int(port) <= 65535:
        raise ValueError(f"{address[:80]!r} is not HOST:PORT")
    bare = host.removeprefix("[").removesuffix("]")
    try:
        ipaddress.ip_address(bare)
    except ValueError:
        if not _HOST.fullmatch(host):
            raise ValueError(f"{host[:80]!r} is neither a host name nor an IP address") from None
    return bare, int(port)


def _pem(key: Ed25519PrivateKey) -> bytes:
    return key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
