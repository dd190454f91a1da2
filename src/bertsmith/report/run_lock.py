"""One run in one folder: who holds it says so in `run.lock`, and shows that he is alive.

The file holds JSON: the host, the process and when it started, a random token, and a counter that
a thread moves on every few seconds. Whether the holder is alive is seen in one of two ways:

- On the same machine and in the same space of process numbers, by its number and its start, so
  that another process that was given the same number later is not taken for it.
- From elsewhere, and where the file cannot be read, by watching whether the file changes. Clocks
  of two machines are never compared.

The counter is written in place and into the very file that was found to be ours. A holder that
was stopped for long, and whose lock was taken over meanwhile, so writes into a file that nobody
reads any more. That also needs no space on a full disk.
"""

import errno
import json
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, fields
from datetime import UTC, datetime
from pathlib import Path

from bertsmith.durable import flush
from bertsmith.errors import UserError
from bertsmith.say import Say

LOCK_FILE = "run.lock"
TAKEOVER_FILE = f"{LOCK_FILE}.takeover"
"""Held for the moment of a takeover: of all who see the same stale lock, one replaces it."""

RENEW_SECONDS = 5.0
STALE_SECONDS = 30.0
"""A lock of another machine that has not moved for so long is taken over."""

BIRTH_SECONDS = 1.0
"""In which a lock that names nobody gets its content, if it is one that is just being made."""

POLL_SECONDS = 0.25
COUNTER_DIGITS = 12
COUNTER_AT_BYTE = len('{"counter": "')
MAX_LOCK_BYTES = 1 << 16
"""More is no lock of ours."""

NO_HARD_LINKS = {errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK}


class LostLockError(UserError):
    """The folder is another run's by now: nothing more may be written there."""


@dataclass(frozen=True, kw_only=True)
class Holder:
    """Who holds a lock, as its file says."""

    host: str
    boot_id: str
    """Of the kernel that is running; empty where the system has none."""

    pid_namespace: str
    """In which its process number counts; containers have their own. Empty where there is none."""

    pid: int
    started_ticks: int | None
    """When the process began, after the machine did; None where the system does not say."""

    since: str
    """For people alone: when the lock was taken, in UTC."""

    token: str
    """Random: equal for no two locks."""

    @property
    def name(self) -> str:
        """In words."""
        return f"process {self.pid} on {self.host}, since {self.since}"


class RunLock:
    """A lock that is held; made by `hold_run_lock`."""

    def __init__(self, path: Path, holder: Holder, say: Say, *, renew_seconds: float) -> None:
        """Nothing is written yet."""
        self._path, self._holder, self._say = path, holder, say
        self._renew_seconds = renew_seconds
        self._is_lost = threading.Event()
        self._losing = threading.Lock()
        self._lost_line = ""
        self._when_lost: list[Callable[[], None]] = []
        self._is_released = threading.Event()
        self._thread = threading.Thread(target=self._renew, name="run-lock", daemon=True)

    @property
    def is_lost(self) -> bool:
        """Whether another took the lock over or deleted it, as far as has been seen."""
        return self._is_lost.is_set()

    def is_held(self) -> bool:
        """Whether the lock is still ours, as the disk says now; one that fails says nothing."""
        if not self.is_lost:
            self._look()
        return not self.is_lost

    def check(self) -> None:
        """Ask the disk before something is written that must not be another run's.

        Raises:
            LostLockError: The lock is not ours any more.
        """
        if not self.is_held():
            raise LostLockError(f"{self._lost_line}, which ends and writes nothing more there")

    def when_lost(self, do: Callable[[], None]) -> None:
        """Have something done as soon as the lock is seen to be lost, in whatever thread.

        Whoever asks for this ends his work and tells a person why, as `check` does.
        """
        with self._losing:
            self._when_lost.append(do)
            if not self.is_lost:
                return
        do()

    def start_renewing(self) -> None:
        """Move the counter on from now on."""
        self._thread.start()

    def release(self) -> None:
        """End the renewals, and delete the lock if it is still ours."""
        self._is_released.set()
        self._thread.join()
        with suppress(OSError):  # a disk that fails now leaves a lock that is seen to be stale
            if self._is_ours(self._path.read_bytes()):
                self._path.unlink()

    def _is_ours(self, content: bytes) -> bool:
        holder = _holder_in(content)
        return holder is not None and holder.token == self._holder.token

    def _renew(self) -> None:
        counter = 0
        while not self._is_released.wait(self._renew_seconds) and not self.is_lost:
            counter += 1
            self._look(counter)

    def _look(self, counter: int | None = None) -> None:
        """See whether the lock is ours, and move its counter on if one is given."""
        try:
            # Closing is what makes the change seen on a network file system.
            with self._path.open("r+b", buffering=0) as file:
                content = file.read(MAX_LOCK_BYTES)
                if self._is_ours(content):
                    if counter is not None:
                        file.seek(COUNTER_AT_BYTE)
                        file.write(_digits(counter))
                    return
        except FileNotFoundError:
            content = b""
        except OSError:
            return  # a disk that is full or gone ends no run for the sake of its lock
        with self._losing:
            if self.is_lost:
                return
            self._lost_line = _lost_line(self._path, content)
            self._is_lost.set()
            followers = list(self._when_lost)
        for do in followers:
            do()
        if not followers:
            self._say(f"{self._lost_line}; two may now write to the folder")


