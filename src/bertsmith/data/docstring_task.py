"""Make of harvested docstrings what the demo needs: text to pretrain on, and a labelled task.

The task is to say which package a paragraph comes from. Modules are parted first, by a hash of
their name: whatever stands in a held-out module is seen by nobody before the test.
"""

import hashlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from bertsmith.data.docstrings import Docstring, hide_names

HELD_OUT_SHARE = 0.2
"""Share of the modules kept out of pretraining and of the training examples."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Example:
    """One row of the labelled table."""

    text: str
    """A paragraph, with the names of the packages hidden."""

    label: str
    """The package it comes from."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TaskSizes:
    """How much of everything; the same for each package."""

    num_labels: int = 10
    """Most packages to tell apart: those with most paragraphs."""

    train: int = 30
    """Labelled examples a package for one fine-tuning run; each seed draws its own."""

    dev: int = 30
    """Examples a package to pick the best checkpoint by."""

    test: int = 100
    """Examples a package for the figures that are reported."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DocstringTask:
    """Text and tables, apart by module."""

    labels: tuple[str, ...]
    """The packages, by name."""

    texts: tuple[str, ...]
    """Docstrings to pretrain on, of every package, none from a held-out module."""

    train_pool: tuple[Example, ...]
    """Paragraphs of `texts`: every run draws its training examples here."""

    dev: tuple[Example, ...]
    """From held-out modules, as many of each label."""

    test: tuple[Example, ...]
    """From held-out modules too, other paragraphs than dev."""

    held_out_texts: tuple[str, ...]
    """Docstrings of the held-out modules, names not hidden: for filling in blanks."""


def is_held_out(module: str) -> bool:
    """Whether a module is kept for testing: a function of its name alone."""
    return _rank("held out", module) < HELD_OUT_SHARE


def make_task(docstrings: Sequence[Docstring], sizes: TaskSizes) -> DocstringTask:
    """Part docstrings into pretraining text and a balanced labelled task.

    Raises:
        ValueError: Fewer than two packages have enough paragraphs.
    """
    seen = [d for d in docstrings if not is_held_out(d.module)]
    unseen = [d for d in docstrings if is_held_out(d.module)]
    labels = _choose_labels(seen, unseen, sizes)
    train_pool = _examples(seen, labels, without=frozenset())
    known = frozenset(e.text for e in train_pool)  # hiding the names makes a few texts equal
    unknown = _examples(unseen, labels, without=known)
    held_out = {label: [e for e in unknown if e.label == label] for label in labels}
    wanted = sizes.dev + sizes.test
    return DocstringTask(
        labels=labels,
        texts=tuple(d.text for d in seen),
        train_pool=tuple(train_pool),
        dev=tuple(e for label in labels for e in held_out[label][: sizes.dev]),
        test=tuple(e for label in labels for e in held_out[label][sizes.dev : wanted]),
        held_out_texts=tuple(d.text for d in unseen),
    )


def draw_train(task: DocstringTask, sizes: TaskSizes, *, seed: int) -> list[Example]:
    """The training examples of one run: `sizes.train` of each label, chosen by the seed."""
    drawn: list[Example] = []
    for label in task.labels:
        pool = [e for e in task.train_pool if e.label == label]
        drawn += sorted(pool, key=lambda e: _rank(f"train {seed}", e.text))[: sizes.train]
    return drawn


def _choose_labels(
    seen: Sequence[Docstring], unseen: Sequence[Docstring], sizes: TaskSizes
) -> tuple[str, ...]:
    """The packages with most paragraphs among those with enough on either side."""
    num_seen, num_unseen = _count(seen), _count(unseen)
    enough = [
        name
        for name in num_seen
        # some are lost to hiding names, which makes a few paragraphs equal: hence one and a half
        if num_seen[name] >= 1.5 * sizes.train
        and num_unseen[name] >= 1.5 * (sizes.dev + sizes.test)
    ]
    if len(enough) < 2:
        raise ValueError(
            f"only {len(enough)} packages have enough docstrings "
            f"({sizes.dev + sizes.test} paragraphs in held-out modules)"
        )
    most = sorted(enough, key=lambda name: (-num_seen[name] - num_unseen[name], name))
    return tuple(sorted(most[: sizes.num_labels]))


def _count(docstrings: Sequence[Docstring]) -> Counter[str]:
    counts: Counter[str] = Counter()
    for docstring in docstrings:
        counts[docstring.package] += len(docstring.paragraphs)
    return counts


def _examples(
    docstrings: Sequence[Docstring], labels: Sequence[str], *, without: frozenset[str]
) -> list[Example]:
    """The labels' paragraphs with all their names hidden, shuffled by hash.

    Each text once; none that then stands under two labels, none of `without`.
    """
    owners: dict[str, set[str]] = {}
    for docstring in docstrings:
        if docstring.package in labels:
            for paragraph in docstring.paragraphs:
                text = hide_names(paragraph, labels)
                owners.setdefault(text, set()).add(docstring.package)
    examples = [
        Example(text=text, label=next(iter(packages)))
        for text, packages in owners.items()
        if len(packages) == 1 and text not in without
    ]
    return sorted(examples, key=lambda e: _rank("order", e.text))


def _rank(purpose: str, text: str) -> float:
    """A stable number in [0, 1) for a text, independent between purposes."""
    digest = hashlib.blake2b(f"{purpose}/{text}".encode(), digest_size=8).digest()
    return int.from_bytes(digest) / 2.0**64
