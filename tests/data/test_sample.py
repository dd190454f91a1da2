"""The tokenizer's sample: all of a small text, and a share of every place of a large one."""

import gzip
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

from bertsmith.data import plan, sample
from bertsmith.data.corpus import ReadOptions, read_documents
from bertsmith.data.plan import TokenizerOptions, Unit, make_plan
from bertsmith.data.sample import sample_texts
from bertsmith.data.wordpiece import train_wordpiece

READ = ReadOptions(documents="line", text_field="text", bad_bytes="error")

Units = Callable[[dict[str, list[str]]], list[Unit]]


@pytest.fixture
def units_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Units:
    """Files of lines as units of about 1 kB; a file of a compressed name is one unit."""
    monkeypatch.setattr(plan, "UNIT_BYTES_LEAST", 1000)
    monkeypatch.setattr(plan, "UNIT_BYTES_MOST", 1000)
    monkeypatch.setattr(plan, "CHUNK_BYTES", 500)

    def write(files: dict[str, list[str]]) -> list[Unit]:
        for name, lines in files.items():
            data = ("\n".join(lines) + "\n").encode()
            (tmp_path / name).write_bytes(gzip.compress(data) if name.endswith(".gz") else data)
        return make_plan(
            [tmp_path / name for name in files],
            read=READ,
            valid_share=0.0,
            tokenizer=TokenizerOptions(
                fingerprint=None, vocab_size=100, lowercase=True, min_frequency=1, sample_mb=1
            ),
            known=None,
            advance=lambda done, total: None,
        ).units()

    return write


def lines_of(name: str, count: int) -> list[str]:
    return [f"{name} {n:06}" for n in range(count)]


def test_every_unit_gives_its_share_of_a_large_corpus(units_of: Units) -> None:
    units = units_of({"a.txt": lines_of("a", 4000), "b.txt": lines_of("b", 1000)})
    texts = list(sample_texts(units, READ, characters=9 * 1000))
    assert len(units) > 40
    assert sum(map(len, texts)) == 9 * 1000
    taken = Counter(texts)
    assert max(taken.values()) == 1
    given = [
        sum(d.text in taken for span in unit.spans for d in read_documents(span, READ))
        for unit in units
    ]
    in_full = [n for unit, n in zip(units, given, strict=True) if sum(unit.span_bytes) > 900]
    assert min(in_full) >= 20  # a unit has 112 lines or more; a fifth of all bytes is wanted
    assert max(in_full) <= 30


def test_of_more_units_than_a_round_asks_those_lie_evenly(
    units_of: Units, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sample, "UNITS_A_ROUND", 8)
    units = units_of({"a.txt": lines_of("a", 8000)})
    texts = list(sample_texts(units, READ, characters=8 * 400))
    numbers = sorted(int(text.split()[1]) for text in texts)
    assert len(units) > 60
    gaps = [b - a for a, b in zip([0, *numbers], [*numbers, 8000], strict=True)]
    assert max(gaps) < 2 * 8000 / 8
    assert sum(gap > 1 for gap in gaps) in (7, 8, 9)


def test_what_one_file_cannot_give_the_others_do(units_of: Units) -> None:
    files = {"a.txt": lines_of("a", 5), "b.txt.gz": lines_of("b", 5000), "c.txt": ["c" * 900] * 3}
    texts = list(sample_texts(units_of(files), READ, characters=20_000))
    assert 20_000 <= sum(map(len, texts)) < 20_000 + 900
    assert Counter(text[0] for text in texts)["a"] == 5
    assert max(Counter(t for t in texts if t[0] != "c").values()) == 1


def test_a_text_that_fits_the_sample_is_taken_wholly_and_gives_one_vocabulary(
    units_of: Units,
) -> None:
    files = {
        "a.txt": lines_of("this and that", 300),
        "b.txt.gz": [f"{line} {n * n}" for n, line in enumerate(lines_of("others", 2000))],
    }
    units = units_of(files)
    everything = [line for lines in files.values() for line in lines]
    enough = sum(map(len, everything)) + 1
    texts = list(sample_texts(units, READ, characters=enough))
    assert Counter(texts) == Counter(everything)
    vocabularies = [
        train_wordpiece(order, vocab_size=200, lowercase=True, min_frequency=2).vocab
        for order in (everything, texts)
    ]
    assert vocabularies[0] == vocabularies[1]