@contextmanager
def hold_run_lock(
    folder: Path,
    say: Say,
    *,
    stale_seconds: float = STALE_SECONDS,
    renew_seconds: float = RENEW_SECONDS,
) -> Iterator[RunLock]:
    """Keep other runs out of a folder until the block ends.

    The folder is made if it is not there, and deleted again if nothing was put into it. Take the
    lock after `check_run_folder`, which refuses a folder of somebody's other files and changes
    nothing, and before `open_run_folder`, which may empty it and leaves the lock in place.

    Args:
        folder: The run folder.
        say: Told when a stale lock is taken over, when another machine's has to be watched first,
            and when ours is lost, then from another thread, unless somebody has asked for that
            with `RunLock.when_lost`.
        stale_seconds: How long the lock of another machine is watched.
        renew_seconds: Time between two renewals of ours; several times shorter than the above.

    Raises:
        UserError: Another run holds the folder, or nothing can be written there.
    """
    is_made = False
    try:
        if not folder.is_dir():
            folder.mkdir(parents=True)
            is_made = True
    except FileExistsError:
        if not folder.is_dir():
            raise UserError(f"--output {folder}: is a file; name a folder") from None
    except OSError as error:
        raise _cannot_write(folder, error) from error
    try:
        holder = this_process()
        _take(folder, holder, say, stale_seconds=stale_seconds)
        _clear_strays(folder)
        lock = RunLock(folder / LOCK_FILE, holder, say, renew_seconds=renew_seconds)
        lock.start_renewing()
        try:
            yield lock
        finally:
            lock.release()
    finally:
        if is_made:
            with suppress(OSError):  # it is not empty
                folder.rmdir()


def is_lock_file(name: str) -> bool:
    """Whether a name in a folder is of its lock, or of what is written on the way to one."""
    return name == LOCK_FILE or name.startswith(f"{LOCK_FILE}.")


def this_process() -> Holder:
    """The holder that this process would be, with a fresh token."""
    return Holder(
        host=socket.gethostname(),
        boot_id=_system_text(Path("/proc/sys/kernel/random/boot_id")),
        pid_namespace=_pid_namespace(),
        pid=os.getpid(),
        started_ticks=_started_ticks(os.getpid()),
        since=datetime.now(UTC).strftime("%Y-%m-%d %H:%M:%S UTC"),
        token=secrets.token_hex(16),
    )


def lock_text(holder: Holder) -> bytes:
    """What a lock file of the holder says, the counter at 0."""
    content = {"counter": _digits(0).decode(), **asdict(holder)}
    return json.dumps(content).encode() + b"\n"


