"""The short form: warnings alone, few, and none that training says anyway."""

from pathlib import Path

import pytest

from bertsmith.data.checkup.brief import MOST_LINES, table_warnings, text_warnings
from bertsmith.data.config import TableConfig
from bertsmith.data.tables import Table, read_table

CLEAN = "".join(f"a film with number {i},{('good', 'bad')[i % 2]}\n" for i in range(40))


@pytest.fixture
def train(tmp_path: Path) -> Table:
    return table_of(tmp_path / "train.csv", CLEAN)


def table_of(path: Path, rows: str) -> Table:
    path.write_text("text,label\n" + rows, encoding="utf-8")
    return read_table(path, TableConfig())


def test_clean_tables_are_no_reason_to_speak(tmp_path: Path, train: Table) -> None:
    assert table_warnings(train, table_of(tmp_path / "dev.csv", "something new,good\n")) == []


def test_a_leak_that_stands_to_the_letter_is_left_to_the_training(
    tmp_path: Path, train: Table
) -> None:
    exact = table_of(tmp_path / "dev.csv", "a film with number 3,bad\n")
    assert table_warnings(train, exact) == []
    dressed = table_of(tmp_path / "dev.csv", '"A film, with number 3!",bad\n')
    (line,) = table_warnings(train, dressed)
    assert line.startswith("warning: 1 of 1 rows to judge by stands among those to learn from but")
    assert f"{tmp_path}/dev.csv:2" in line


def test_few_lines_however_much_is_wrong(tmp_path: Path) -> None:
    rows = (
        CLEAN + CLEAN + "a film with number 0,bad\nx,Good\ny,nan\nz,1\nthe cafÃ©,good\n\ufffd,bad\n"
    )
    train = table_of(tmp_path / "train.csv", rows)
    dev = table_of(tmp_path / "dev.csv", '"A film, with number 3!",bad\n')
    lines = table_warnings(train, dev)
    assert len(lines) == MOST_LINES + 1
    assert lines[-1] == "and 4 more warnings: bertsmith doctor lists them"


def test_texts_to_pretrain_on() -> None:
    texts = [f"a paragraph, number {i}\nof a book {i}" for i in range(200)]
    assert text_warnings(texts) == []
    assert text_warnings(texts * 3) == []  # told by prepare, which leaves them out
    (line,) = text_warnings([f"{text}\nhome | contact" for text in texts])
    assert line.startswith("warning: 200 of 600 lines of documents are among the 1 that comes in")
    (line,) = text_warnings([*texts, "the cafÃ©"])
    assert "read as Latin-1 (Ã©)" in line
