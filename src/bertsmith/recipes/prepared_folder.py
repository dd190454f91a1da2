"""The folder of a preparation: who may write it, what is finished in it, the final exchange.

While work goes on, everything new lies in `parts/`; what was prepared before stays until the new
content is whole. `manifest.json` is written last and means: finished.
"""

import fcntl
import json
import os
import shutil
import uuid
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

from bertsmith.data.parts import put_in_place
from bertsmith.data.plan import Plan
from bertsmith.data.shards import MANIFEST_FILE
from bertsmith.data.tokenizer import TextTokenizer, load_tokenizer, write_tokenizer
from bertsmith.data.writing import WritingError, writing
from bertsmith.durable import flush, write_whole
from bertsmith.errors import UserError
from bertsmith.report.run_lock import hold_run_lock, is_lock_file
from bertsmith.say import Say

CONTENT = ("tokenizer", "train", "valid")
PARTS = "parts"


class PreparedFolder:
    """Paths and states of an output folder."""

    def __init__(self, path: str) -> None:
        self.path = Path(path)
        self.work = self.path / PARTS
        self.manifest = self.path / MANIFEST_FILE
        self._plan = self.work / "plan.json"

    def finished_plan(self) -> Plan | None:
        """The plan behind the manifest; None if there is no (readable) one."""
        return _plan_in(self.manifest, "plan")

    def started_plan(self) -> Plan | None:
        """The plan of work that goes on or was stopped."""
        return _plan_in(self._plan, None)

    def check_is_ours(self) -> None:
        """Refuse a folder with anything else in it.

        Raises:
            UserError: It is a file, or holds other files.
        """
        if self.path.exists() and not self.path.is_dir():
            raise UserError(f"--output {self.path}: is a file; name a folder")
        try:
            names = {entry.name for entry in self.path.iterdir()} if self.path.is_dir() else set()
        except OSError as error:
            raise UserError(f"--output {self.path}: cannot be read: {error.strerror}") from error
        names = {name for name in names if not is_lock_file(name)}
        other = sorted(names - {*CONTENT, PARTS, MANIFEST_FILE})
        is_ours = MANIFEST_FILE in names or PARTS in names
        if other or (names and not is_ours):
            raise UserError(
                f"--output {self.path}: holds files that are no prepared text "
                f"({(other or sorted(names))[0]}); name a new folder"
            )

    @contextmanager
    def locked(self, say: Say, *, shard: str | None) -> Iterator[None]:
        """Make the folder and keep other preparations out of it.

        `run.lock` names the one that is at work. Shards of one work may be made in one folder at
        once, so each has a lock of its own in `parts/`; that no shard is made while the whole is,
        or the other way round, is a lock of the system's, which not every network file system has.

        Args:
            say: Told of a lock that is taken over or watched.
            shard: Let others in that make other shards.

        Raises:
            UserError: It cannot be made, or another preparation writes to it.
        """
        with ExitStack() as held:
            if shard is None:
                held.enter_context(hold_run_lock(self.path, say))
            try:
                self.path.mkdir(parents=True, exist_ok=True)
                self.work.mkdir(exist_ok=True)
                handle = os.open(self.path, os.O_RDONLY)
            except OSError as error:
                raise cannot_write(self.path, error) from error
            held.callback(os.close, handle)
            try:
                kind = fcntl.LOCK_EX if shard is None else fcntl.LOCK_SH
                fcntl.flock(handle, kind | fcntl.LOCK_NB)
            except BlockingIOError as error:
                raise UserError(
                    f"--output {self.path}: another `bertsmith prepare` is writing there; wait for "
                    "it or name another folder"
                ) from error
            except OSError:
                pass  # a file system without locks
            if shard is not None:
                own = self.work / f"shard-{shard.replace('/', '-of-')}"
                held.enter_context(hold_run_lock(own, say))
            yield

    def begin(self, plan: Plan) -> None:
        """Note the plan.

        What was made for another plan is used again where it still fits: parts are named by all
        that they depend on.
        """
        started = self.started_plan()
        if started is None or started.differences(plan):
            shutil.rmtree(self.tokenizer_folder, ignore_errors=True)
        if started != plan:
            with writing(self._plan, "the plan"):
                write_whole(self._plan, json.dumps(plan.to_json(), indent=1))

    def keep_tokenizer(self, tokenizer: TextTokenizer) -> None:
        """Write the tokenizer of the work going on."""
        # Not by process: machines that share a disk may give two the same id. Not by mkdtemp: its
        # folder, which ends up in the output, could be read by its owner alone.
        fresh = self.work / f"tokenizer.tmp-{uuid.uuid4().hex}"
        try:
            with writing(fresh, "the tokenizer"):
                fresh.mkdir()
                write_tokenizer(fresh, tokenizer)
                _flush_all(fresh)
                put_in_place(fresh, self.tokenizer_folder)
        finally:
            shutil.rmtree(fresh, ignore_errors=True)

    @property
    def tokenizer_folder(self) -> Path:
        """Where the tokenizer of the work going on lies."""
        return self.work / "tokenizer"

    def tokenizer_there(self) -> TextTokenizer | None:
        """The tokenizer of the work going on, if it is there."""
        return load_tokenizer(self.tokenizer_folder) if self.tokenizer_folder.is_dir() else None

    def fresh_build(self) -> Path:
        """An empty folder for the final content."""
        build = self.work / "build"
        shutil.rmtree(build, ignore_errors=True)
        with writing(build, "the result"):
            build.mkdir()
        return build

    def finish(self, build: Path, tokenizer_folder: Path, manifest: dict[str, Any]) -> None:
        """Put the built content in place of the old, the manifest last, and delete the parts.

        Raises:
            WritingError: It could not be written; what was prepared before is back in its place.
        """
        with writing(self.path, "the exchange of the old result for the new", 0):
            (build / "tokenizer").mkdir()
            for file in tokenizer_folder.iterdir():
                (build / "tokenizer" / file.name).write_bytes(file.read_bytes())
            text = json.dumps(manifest, indent=1, ensure_ascii=False) + "\n"
            write_whole(build / MANIFEST_FILE, text)
            _flush_all(build / "tokenizer")
            for name in ("train", "valid"):  # their files were flushed when they were written
                flush(build / name)
            self._exchange(build)
        self.clean()

    def _exchange(self, build: Path) -> None:
        before = self.work / "before"
        shutil.rmtree(before, ignore_errors=True)
        before.mkdir()
        moved: list[tuple[Path, Path]] = []

        def move(source: Path, target: Path) -> None:
            source.rename(target)
            moved.append((source, target))

        try:
            for name in (MANIFEST_FILE, *CONTENT):
                if (self.path / name).exists():
                    move(self.path / name, before / name)
            for name in CONTENT:
                move(build / name, self.path / name)
            flush(self.path)  # the content is there before the manifest that says so
            move(build / MANIFEST_FILE, self.manifest)
            flush(self.path)
        except BaseException:
            for source, target in reversed(moved):
                with suppress(OSError):
                    target.rename(source)
            raise

    def clean(self) -> None:
        """Delete the parts."""
        shutil.rmtree(self.work, ignore_errors=True)


def cannot_write(
    path: Path, error: OSError | WritingError, *, needed_bytes: int | None = None
) -> UserError:
    """The line for a full disk, a failing one or a missing permission.

    Args:
        path: The output folder.
        error: What happened.
        needed_bytes: About how much more is to be written, if the error does not say.
    """
    if isinstance(error, WritingError):
        what = f"{error.reason}: {error.file}, at {error.doing}"
        needed_bytes = needed_bytes if error.needed_bytes is None else error.needed_bytes
    else:
        what = f"{error.strerror or error}: {error.filename or path}"
    needed = "" if needed_bytes is None else f"about {needed_bytes:,} bytes more are needed, "
    try:
        room = f" {needed}{shutil.disk_usage(path).free:,} are free;"
    except OSError:
        room = ""
    return UserError(
        f"--output {path}: cannot be written ({what});{room} what is finished stays: free the disk "
        "or the permission and run the same command again"
    )


def _flush_all(folder: Path) -> None:
    for file in folder.iterdir():
        flush(file)
    flush(folder)


def _plan_in(file: Path, key: str | None) -> Plan | None:
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
        return Plan.from_json(content if key is None else content[key])
    except (OSError, ValueError, KeyError, TypeError):
        return None
