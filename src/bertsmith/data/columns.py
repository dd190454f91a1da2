"""Which columns of a table hold the text, the second text and the label.

Named by the user, or found by the names that public data sets use. A guess that could be wrong is
not made: two candidates are an error that lists the columns.
"""

import dataclasses
import difflib
from dataclasses import dataclass
from pathlib import Path

from bertsmith.data.config import TableConfig
from bertsmith.errors import UserError

PAIRS = (
    ("text", "text_b"),
    ("text", "text_pair"),
    ("text", "text2"),
    ("text_a", "text_b"),
    ("text1", "text2"),
    ("sentence", "sentence_b"),
    ("sentence", "sentence2"),
    ("sentence_a", "sentence_b"),
    ("sentence1", "sentence2"),
    ("premise", "hypothesis"),
    ("question1", "question2"),
    ("question", "sentence"),
    ("question", "passage"),
    ("query", "passage"),
    ("query", "document"),
)
"""Names that mean a first and a second text when both are there."""

TEXTS = (
    "text",
    "sentence",
    "review",
    "content",
    "comment",
    "utterance",
    "query",
    "question",
    "message",
    "tweet",
    "document",
    "passage",
    "paragraph",
    "body",
)
"""Names of the text of a single-text table."""

LABELS = (
    "label",
    "labels",
    "class",
    "category",
    "intent",
    "sentiment",
    "target",
    "polarity",
    "gold",
    "gold_label",
)
"""Names of the label."""


@dataclass(frozen=True, kw_only=True)
class Columns:
    """Positions in a record."""

    names: tuple[str, ...]
    """Every column of the table, in order."""

    text: int
    """The text."""

    pair: int | None
    """The second text; None in a single-text table."""

    label: int | None
    """The label; None where none is asked for, or it stands in several columns."""

    labels: tuple[int, ...] = ()
    """Columns of one label each, where there are such."""

    @property
    def label_name(self) -> str:
        """Name of the label's column."""
        assert self.label is not None, "one column has the label"
        return self.names[self.label]

    @property
    def text_name(self) -> str:
        """Name of the text's column."""
        return self.names[self.text]

    @property
    def pair_name(self) -> str | None:
        """Name of the second text's column."""
        return None if self.pair is None else self.names[self.pair]

    @property
    def second_text(self) -> str | None:
        """Name of a column that would be the second text if pairs were read; None: there is none.

        By the usual names, given that of the first.
        """
        seconds = {second for first, second in PAIRS if first == self.text_name.lower()}
        return next((name for name in self.names if name.lower() in seconds), None)


@dataclass(frozen=True, kw_only=True)
class UsualColumns:
    """Where a model was trained to look: taken where the user says nothing and they are there."""

    text: str
    pair: str | None
    label: str
    """Empty where each label has a column of its own."""

    labels: tuple[str, ...] = ()
    """Columns of one label each."""


def find_columns(
    names: tuple[str, ...],
    *,
    path: Path,
    config: TableConfig,
    is_labelled: bool,
    is_pair: bool | None = None,
    usual: UsualColumns | None = None,
) -> Columns:
    """Find the columns by the config's names, or the model's, or else by known ones.

    Args:
        names: The table's columns.
        path: Of the table, for messages.
        config: Columns named by the user win. A text column without a pair column means one text.
        is_labelled: Whether a label is needed.
        is_pair: What the model was trained on; None: as the table says.
        usual: The model's columns.

    Raises:
        UserError: A column is missing, or more than one could be meant.
    """
    if is_pair is False and config.pair_column is not None:
        raise UserError(f"--table.pair_column {config.pair_column}: the model reads single texts")
    if usual is not None:
        config = _with_usual(config, usual, names)
    text, pair = _text_columns(names, path, config, is_pair)
    label: int | None = None
    labels: tuple[int, ...] = ()
    if is_labelled:
        if config.label_columns is not None:
            labels = tuple(
                _named(names, name, path, "label_columns") for name in config.label_columns
            )
        elif config.label_column is not None:
            label = _named(names, config.label_column, path, "label_column")
        else:
            others = " (a column for each label: --table.label_columns)"
            if pair is not None:
                others += ", or train on pairs that have none with --task embedding"
            label = _found(names, LABELS, path, "label", skip=(text, pair), others=others)
    used = [i for i in (text, pair, label, *labels) if i is not None]
    if len(set(used)) < len(used):
        raise UserError(f"{path}: the same column is named for two things; {_listed(names)}")
    return Columns(names=names, text=text, pair=pair, label=label, labels=labels)


