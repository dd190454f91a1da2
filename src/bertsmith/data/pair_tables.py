"""Tables of pairs to embed: two texts a row, with a score, a hard negative, or nothing more."""

from dataclasses import replace
from pathlib import Path

from bertsmith.data.columns import LABELS, Columns, UsualColumns
from bertsmith.data.config import TableConfig
from bertsmith.data.tables import LabelledTable, TableReader, read_cells
from bertsmith.errors import UserError

SCORES = (*LABELS, "score", "similarity", "similarity_score")
"""Names of a score's column."""

NEGATIVES = ("negative", "hard_negative")
"""Names of a column with a text that does not belong to the first one, though it may seem to."""


def read_pair_cells(
    path: Path, config: TableConfig, *, usual: UsualColumns | None = None
) -> LabelledTable[object]:
    """Read a table of pairs wholly, what stands beside the texts as it is.

    Args:
        path: The file.
        config: Columns that the user named.
        usual: Those that the model was trained on.

    Raises:
        UserError: It cannot be read, has no second text, or several columns could be the score.
    """
    if config.label_columns is not None:
        raise UserError("--table.label_columns: are for --task multilabel, not embedding")
    if config.label_column is None:
        with TableReader(path, config, is_labelled=False, is_pair=True, usual=usual) as reader:
            columns = reader.columns
        beside = beside_texts(columns, path=path, usual=usual)
        if beside is not None:
            config = replace(config, label_column=beside)
    return read_cells(
        path,
        config,
        is_pair=True,
        usual=usual,
        is_labelled=config.label_column is not None,
    )


def beside_texts(columns: Columns, *, path: Path, usual: UsualColumns | None) -> str | None:
    """The column of the score, or of the negatives, by its name; None: there is neither.

    Args:
        columns: Of the two texts.
        path: Of the table, for messages.
        usual: Those that the model was trained on, or of the table to learn from.

    Raises:
        UserError: Several could be the score.
    """
    free = [name for i, name in enumerate(columns.names) if i not in (columns.text, columns.pair)]
    known = [name for name in free if usual is not None and name == usual.label]
    for names in (SCORES, NEGATIVES):
        known = known or [name for name in free if name.lower() in names]
    if len(known) > 1:
        raise UserError(
            f"{path}: several columns could be the score: {', '.join(map(repr, known))}; say which "
            "with --table.label_column"
        )
    return known[0] if known else None


def is_negative_column(name: str) -> bool:
    """Whether a column holds hard negatives, by its name."""
    return name.lower() in NEGATIVES
