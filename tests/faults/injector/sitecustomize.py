"""Faults for child processes: Python imports this file at its start where it lies on PYTHONPATH.

Two variables of the environment say what to do; without them nothing is wrapped.

BERTSMITH_TEST_FAULT is a JSON list. Each item names a place in `at`: a call on the disk (`fsync`,
`rename`, which is replace too, `unlink`, `rmdir`, or `disk` for any of these; `open` to write,
`write`, `read`, which is opening to read), or a function of bertsmith
(`bertsmith.model.heads:MaskedLM.forward`). It acts from the `nth` call to the `last` (both from 1;
`last` is `nth` unless given, 0 is without end) whose path holds a match of the pattern `path`, on
the rank `rank` or on any; with `once`, a path, only if no file is there, which it makes then (a
process that is started again has the same environment). What it does is in `do`: `kill` and
`kill_after` the call, an error of the disk by name (`ENOSPC`), `sleep:SECONDS`, `await_save` for
the end of the save that is under way, `signal:NAME`, or `memory`, an allocation that fails.

BERTSMITH_TEST_JOURNAL is a folder to which every call that matters for a power cut is written,
with the tree under BERTSMITH_TEST_JOURNAL_ROOT before it and the content that was flushed.
"""

import builtins
import errno
import importlib.util
import io
import json
import os
import re
import shutil
import signal
import sys
import threading
import time
from collections.abc import Iterator
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any, Self

FAULT, JOURNAL, JOURNAL_ROOT = (
    "BERTSMITH_TEST_FAULT",
    "BERTSMITH_TEST_JOURNAL",
    "BERTSMITH_TEST_JOURNAL_ROOT",
)
ON_DESCRIPTORS = ("fsync", "rename", "unlink", "rmdir")
DISK_CALLS = (*ON_DESCRIPTORS, "disk", "open", "write", "read")


class Fault:
    """One item of the list, and how often its place has been passed."""

    def __init__(
        self,
        at: str,
        do: str,
        path: str = "",
        nth: int = 1,
        last: int | None = None,
        rank: int | None = None,
        once: str | None = None,
    ) -> None:
        """Not passed yet."""
        self.at, self.do, self.path = at, do, re.compile(path)
        self.nth = nth
        self.last = nth if last is None else (last or sys.maxsize)
        self.rank, self.once = rank, once
        self.passed = 0
        self.lock = threading.Lock()

    def is_due(self, path: str) -> bool:
        """Count a call; whether to act on it."""
        if self.rank is not None and os.environ.get("RANK", "0") != str(self.rank):
            return False
        if not self.path.search(path):
            return False
        with self.lock:
            self.passed += 1
            if not self.nth <= self.passed <= self.last:
                return False
        return self.once is None or self.is_first_time()

    def is_first_time(self) -> bool:
        """Whether no process has done it yet."""
        assert self.once is not None
        try:
            os.close(os.open(self.once, os.O_CREAT | os.O_EXCL))
        except FileExistsError:
            return False
        return True

    def act(self) -> bool:
        """Do it; True if the rest comes after the call."""
        what, _, more = self.do.partition(":")
        if what == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        elif what == "sleep":
            time.sleep(float(more))
        elif what == "await_save":
            for thread in threading.enumerate():
                if thread.name == "saver":
                    thread.join()
        elif what == "signal":
            os.kill(os.getpid(), getattr(signal, more))
        elif what == "memory":
            raise MemoryError
        elif what.startswith("E"):
            number = getattr(errno, what)
            raise OSError(number, os.strerror(number))
        return what == "kill_after"


class Journal:
    """What a power cut needs to know: tree and flushed content, call by call."""

    def __init__(self, folder: str, root: str) -> None:
        """An empty journal."""
        self.folder, self.root = Path(folder), root
        self.folder.mkdir(parents=True, exist_ok=True)
        self.lock = threading.Lock()
        self.count = 0
        self.real_open = io.open

    def note(self, call: str, paths: list[str]) -> None:
        """Write one call down, before it is made; a file to be flushed is copied."""
        if not paths[0].startswith(self.root):
            return
        with self.lock:
            tree: dict[str, int] = {}
            for place, folders, files in os.walk(self.root):
                for name in folders + files:
                    path = os.path.join(place, name)
                    ending = "/" if name in folders else ""
                    tree[os.path.relpath(path, self.root) + ending] = os.lstat(path).st_ino
            line: dict[str, Any] = {
                "call": call,
                "paths": [os.path.relpath(p, self.root) for p in paths],
            }
            if call == "fsync":
                line["inode"] = os.stat(paths[0]).st_ino
                if os.path.isfile(paths[0]):
                    line["copy"] = f"{self.count}.content"
                    shutil.copyfile(paths[0], self.folder / line["copy"])
            self.count += 1
            with self.real_open(self.folder / "calls.jsonl", "a") as file:
                file.write(json.dumps(line | {"tree": tree}) + "\n")


