"""The state directory: its paths, its configuration file, its receipt key, and how one is made.

<state>/config.toml                        federation, address, plug-ins that may run here, lifetimes of certificates,
                                           which commands need a second person
<state>/coordinator.db                     what it remembers, unless a PostgreSQL server does
<state>/authority/                         who is who; see ``coordinator.members.authority``
<state>/keys/receipt.pem                   signs receipts
<state>/keys/database-password             of that server, if it wants one
<state>/blobs/{models,uploads}/            tensors, unless [storage] names another folder
<state>/{lock,control.sock,read.sock}      of the running service
<state>/dashboard/users.json               who may log in to the dashboard
"""

import ipaddress
import re
import socket
from dataclasses import dataclass
from pathlib import Path

from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from pydantic import Field, field_validator

from coordinator.members.authority import Authority, Lifetimes
from coordinator.requests import READ_SOCKET
from coordinator.second_person import SecondPerson
from coordinator.storage import database, objects, server_url
from coordinator.storage.database import Place
from coordinator.storage.lease import LONGEST_S, Server
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


class Storage(Strict):
    """[storage] of the configuration.

    Attributes:
        database: the address of a PostgreSQL database, without a password; "" for a file in the state directory.
        lease_s: after which a standby takes over from a leader that is not heard of.
        blobs: the folder of models and updates, which a standby shares, or the URL of an object store; "" for a folder
            in the state directory.
    """

    database: str = ""
    lease_s: float = Field(default=30, ge=1, le=LONGEST_S)
    blobs: str = ""

    @field_validator("database")
    @classmethod
    def _database(cls, url: str) -> str:
        if url:
            try:
                server_url.checked(url)
            except UsageProblem as error:
                raise ValueError(error.message) from None
        return url

    @field_validator("blobs")
    @classmethod
    def _blobs(cls, folder: str) -> str:
        if objects.is_url(folder):
            try:
                objects.refuse_unfit(folder)
            except UsageProblem as error:
                raise ValueError(error.message) from None
        elif folder and not Path(folder).is_absolute():
            raise ValueError(f"{folder[:80]!r} is no absolute path of a folder")
        return folder


class Config(Strict):
    """``config.toml``."""

    federation: str
    address: str  # HOST:PORT that the sites connect to
    plugins: PluginTable = PluginTable()  # whose code may run here beside ours
    certificates: Lifetimes = Lifetimes()
    storage: Storage = Storage()
    second_person: SecondPerson | None = None  # which commands need one; None of a configuration that does not say

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
    def users_file(self) -> Path:
        """Who may log in to the dashboard, unless that has a folder of its own."""
        return self.root / "dashboard" / "users.json"

    @property
    def control(self) -> Path:
        return self.root / "control.sock"

    @property
    def read(self) -> Path:
        """The socket on which questions alone are answered."""
        return self.root / READ_SOCKET

    @property
    def database(self) -> Path:
        """Where no server is named."""
        return self.root / "coordinator.db"

    @property
    def password_file(self) -> Path:
        """The database's, if it wants one."""
        return self.receipt_key_file.parent / "database-password"

    def place(self, storage: Storage) -> Place:
        """Where the database is."""
        if not storage.database:
            return self.database
        holder = f"{socket.gethostname()}:{self.root.resolve()}"
        return Server(storage.database, self.password_file, holder, storage.lease_s)

    def blob_folder(self, storage: Storage) -> Path:
        """Where models and updates are on a disk."""
        return self.blobs if not storage.blobs or objects.is_url(storage.blobs) else Path(storage.blobs)

    def refuse_unmounted(self, storage: Storage) -> None:
        """Raises NeedsPerson: the folder that a standby shares is not there; an empty one would be no other one."""
        folder = self.blob_folder(storage)
        if folder != self.blobs and not (folder / "models").is_dir():
            raise NeedsPerson(
                f"{folder} has no models and updates, which [storage] of {self.config_file} says are there",
                hint="is it mounted?",
            )

    def objects(self, storage: Storage) -> objects.ObjectStore | None:
        """Where they are beside that, if anywhere. Raises as ``ObjectStore``."""
        return objects.ObjectStore(storage.blobs) if objects.is_url(storage.blobs) else None

    @property
    def authority(self) -> Path:
        return self.root / "authority"

    @property
    def receipt_key_file(self) -> Path:
        return self.root / "keys" / "receipt.pem"

    @property
    def blobs(self) -> Path:
        """Where no other folder is named."""
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


def create(
    state: State,
    federation: str,
    address: str,
    now_s: float,
    storage: Storage = Storage(),
    password: str | None = None,
) -> Authority:
    """Make a coordinator at ``state``: keys, database, configuration. The configuration comes last and completes it.

    Args:
        storage: of the configuration, where it is not as by default. password: of the database that it names.

    Raises:
        NeedsPerson: there is one already, here or in that database.
        UsageProblem: the federation's name or an address is not valid.
        Unavailable, NotPermitted: that database cannot be reached, or lets us not in.
    """
    refuse_present(state)
    try:
        values = {"federation": federation, "address": address, "storage": storage.model_dump()}
        config = check(Config, values, "command line")
    except BadData as error:
        raise UsageProblem(error.message, hint="as in --federation north --address fed.example.org:8443") from None
    make_folder(state.root)
    make_folder(state.receipt_key_file.parent)
    keep_password(state, password)
    place = state.place(config.storage)
    database.refuse_used(place)
    authority = Authority.create(state.authority, config.federation, now_s)
    write_file(state.receipt_key_file, _pem(Ed25519PrivateKey.generate()))
    make_folder(state.blob_folder(config.storage) / "models")
    database.upgrade(place)
    write_config(state, config)
    return authority


def storage_from(database_url: str, blobs: str) -> Storage:
    """[storage] as the command line says it. Raises UsageProblem: not an address of a database or an object store."""
    if database_url:
        server_url.checked(database_url)
    return Storage(database=database_url, blobs=blobs_from(blobs))


def blobs_from(place: str) -> str:
    """A folder with its whole path, or an object store's URL. Raises UsageProblem: no such URL."""
    if objects.is_url(place):
        objects.refuse_unfit(place)
        return place
    return str(Path(place).absolute()) if place else ""


def refuse_present(state: State) -> None:
    """Raises NeedsPerson: there is a coordinator at ``state`` already, or another program."""
    directory.refuse_other(state.root, "coordinator")
    if state.config_file.exists():
        raise NeedsPerson(
            f"{state.root} holds a coordinator already; nothing was changed",
            hint=f"`coordinator serve --state {quoted(state.root)}`, or choose another --state",
        )


def keep_password(state: State, password: str | None) -> None:
    """Put a database's password where the service reads it; None leaves what is there."""
    if password is not None:
        write_file(state.password_file, password.encode() + b"\n")


def write_config(state: State, config: Config) -> None:
    """Write ``config.toml``, which completes a state directory."""
    about = b"# address is HOST:PORT, as the sites connect to it\n"
    write_file(state.config_file, about + toml_bytes(config.model_dump(exclude_defaults=True)))


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