def _with_usual(config: TableConfig, usual: UsualColumns, names: tuple[str, ...]) -> TableConfig:
    texts = (usual.text,) if usual.pair is None else (usual.text, usual.pair)
    if config.text_column is None and config.pair_column is None and set(texts) <= set(names):
        config = dataclasses.replace(config, text_column=usual.text, pair_column=usual.pair)
    if config.label_column is not None or config.label_columns is not None:
        return config
    if usual.labels and set(usual.labels) <= set(names):
        return dataclasses.replace(config, label_columns=list(usual.labels))
    if usual.label and usual.label in names:
        config = dataclasses.replace(config, label_column=usual.label)
    return config


def _text_columns(
    names: tuple[str, ...], path: Path, config: TableConfig, is_pair: bool | None
) -> tuple[int, int | None]:
    if config.text_column is not None:
        text = _named(names, config.text_column, path, "text_column")
        if config.pair_column is not None:
            return text, _named(names, config.pair_column, path, "pair_column")
        if is_pair:
            raise _pair_missing(names, path)
        return text, None
    if config.pair_column is not None:
        pair = _named(names, config.pair_column, path, "pair_column")
        return _found(names, TEXTS + tuple(a for a, _ in PAIRS), path, "text", skip=(pair,)), pair
    if is_pair is not False:
        found = [p for p in PAIRS if all(_positions(names, name) for name in p)]
        if len(found) == 1:
            return _positions(names, found[0][0])[0], _positions(names, found[0][1])[0]
        if len(found) > 1:
            raise UserError(
                f"{path}: several columns could be the two texts; say --table.text_column and "
                f"--table.pair_column; {_listed(names)}"
            )
        if is_pair:
            raise _pair_missing(names, path)
    return _found(names, TEXTS, path, "text", skip=()), None


def _pair_missing(names: tuple[str, ...], path: Path) -> UserError:
    return UserError(
        f"{path}: pairs of texts are needed and there is no second text here; "
        f"say --table.text_column and --table.pair_column; {_listed(names)}"
    )


def _named(names: tuple[str, ...], name: str, path: Path, key: str) -> int:
    if name in names:
        return names.index(name)
    near = difflib.get_close_matches(name, names, n=1)
    hint = f" (did you mean {near[0]!r}?)" if near else ""
    raise UserError(f"{path}: no column {name!r} (--table.{key}){hint}; {_listed(names)}")


def _positions(names: tuple[str, ...], name: str) -> list[int]:
    return [i for i, n in enumerate(names) if n.lower() == name]


def _found(
    names: tuple[str, ...],
    known: tuple[str, ...],
    path: Path,
    what: str,
    *,
    skip: tuple[int | None, ...],
    others: str = "",
) -> int:
    """The one column with a known name; the plain name itself ('text', 'label') always wins.

    `others` is what else may be said where there is none.
    """
    found = [i for i, n in enumerate(names) if n.lower() in known and i not in skip]
    exact = [i for i in found if names[i].lower() == what]
    if len(exact) == 1:
        return exact[0]
    if len(found) == 1:
        return found[0]
    if found:
        raise UserError(
            f"{path}: several columns could be the {what}: "
            f"{', '.join(repr(names[i]) for i in found)}; say which with --table.{what}_column"
        )
    header = (
        " (if the file has no header line, name its columns with --table.columns '[text, label]')"
        if ending_may_lack_header(path)
        else ""
    )
    raise UserError(
        f"{path}: no {what} column found; say --table.{what}_column{others}; "
        f"{_listed(names)}{header}"
    )


def ending_may_lack_header(path: Path) -> bool:
    """Whether the file's kind has an optional header line: CSV and TSV."""
    return any(s.lower() in (".csv", ".tsv") for s in path.suffixes)


def _listed(names: tuple[str, ...]) -> str:
    shown = ", ".join(repr(n if len(n) <= 40 else n[:40] + "...") for n in names[:20])
    return f"the columns are {shown}" + (", ..." if len(names) > 20 else "")
