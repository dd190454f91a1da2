"""Harvest the docstrings of the Python packages on this machine: text that everybody has.

Files are read and parsed with `ast`; nothing is imported, nothing is executed. The same machine
gives the same harvest in the same order. The caps keep it to seconds however much is installed.
"""

import ast
import functools
import hashlib
import importlib.metadata
import inspect
import multiprocessing
import os
import re
import stat
import sys
import sysconfig
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

STANDARD_LIBRARY = "python"
"""The label of the standard library, all of its modules together."""

_SKIPPED_FOLDERS = {"test", "tests", "testing", "__pycache__", "node_modules", "site-packages"} | {
    "_vendor",  # a copy of somebody else's package: its docstrings would bear the wrong label
    "vendor",
    "extern",
    "externals",
    "dist-packages",
}
_ABBREVIATIONS = {
    "matplotlib": ("mpl", "plt", "pyplot"),
    "networkx": ("nx",),
    "numpy": ("np",),
    "pandas": ("pd",),
    "pyarrow": ("pa", "arrow"),
    "python": ("cpython",),
    "sklearn": ("scikit", "scikits"),
    "tensorflow": ("tf",),
    "torch": ("pytorch",),
    "yaml": ("pyyaml",),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class SourcePackage:
    """An importable package, or a lone module, and where its source lies."""

    name: str
    """Name to import it by; the label of everything harvested from it."""

    root: Path
    """Its folder, or its one file."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Docstring:
    """What is left of one docstring after cleaning."""

    package: str
    """The package it stands in."""

    module: str
    """The file it stands in, from the package's parent folder, with forward slashes."""

    line: int
    """Line of the file where it starts, from 1."""

    paragraphs: tuple[str, ...]
    """Running text, one line each, at least one."""

    @property
    def text(self) -> str:
        """The paragraphs, a line each."""
        return "\n".join(self.paragraphs)


@dataclass(frozen=True, kw_only=True, slots=True)
class HarvestLimits:
    """How much is read and kept."""

    text_bytes_per_package: int = 1_500_000
    """Most cleaned text kept of one package."""

    text_bytes: int = 24_000_000
    """Most cleaned text kept in all, shared out evenly over the packages that have that much."""

    source_bytes_per_package: int = 16_000_000
    """Most source parsed of one package."""

    source_bytes_per_file: int = 1_000_000
    """A larger file is generated code or data, and left out."""

    words_per_paragraph: int = 8
    """A shorter paragraph is a heading or a fragment, and left out."""


def installed_packages() -> list[SourcePackage]:
    """The standard library, then every package in this environment, by name.

    Private modules (`_name`), vendored copies and tests are left out.
    """
    packages = [SourcePackage(name=STANDARD_LIBRARY, root=Path(sysconfig.get_path("stdlib")))]
    taken = {STANDARD_LIBRARY}
    for folder in _site_folders():
        for entry in sorted(folder.iterdir()) if folder.is_dir() else []:
            name = entry.stem if entry.suffix == ".py" else entry.name
            is_package = entry.is_dir() and name not in _SKIPPED_FOLDERS
            if not name.isidentifier() or name.startswith("_") or name in taken:
                continue
            if is_package or entry.suffix == ".py":
                taken.add(name)
                packages.append(SourcePackage(name=name, root=entry))
    return packages


def harvest(
    packages: Sequence[SourcePackage] | None = None,
    *,
    limits: HarvestLimits | None = None,
    processes: int = 1,
    on_package: Callable[[int, int, str], None] | None = None,
) -> list[Docstring]:
    """Collect the docstrings of modules, classes and functions.

    A paragraph that stands twice is kept once, at its first place; one that stands in several
    packages is nobody's, and dropped.

    Args:
        packages: Where to look; None means everything installed.
        limits: How much to read and keep; None means the defaults.
        processes: How many parse side by side; the result is the same.
        on_package: Called after each package with how many are done, how many there are, and its
            name.

    Returns:
        Docstrings by package (in the order given), then file, then line.
    """
    packages = installed_packages() if packages is None else packages
    limits = limits or HarvestLimits()
    found: list[Docstring] = []
    for number, docstrings in enumerate(_harvest_each(packages, limits, processes), start=1):
        found += docstrings
        if on_package is not None:
            on_package(number, len(packages), packages[number - 1].name)
    return _share_out(_drop_repeats(found), limits.text_bytes)


def _harvest_each(
    packages: Sequence[SourcePackage], limits: HarvestLimits, processes: int
) -> Iterator[list[Docstring]]:
    """Each package's docstrings, in the order of the packages."""
    work = functools.partial(_harvest_package, limits=limits)
    if processes <= 1:
        yield from map(work, packages)
        return
    context = multiprocessing.get_context("spawn")  # a fork would copy torch's threads half
    with ProcessPoolExecutor(processes, mp_context=context) as pool:
        yield from pool.map(work, packages)


@functools.cache
def _distributions() -> dict[str, list[str]]:
    return dict(importlib.metadata.packages_distributions())


def names_of(package: str) -> tuple[str, ...]:
    """Every name a text may call a package by: to import, to install, and customary short forms.

    Lower case, longest first. `sklearn` gives `scikit-learn`, `scikit learn`, `sklearn` and
    `scikit`.
    """
    names = {package.lower(), *_ABBREVIATIONS.get(package, ())}
    for distribution in _distributions().get(package, []):
        name = distribution.lower()
        names |= {name, name.replace("-", " "), name.replace("-", "_")}
    return tuple(sorted(names, key=lambda name: (-len(name), name)))


def hide_names(text: str, packages: Sequence[str], *, stand_in: str = "package") -> str:
    """Replace every name of the packages by `stand_in`, so that a text does not give itself away.

    A name is found as a whole word in any case, also inside dotted and hyphenated names and joined
    by underscores (`numpy.ndarray`, `torch_dtype`), not inside another word.
    """
    return _names_pattern(tuple(packages)).sub(stand_in, text)


@functools.lru_cache(maxsize=8)
def _names_pattern(packages: tuple[str, ...]) -> re.Pattern[str]:
    names = sorted({n for p in packages for n in names_of(p)}, key=lambda n: (-len(n), n))
    words = "|".join(map(re.escape, names))
    return re.compile(rf"(?<![^\W_])(?:{words})(?![^\W_])", re.IGNORECASE)


def _site_folders() -> list[Path]:
    """Folders that hold installed packages, this environment's own first."""
    folders = [sysconfig.get_path("purelib"), sysconfig.get_path("platlib")]
    folders += [p for p in sys.path if Path(p).name in ("site-packages", "dist-packages")]
    return [Path(p) for p in dict.fromkeys(folders)]


def _harvest_package(package: SourcePackage, limits: HarvestLimits) -> list[Docstring]:
    docstrings: list[Docstring] = []
    source_bytes = text_bytes = 0
    for module, path in _source_files(package):
        if text_bytes >= limits.text_bytes_per_package:
            break
        source = _read(path, limits.source_bytes_per_file)
        if source_bytes + len(source) > limits.source_bytes_per_package:
            break
        source_bytes += len(source)
        for line, raw in _docstrings_in(source):
            paragraphs = clean(raw, words_per_paragraph=limits.words_per_paragraph)
            if paragraphs:
                text_bytes += sum(len(p.encode()) + 1 for p in paragraphs)
                docstrings.append(
                    Docstring(package=package.name, module=module, line=line, paragraphs=paragraphs)
                )
    return sorted(docstrings, key=lambda d: (d.module, d.line))


def _source_files(package: SourcePackage) -> list[tuple[str, Path]]:
    """Python files as (name from the package's parent, path), in an order fixed by their names.

    The order is by hash, so that a cap takes from all over a package instead of from A to F.
    """
    if package.root.is_file():
        return [(package.root.name, package.root)]
    files: list[tuple[str, Path]] = []
    for folder, subfolders, names in os.walk(package.root):
        subfolders[:] = [s for s in subfolders if s not in _SKIPPED_FOLDERS]
        for name in names:
            if name.endswith(".py"):
                path = Path(folder, name)
                inside = path.relative_to(package.root).as_posix()
                files.append((f"{package.name}/{inside}", path))
    return sorted(files, key=lambda f: (hashlib.sha256(f[0].encode()).digest(), f[0]))


def _read(path: Path, most_bytes: int) -> bytes:
    """A file's content; nothing where it is no ordinary file, cannot be read, or is too large."""
    try:
        info = path.stat()
        if not stat.S_ISREG(info.st_mode) or info.st_size > most_bytes:
            return b""
        return path.read_bytes()
    except OSError:
        return b""


def _docstrings_in(source: bytes) -> Iterator[tuple[int, str]]:
    """Line and text of each docstring; nothing from a file that does not parse."""
    if b'"""' not in source and b"'''" not in source:
        return
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # other people's invalid escapes are not our matter
            tree = ast.parse(source)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return
    waiting: list[ast.AST] = [tree]
    while waiting:  # statements only: most nodes of a tree are expressions
        node = waiting.pop()
        for part in ("body", "orelse", "handlers", "finalbody"):
            waiting += [n for n in getattr(node, part, ()) if hasattr(n, "body")]
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            text = ast.get_docstring(node, clean=False)
            if text is not None:
                yield node.body[0].lineno, text


def clean(docstring: str, *, words_per_paragraph: int = 8) -> tuple[str, ...]:
    """Split a docstring into paragraphs of running text.

    Left out are examples at a prompt, underlines and tables, paragraphs that are code, lists of
    names or pictures rather than language, and those of fewer than `words_per_paragraph` words.
    """
    paragraphs: list[str] = []
    lines: list[str] = []
    for line in [*inspect.cleandoc(docstring).splitlines(), ""]:
        words = line.split()
        if words:
            lines.append(" ".join(words))
            continue
        if lines:
            text = " ".join(x for x in lines if not _is_ruler(x))
            if not any(x.startswith((">>>", "...", "$ ", "In [")) for x in lines) and _is_language(
                text, words_per_paragraph
            ):
                paragraphs.append(text)
        lines = []
    return tuple(paragraphs)


def _is_ruler(line: str) -> bool:
    """Whether a line underlines a heading or rules a table."""
    return not any(c.isalnum() for c in line)


def _is_language(text: str, least_words: int) -> bool:
    """Whether a text reads as sentences: mostly words, few signs, long enough."""
    words = text.split()
    if len(words) < least_words or not text.isprintable():
        return False
    plain = sum(w.strip(".,;:()`'\"*").isalpha() for w in words)
    letters = sum(map(str.isalpha, text)) + text.count(" ")
    try:
        text.encode()
    except UnicodeEncodeError:  # a lone surrogate, written as an escape
        return False
    return plain >= 0.6 * len(words) and letters >= 0.8 * len(text)


def _drop_repeats(docstrings: Sequence[Docstring]) -> list[Docstring]:
    """Keep each paragraph once, and none that several packages share."""
    owners: dict[str, str] = {}
    shared: set[str] = set()
    for docstring in docstrings:
        for paragraph in docstring.paragraphs:
            if owners.setdefault(paragraph, docstring.package) != docstring.package:
                shared.add(paragraph)
    seen = shared
    kept: list[Docstring] = []
    for docstring in docstrings:
        fresh = tuple(p for p in dict.fromkeys(docstring.paragraphs) if p not in seen)
        seen.update(fresh)
        if fresh:
            kept.append(replace(docstring, paragraphs=fresh))
    return kept


def _share_out(docstrings: list[Docstring], most_bytes: int) -> list[Docstring]:
    """Cut the largest packages until the whole fits: each keeps at most the same number of bytes.

    Whole files are dropped, those whose hash is highest first.
    """
    sizes = [sum(len(p.encode()) + 1 for p in d.paragraphs) for d in docstrings]
    totals: Counter[str] = Counter()
    for docstring, size in zip(docstrings, sizes, strict=True):
        totals[docstring.package] += size
    cap, left = most_bytes, most_bytes
    for number, total in enumerate(sorted(totals.values())):
        cap = left // (len(totals) - number)
        if total > cap:
            break
        left -= total
    else:
        return docstrings
    by_module: dict[tuple[str, str], int] = Counter()
    for docstring, size in zip(docstrings, sizes, strict=True):
        by_module[docstring.package, docstring.module] += size
    kept_bytes: Counter[str] = Counter()
    kept: set[tuple[str, str]] = set()
    for key in sorted(by_module, key=lambda k: (hashlib.sha256(k[1].encode()).digest(), k)):
        if kept_bytes[key[0]] + by_module[key] <= cap:
            kept_bytes[key[0]] += by_module[key]
            kept.add(key)
    return [d for d in docstrings if (d.package, d.module) in kept]
