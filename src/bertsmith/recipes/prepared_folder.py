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
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from bertsmith.data.parts import put_in_place
from bertsmith.data.plan import Plan
from bertsmith.data.shards import MANIFEST_FILE
from bertsmith.data.tokenizer import TextTokenizer, load_tokenizer, write_tokenizer
from bertsmith.durable import write_whole
from bertsmith.errors import UserError

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
        other = sorted(names - {*CONTENT, PARTS, MANIFEST_FILE})
        is_ours = MANIFEST_FILE in names or PARTS in names
        if other or (names and not is_ours):
            raise UserError(
                f"--output {self.path}: holds files that are no prepared text "
                f"({(other or sorted(names))[0]}); name a new folder"
            )

    @contextmanager
    def locked(self, *, shared: bool) -> Iterator[None]:
        """Make the folder and keep other preparations out of it.

        Args:
            shared: Let others in that share too: shards of one work.

        Raises:
            UserError: It cannot be made, or another preparation writes to it.
        """
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            self.work.mkdir(exist_ok=True)
            handle = os.open(self.path, os.O_RDONLY)
        except OSError as error:
            raise cannot_write(self.path, error) from error
        try:
            kind = fcntl.LOCK_SH if shared else fcntl.LOCK_EX
            fcntl.flock(handle, kind | fcntl.LOCK_NB)
        except BlockingIOError as error:
            os.close(handle)
            raise UserError(
                f"--output {self.path}: another `bertsmith prepare` is writing there; wait for it "
                "or name another folder"
            ) from error
        except OSError:
            pass  # a file system without locks
        try:
            yield
        finally:
            os.close(handle)

    def begin(self, plan: Plan) -> None:
        """Note the plan.

        What was made for another plan is used again where it still fits: parts are named by all
        that they depend on.
        """
        started = self.started_plan()
        if started is None or started.differences(plan):
            shutil.rmtree(self.tokenizer_folder, ignore_errors=True)
        if started != plan:
            write_whole(self._plan, json.dumps(plan.to_json(), indent=1))

    def keep_tokenizer(self, tokenizer: TextTokenizer) -> None:
        """Write the tokenizer of the work going on."""
        # Not by process: machines that share a disk may give two the same id. Not by mkdtemp: its
        # folder, which ends up in the output, could be read by its owner alone.
        fresh = self.work / f"tokenizer.tmp-{uuid.uuid4().hex}"
        fresh.mkdir()
        write_tokenizer(fresh, tokenizer)
        put_in_place(fresh, self.tokenizer_folder)

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
        build.mkdir()
        return build

    def finish(self, build: Path, manifest: dict[str, Any]) -> None:
        """Put the built content in place of the old, the manifest last, and delete the parts."""
        self.manifest.unlink(missing_ok=True)
        for name in CONTENT:
            shutil.rmtree(self.path / name, ignore_errors=True)
            (build / name).rename(self.path / name)
        write_whole(self.manifest, json.dumps(manifest, indent=1, ensure_ascii=False) + "\n")
        self.clean()

    def clean(self) -> None:
        """Delete the parts."""
        shutil.rmtree(self.work, ignore_errors=True)


def cannot_write(path: Path, error: OSError) -> UserError:
    """The line for a full disk or a missing permission."""
    where = error.filename or path
    return UserError(
        f"--output {path}: cannot be written ({error.strerror or error}: {where}); what is "
        "finished stays: free the disk or the permission and run the same command again"
    )


def _plan_in(file: Path, key: str | None) -> Plan | None:
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
        return Plan.from_json(content if key is None else content[key])
    except (OSError, ValueError, KeyError, TypeError):
        return None