def _take(folder: Path, holder: Holder, say: Say, *, stale_seconds: float) -> None:
    """Create the lock file, once nobody who is alive holds it.

    Raises:
        UserError: As `hold_run_lock`.
    """
    path = folder / LOCK_FILE
    try:
        while not _create(path, lock_text(holder), holder.token):
            found = _read(path)
            if found is None:
                continue  # it was released meanwhile
            reason = _why_stale(path, found, holder, say, stale_seconds=stale_seconds)
            if reason and _take_over(path, found, holder, stale_seconds=stale_seconds):
                say(f"{path}: left behind by {_name_of(found)}, {reason}; taken over")
                return
    except OSError as error:
        raise _cannot_write(folder, error) from error


def _why_stale(
    path: Path, found: bytes, us: Holder, say: Say, *, stale_seconds: float
) -> str | None:
    """Why nobody holds the lock any more; None if it changed hands meanwhile: look again.

    Raises:
        UserError: Its holder is alive.
    """
    holder = _holder_in(found)
    if holder is not None and _counts_processes_as(holder, us):
        if _runs(holder):
            raise _refused(path, found)
        return "which is gone"
    if holder is None:
        # No need to watch one that names nobody for as long as one of another machine. It is what
        # a power cut leaves, or a hand. If it was somebody's who is alive, he finds at his next
        # renewal, and before he writes a checkpoint or a status, that it does not name him, and
        # ends. Only on a disk without hard links can it be one that is just being made.
        stale_seconds = min(stale_seconds, BIRTH_SECONDS)
    say(
        f"{path}: held by {_name_of(found)}; watching for up to {stale_seconds:g} s whether it "
        "is still at work"
    )
    deadline_seconds = time.monotonic() + stale_seconds
    while time.monotonic() < deadline_seconds:
        time.sleep(min(POLL_SECONDS, stale_seconds / 10.0))
        now = _read(path)
        if now == found:
            continue
        after = None if now is None else _holder_in(now)
        if now is None or (after is not None and (holder is None or after.token != holder.token)):
            return None
        raise _refused(path, found)
    return f"which has not moved for {stale_seconds:g} s"


def _take_over(path: Path, stale: bytes, holder: Holder, *, stale_seconds: float) -> bool:
    """Replace a stale lock by ours; False if it is not there as it was, or others were faster.

    All that would replace it hold the takeover file while they do, and see only then whether the
    lock is still the stale one. So none replaces the lock of one that was faster.
    """
    claim = path.with_name(TAKEOVER_FILE)
    text = lock_text(holder)
    if not _create(claim, text, holder.token):
        _clear_if_left_behind(claim, stale_seconds)
        return False
    try:
        if _read(path) != stale:
            return False
        path.unlink()
        return _create(path, text, holder.token)  # one that saw no stale lock may come between
    finally:
        claim.unlink(missing_ok=True)


def _clear_strays(folder: Path) -> None:
    """Delete what killed processes left on their way to a lock; others now wait or are refused."""
    for path in folder.glob(f"{LOCK_FILE}.*"):
        with suppress(OSError):
            path.unlink()


def _clear_if_left_behind(claim: Path, stale_seconds: float) -> None:
    """Wait for another's takeover, which takes a moment; delete what a killed one left."""
    found = _read(claim)
    deadline_seconds = time.monotonic() + stale_seconds
    while found is not None and time.monotonic() < deadline_seconds:
        time.sleep(min(POLL_SECONDS, stale_seconds / 10.0))
        if _read(claim) != found:
            return
    claim.unlink(missing_ok=True)


