"""The trainer: whether it answers, what isolates it, what it trains on, and whether its data is there."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from wardround.checkup import GIB, MIB, Finding, of_error, ok, problem, warning
from wardround.errors import WardroundError
from wardround.records.trainer import FilesStat, Status

BASE_BYTES = 900 * MIB  # of a worker with torch, before it has a model
MODEL_TIMES = 4.5  # a round takes so many times its model, with the plainest optimizer
SHM = "/dev/shm"  # noqa: S108  what is looked at
SHM_EACH = 64 * MIB  # of a process that reads images ahead
NAMESPACE_FIX = "allow user namespaces (`sysctl user.max_user_namespaces`), or run it as its unit, `PrivateNetwork=yes`"
LANDLOCK_FIX = "a newer kernel with Landlock has it; two users (deploy/README.md) keep the two apart meanwhile"
MEASURES = {  # of the trainer's isolation, by the names of `site_agent.trainer.isolation.kernel`: in words, and the fix
    "no_namespace": ("a network namespace of its own (this system forbids it)", NAMESPACE_FIX),
    "no_system_call_filter": (
        "the filter of system calls: it can reach into this user's processes and terminals",
        "allow seccomp to this process: its container's or unit's settings forbid it",
    ),
    "reads_processes": (
        "Landlock: it can read this user's other processes, where they do not hide their memory",
        LANDLOCK_FIX,
    ),
    "abstract_sockets": (
        "Landlock from version 6: abstract Unix sockets of this machine are within its reach",
        LANDLOCK_FIX,
    ),
    "signals": ("Landlock from version 6: it can send signals to this user's other processes", LANDLOCK_FIX),
    "shared_session": (
        "a session of its own: it shares one with whoever started it",
        "start it as a service, or not as the first of a group of processes",
    ),
}


def words(measure: str) -> str:
    """A measure that is not in force, in words."""
    return MEASURES.get(measure, ("a measure that this version does not know", ""))[0]


def answers(status: Status | None, why: str) -> list[Finding]:
    """Whether the trainer answers, and what isolates it. ``why``: as the service says it, where it does not answer."""
    if status is None:
        fix = "`systemctl restart wardround-trainer`, or start `site-agent run --only trainer` as its user"
        return [problem("trainer", f"it does not answer: {why or 'it is stopped, hangs, or has ended'}", fix)]
    if status.isolation == "none":
        return [
            problem(
                "isolation",
                "none: the process that reads patients could reach the network",
                f"{NAMESPACE_FIX}; or allow seccomp",
            )
        ]
    missing = [
        warning("isolation", f"not in force: {words(name)}", MEASURES.get(name, ("", "update site-agent"))[1])
        for name in status.missing
    ]
    return [ok("isolation", status.isolation), *missing]


@dataclass(frozen=True)
class Cards:
    """The GPUs of this machine by their device files: how many there are, and whether this user may use them."""

    count: int
    usable: bool


def gpu(wanted: str, device: str, cards: Cards) -> Finding:
    """Whether the trainer has what it was told to train on.

    Args:
        wanted: WARDROUND_DEVICE; "" where it is not set.
        device: what the trainer says of itself.
    """
    if device.startswith("cuda"):
        if cards.count:
            return ok("device", f"trains on {device}")
        return problem(
            "device",
            f"the trainer was started with {device}, and no GPU is on this machine now",
            "`nvidia-smi`; when it shows the card again, `systemctl restart wardround-trainer`",
        )
    if wanted == "cuda" and not cards.count:
        return problem("device", "WARDROUND_DEVICE is cuda, and no GPU is on this machine", "`nvidia-smi` says why")
    if wanted == "cuda" and not cards.usable:
        return problem(
            "device",
            "WARDROUND_DEVICE is cuda, and this user may not use the GPU's device files",
            "give the unit the card again (deploy/README.md, a GPU for the trainer): a `daemon-reload` takes it away "
            "where a drop-in is missing",
        )
    if cards.count:
        return ok("device", f"trains on {device}; {cards.count} GPU is not used: `--device cuda`")
    return ok("device", f"trains on {device}")


def cards(devices: Path = Path("/dev")) -> Cards:
    """Look at the device files."""
    import os

    found = [path for path in devices.glob("nvidia[0-9]*") if path.name[6:].isdigit()]
    return Cards(len(found), all(os.access(path, os.R_OK | os.W_OK) for path in found))


def shared_memory(free: int | None, workers: int) -> Finding:
    """Whether /dev/shm has room for what ``workers`` processes that read ahead hand over; None: there is none."""
    needed = workers * SHM_EACH
    if free is None:
        text = "there is no /dev/shm that this user may write"
        fix = "mount a tmpfs there (a container: `--shm-size 1g`)"
        return problem(SHM, text, fix) if workers else warning(SHM, text, fix)
    if free < needed:
        return problem(
            SHM,
            f"{free / MIB:.0f} MiB free, and {workers} workers take {needed / MIB:.0f}",
            "make it larger (a container: `--shm-size 1g`), or take fewer: `--workers 0`",
        )
    return ok(SHM, f"{free / MIB:.0f} MiB free")


def memory(available: int, largest: int) -> Finding:
    """Whether a round of the largest approved model (in bytes) has room in memory."""
    needed = int(BASE_BYTES + MODEL_TIMES * largest)
    text = f"{available / GIB:.1f} GiB free; a round here takes about {needed / GIB:.1f} GiB"
    if available < needed:
        return warning("memory", text, "end other programs, or give this machine more")
    return ok("memory", text)


def available_memory(info: Path = Path("/proc/meminfo")) -> int | None:
    """What the kernel would give to a new program; None where it does not say."""
    for line in info.read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return None


def data(names: Iterable[str], stat: Callable[[str], FilesStat], *, listens: bool) -> list[Finding]:
    """Whether the files of each data that has a name are there for whoever reads them. Values are not looked at.

    Args:
        stat: what the trainer says of one's files.
        listens: whether the trainer's listener runs; else it is this user who looks.
    """
    return [_data(name, stat, listens) for name in names] or [
        warning("data", "no data has a name here", "`site-agent data add NAME`, or `site-agent setup`")
    ]


def _data(name: str, stat: Callable[[str], FilesStat], listens: bool) -> Finding:
    try:
        found = stat(name)
    except WardroundError as error:
        return of_error("data", error)
    if found.missing:
        return problem(
            "data",
            f"of `{name}`, what data.toml calls {', '.join(found.missing)} is not there",
            f"restore it (is the disk mounted?), or name it anew: `site-agent data add {name} --replace`",
        )
    if found.unreadable and listens:
        return problem(
            "data",
            f"of `{name}`, the trainer's user may not read what data.toml calls {', '.join(found.unreadable)}",
            "give its group the right to read the files and to enter their folders",
        )
    if found.unreadable:
        return warning(
            "data", f"only the trainer's user may look at `{name}`", "start the trainer, then give the command again"
        )
    return ok("data", f"`{name}` is there")
