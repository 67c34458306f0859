"""An opened state directory: what the service, and a command without one, both work with.

The service builds its gRPC server on it (``coordinator.server``), the commands their answers
(``coordinator.administration``).
"""

from collections.abc import Callable

from coordinator.journal import Journal
from coordinator.members import keys
from coordinator.members.authority import Authority
from coordinator.members.certificate_status import CertificateStatus
from coordinator.members.enrolment import Enrolment
from coordinator.members.instances import Instances
from coordinator.state_directory import State
from coordinator.storage.blobs import Blobs
from coordinator.storage.database import Store
from coordinator.studies.engine import Engine
from wardround.errors import NeedsPerson, WardroundError


class Context:
    """The parts of one coordinator, each made once. The caller holds the state directory's lock.

    Args:
        wall_clock: Unix time, for what is recorded and for certificates. ``monotonic``: for deadlines.
        fatal: called with an error after which the process must end.

    Raises:
        NeedsPerson: no coordinator here, or its database is damaged or of another version, or a restore of it is not
            finished.
        LedByAnother: another coordinator leads on its database.
        BadData: its keys or configuration are not valid.
    """

    def __init__(
        self,
        state: State,
        *,
        wall_clock: Callable[[], float],
        monotonic: Callable[[], float],
        fatal: Callable[[BaseException], None],
        store: Store | None = None,
        finishes_restore: bool = False,
    ) -> None:
        """
        Args:
            store: its database, if this process leads on it already.
            finishes_restore: it is opened to finish a restore, which nobody else may before that is done.
        """
        self.state = state
        self.config = state.config()
        self.wall_clock = wall_clock
        self.authority = Authority(state.authority, self.config.federation)
        self.receipt_key = state.receipt_key()
        self.store = store or leading_store(state)
        try:
            if self.store.shared:
                keys.refuse_others(self.store, self.receipt_key.public_key(), self.authority)
            if not finishes_restore and Journal(self.store, wall_clock).unfinished_restore() is not None:
                raise NeedsPerson(
                    f"{state.root} was restored from a backup, and that is not finished: it waits for a second person, "
                    "or was cut off",
                    hint="`coordinator restore` with the same backup and --state goes on; where it waits, somebody "
                    "with another login gives it",
                )
            state.refuse_unmounted(self.config.storage)
            self.blobs = Blobs(state.blob_folder(self.config.storage), state.objects(self.config.storage))
            self.blobs.sweep()
            state.sweep(wall_clock())
            self.certificate_status = CertificateStatus(self.store, self.config.federation, wall_clock)
            self.certificate_status.load()
            self.instances = Instances(wall_clock)
            self.enrolment = Enrolment(
                self.store, self.authority, self.certificate_status, self.config.address, self.config.certificates
            )
            self.engine = Engine(
                self.store, self.blobs, fatal=fatal, wall_clock=wall_clock, monotonic=monotonic,
                plugins=self.config.plugins, federation=self.config.federation,
            )  # fmt: skip
        except BaseException:
            self.store.close()
            raise

    def close(self) -> None:
        """Close the database."""
        self.blobs.close()
        self.store.close()


def leading_store(state: State, fatal: Callable[[BaseException], None] = lambda error: None) -> Store:
    """The database of a state directory, on which this process leads now. The caller holds the directory's lock: a
    service of the same directory would lose its lease.

    Args:
        fatal: called when it does not any more; without one, whatever is done next fails.

    Raises:
        NeedsPerson: it is damaged or of another version.
        LedByAnother: another coordinator leads on it.
    """
    store = Store(state.place(state.config().storage))
    try:
        store.refuse_other_schema()
        store.lead(fatal)
    except BaseException:
        store.close()
        raise
    return store


def raise_fatal(error: BaseException) -> None:
    """``fatal`` for a command without a service: the error ends the command."""
    raise error if isinstance(error, WardroundError) else RuntimeError("the engine failed") from error