def _create(path: Path, text: bytes, token: str) -> bool:
    """Make a file with its whole content, or find that there is one: on NFS too, exactly one can.

    Raises:
        OSError: It cannot be written.
    """
    fresh = path.with_name(f"{LOCK_FILE}.{token}")
    try:
        fresh.write_bytes(text)
        flush(fresh)  # so that a power cut leaves no lock that names nobody
        try:
            os.link(fresh, path)
        except FileNotFoundError:
            if not path.parent.is_dir():
                raise
            return False  # one that has just got the lock has cleared ours away
        except OSError as error:
            if _links(fresh) > 1:  # it was linked, and the answer was lost on the way
                return True
            if error.errno == errno.EEXIST:
                return False
            if error.errno not in NO_HARD_LINKS:
                raise
            return _create_without_link(path, text)
        return True
    finally:
        with suppress(OSError):
            fresh.unlink(missing_ok=True)


def _links(path: Path) -> int:
    try:
        return path.stat().st_nlink
    except FileNotFoundError:  # cleared away by the one who has just got the lock
        return 0


def _create_without_link(path: Path, text: bytes) -> bool:
    try:
        with path.open("xb") as file:
            file.write(text)
    except FileExistsError:
        return False
    return _read(path) == text  # another may have taken it for a lock that names nobody


def _read(path: Path) -> bytes | None:
    try:
        with path.open("rb") as file:
            return file.read(MAX_LOCK_BYTES)
    except FileNotFoundError:
        return None


def _holder_in(content: bytes) -> Holder | None:
    """Who a lock file names; None if it is damaged."""
    try:
        values = json.loads(content)
        holder = Holder(**{field.name: values[field.name] for field in fields(Holder)})
    except (ValueError, KeyError, TypeError, RecursionError):
        return None
    texts = (holder.host, holder.boot_id, holder.pid_namespace, holder.since, holder.token)
    is_whole = (
        all(isinstance(text, str) for text in texts)
        and isinstance(holder.pid, int)
        and 0 < holder.pid < 1 << 31
        and isinstance(holder.started_ticks, int | None)
    )
    return holder if is_whole else None


def _name_of(content: bytes) -> str:
    holder = _holder_in(content)
    # One line, whatever was in the file.
    return "an unknown process (damaged)" if holder is None else " ".join(holder.name.split())


def _counts_processes_as(holder: Holder, us: Holder) -> bool:
    """Whether the holder's process number means the same process here."""
    return (holder.host, holder.boot_id, holder.pid_namespace) == (
        us.host,
        us.boot_id,
        us.pid_namespace,
    )


def _runs(holder: Holder) -> bool:
    try:
        os.kill(holder.pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass  # another user's
    state, ticks = _state_and_start(holder.pid)
    if state in ("Z", "X"):
        return False  # dead, and its parent has not asked yet
    return ticks is None or holder.started_ticks is None or ticks == holder.started_ticks


def _started_ticks(pid: int) -> int | None:
    return _state_and_start(pid)[1]


def _state_and_start(pid: int) -> tuple[str, int | None]:
    """Fields 3 and 22 of `/proc/PID/stat`; of the second, which is a name, anything may be part."""
    words = _system_text(Path(f"/proc/{pid}/stat")).rpartition(")")[2].split()
    return (words[0], int(words[19])) if len(words) > 19 else ("", None)


def _pid_namespace() -> str:
    try:
        return str(Path("/proc/self/ns/pid").readlink())
    except OSError:
        return ""


def _system_text(path: Path) -> str:
    try:
        return path.read_text(errors="replace").strip()
    except OSError:
        return ""


def _digits(counter: int) -> bytes:
    return b"%0*d" % (COUNTER_DIGITS, counter)


def _refused(path: Path, content: bytes) -> UserError:
    holder = _holder_in(content)
    how = "" if holder is None else f", stop it (kill {holder.pid} there)"
    return UserError(
        f"--output {path.parent}: another run is at work there: {_name_of(content)}; wait for "
        f"it{how}, or name another folder"
    )


def _lost_line(path: Path, content: bytes) -> str:
    what = f"was taken over by {_name_of(content)}" if content else "was deleted"
    return f"{path}: {what} while this run was at work"


def _cannot_write(folder: Path, error: OSError) -> UserError:
    return UserError(
        f"--output {folder}: cannot be written ({error.strerror or error}); free the "
        "disk or the permission, or name another folder"
    )