def arm() -> None:
    """Wrap what the environment names."""
    environment = os.environ
    faults = [Fault(**item) for item in json.loads(environment.get(FAULT, "[]"))]
    journal = None
    if JOURNAL in environment:
        journal = Journal(environment[JOURNAL], environment[JOURNAL_ROOT])
    on_disk = {name: [fault for fault in faults if fault.at == name] for name in DISK_CALLS}
    for name in ON_DESCRIPTORS:
        of_name = on_disk[name] + on_disk["disk"]
        if of_name or journal is not None:
            _wrap_disk_call(name, of_name, journal)
    if on_disk["open"] or on_disk["write"] or on_disk["read"]:
        _wrap_open(on_disk["open"], on_disk["write"], on_disk["read"])
    by_module: dict[str, list[Fault]] = {}
    for fault in faults:
        if fault.at not in DISK_CALLS:
            by_module.setdefault(fault.at.partition(":")[0], []).append(fault)
    missing = {name: found for name, found in by_module.items() if name not in sys.modules}
    for name in by_module.keys() - missing.keys():
        _wrap_functions(sys.modules[name], by_module[name])
    if missing:
        sys.meta_path.insert(0, _WrapOnImport(missing))


def _wrap_disk_call(name: str, faults: list[Fault], journal: Journal | None) -> None:
    names = ("rename", "replace") if name == "rename" else (name,)
    for attribute in names:
        real = getattr(os, attribute)

        def faulty(target: Any, *more: Any, real: Any = real, **options: Any) -> Any:
            paths = [_path_of(target, options.get("dir_fd"))]
            if name == "rename":
                paths.append(_path_of(more[0], options.get("dst_dir_fd")))
            due = [fault for fault in faults if any(fault.is_due(p) for p in paths[-1:])]
            if journal is not None:
                journal.note(name, paths)
            ends_after = [fault.act() for fault in due]
            result = real(target, *more, **options)
            if any(ends_after):
                os.kill(os.getpid(), signal.SIGKILL)
            return result

        setattr(os, attribute, faulty)


def _path_of(target: Any, folder_descriptor: int | None = None) -> str:
    if isinstance(target, int):
        return os.readlink(f"/proc/self/fd/{target}")
    path = os.fsdecode(target)
    if folder_descriptor is not None:
        path = os.path.join(os.readlink(f"/proc/self/fd/{folder_descriptor}"), path)
    return os.path.abspath(path)


def _wrap_open(on_open: list[Fault], on_write: list[Fault], on_read: list[Fault]) -> None:
    real: Any = io.open

    def faulty(file: Any, mode: str = "r", *more: Any, **options: Any) -> Any:
        if isinstance(file, int):
            return real(file, mode, *more, **options)
        path = _path_of(file)
        writes = set(mode) & set("wax+")
        for fault in on_open if writes else on_read:
            if fault.is_due(path):
                fault.act()
        opened = real(file, mode, *more, **options)
        watching = [fault for fault in on_write if fault.path.search(path)]
        return _FaultyFile(opened, path, watching) if writes and watching else opened

    io.open = builtins.open = faulty


class _FaultyFile:
    """A file whose writing fails; everything else is the file's."""

    def __init__(self, file: Any, path: str, faults: list[Fault]) -> None:
        self._file, self._path, self._faults = file, path, faults

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)

    def __enter__(self) -> Self:
        self._file.__enter__()
        return self

    def __exit__(self, *error: Any) -> Any:
        return self._file.__exit__(*error)

    def __iter__(self) -> Iterator[Any]:
        return iter(self._file)

    def write(self, content: Any) -> Any:
        for fault in self._faults:
            if fault.is_due(self._path):
                self._file.write(content[: len(content) // 2])  # as much as there was room for
                self._file.flush()
                fault.act()
        return self._file.write(content)


def _wrap_functions(module: Any, faults: list[Fault]) -> None:
    """Put the faulty function wherever the real one is known by name; the first one acts first."""
    for fault in reversed(faults):
        *owners, name = fault.at.partition(":")[2].split(".")
        owner = module
        for part in owners:
            owner = getattr(owner, part)
        real = getattr(owner, name)

        def faulty(*arguments: Any, real: Any = real, fault: Fault = fault, **options: Any) -> Any:
            ends_after = fault.is_due("") and fault.act()
            result = real(*arguments, **options)
            if ends_after:
                os.kill(os.getpid(), signal.SIGKILL)
            return result

        setattr(owner, name, faulty)
        if owner is module:
            for other in list(sys.modules.values()):
                if getattr(other, "__name__", "").startswith("bertsmith"):
                    for attribute, value in list(vars(other).items()):
                        if value is real:
                            setattr(other, attribute, faulty)


class _WrapOnImport:
    """Wraps functions once their module has run, before anybody else can ask for them."""

    def __init__(self, by_module: dict[str, list[Fault]]) -> None:
        self.by_module = by_module

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        """The module's own spec, with a loader that wraps."""
        if name not in self.by_module:
            return None
        faults = self.by_module.pop(name)
        spec = importlib.util.find_spec(name)
        loader: Any = spec and spec.loader
        run = loader.exec_module

        def exec_module(module: Any) -> None:
            run(module)
            _wrap_functions(module, faults)

        loader.exec_module = exec_module
        return spec


if FAULT in os.environ or JOURNAL in os.environ:
    arm()
