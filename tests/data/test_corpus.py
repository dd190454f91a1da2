"""Files to documents: every format, every packing, and what is wrong with them."""

import gzip
import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard

from bertsmith.data.corpus import ReadOptions, Span, find_files, read_documents
from bertsmith.data.plan import TokenizerOptions, make_plan
from bertsmith.errors import UserError


def options(**values: Any) -> ReadOptions:
    usual = {"documents": "paragraph", "text_field": "text", "bad_bytes": "error"}
    return ReadOptions(**(usual | values))


def texts(path: Path, **values: Any) -> list[str]:
    return [d.text for d in read_documents(Span(path=str(path)), options(**values))]


def written(path: Path, content: bytes) -> Path:
    path.write_bytes(content)
    return path


def test_paragraphs_end_at_blank_lines_and_keep_their_inner_line_ends(tmp_path: Path) -> None:
    path = written(tmp_path / "a.txt", b"\n\none\ntwo\n\n \t\n\nthree\n")
    assert texts(path) == ["one\ntwo", "three"]
    assert [d.line for d in read_documents(Span(path=str(path)), options())] == [3, 8]


def test_lines_are_documents_when_asked_for(tmp_path: Path) -> None:
    path = written(tmp_path / "a.txt", b"one\n\n two \nthree")
    assert texts(path, documents="line") == ["one", "two", "three"]


def test_windows_line_ends_and_a_byte_order_mark_are_no_part_of_the_text(tmp_path: Path) -> None:
    path = written(tmp_path / "a.txt", b"\xef\xbb\xbfone\r\ntwo\r\n\r\nthree\r\n")
    assert texts(path) == ["one\ntwo", "three"]


@pytest.mark.parametrize("ending", [".gz", ".zst"])
def test_packed_files_give_the_same_documents(tmp_path: Path, ending: str) -> None:
    content = "één\n\nzwei\n".encode()
    packed = gzip.compress(content) if ending == ".gz" else zstandard.compress(content)
    assert texts(written(tmp_path / f"a.txt{ending}", packed)) == ["één", "zwei"]


def test_jsonl_gives_the_named_field(tmp_path: Path) -> None:
    lines = [{"body": "one\n\nstill one"}, {"body": None}, {"body": "two", "text": "x"}]
    path = written(tmp_path / "a.jsonl", "\n".join(map(json.dumps, lines)).encode())
    assert texts(path, text_field="body") == ["one\n\nstill one", "", "two"]


@pytest.mark.parametrize("ending", ["", ".gz"])
def test_parquet_gives_the_named_column(tmp_path: Path, ending: str) -> None:
    plain = tmp_path / "a.parquet"
    pq.write_table(pa.table({"body": ["one", None, "two"], "n": [1, 2, 3]}), plain)
    path = (
        plain
        if not ending
        else written(tmp_path / "b.parquet.gz", gzip.compress(plain.read_bytes()))
    )
    assert texts(path, text_field="body") == ["one", "", "two"]
    with pytest.raises(UserError, match=r"no column 'text'.*'body', 'n'"):
        texts(path)


def test_bytes_that_are_no_utf8_are_named_by_their_offset_or_skipped(tmp_path: Path) -> None:
    path = written(tmp_path / "a.txt", b"good\n\nb\xffd\nmore\n\nfine\n")
    with pytest.raises(UserError, match=r"a\.txt: byte 7 is not UTF-8 \(0xff\)"):
        texts(path)
    found = list(read_documents(Span(path=str(path)), options(bad_bytes="skip")))
    assert [d.text for d in found if not d.is_bad] == ["good", "fine"]
    assert sum(d.is_bad for d in found) == 1


def test_utf16_is_recognised(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="UTF-16; convert"):
        texts(written(tmp_path / "a.txt", "hello".encode("utf-16")))


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b'{"text": "cut', "a.jsonl:2: not a JSON object"),
        (b'["text"]', "a.jsonl:2: not a JSON object"),
        (b'{"txt": "a"}', "a.jsonl:2: no field 'text' .there are 'txt'"),
        (b'{"text": 3}', "a.jsonl:2: field 'text' is int"),
        (b'{"text": "\\ud800"}', "a.jsonl:2: .*surrogate"),
    ],
)
def test_a_bad_jsonl_line_is_named(tmp_path: Path, line: bytes, message: str) -> None:
    path = written(tmp_path / "a.jsonl", b'{"text": "ok"}\n' + line + b"\n")
    with pytest.raises(UserError, match=message):
        texts(path)


def test_a_gzip_that_is_cut_off_is_an_error_not_a_short_file(tmp_path: Path) -> None:
    whole = gzip.compress(b"".join(b"line %d\n\n" % n for n in range(5000)))
    with pytest.raises(UserError, match="cut off"):
        texts(written(tmp_path / "a.txt.gz", whole[:-300]))


def test_folders_globs_and_files_are_found_once_and_in_order(tmp_path: Path) -> None:
    for name in ("b.txt", "a.jsonl", "c.md", "sub/a.txt.gz"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(b"x")
    found = find_files([str(tmp_path), str(tmp_path / "*.txt"), str(tmp_path / "b.txt")])
    assert [str(p.relative_to(tmp_path)) for p in found] == ["a.jsonl", "b.txt", "sub/a.txt.gz"]


def test_input_that_names_nothing_to_read_is_refused(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    note = written(tmp_path / "a.md", b"x")
    for name, message in (
        ("empty", "holds no"),
        ("none*", "no such file"),
        (note.name, "not a kind"),
    ):
        with pytest.raises(UserError, match=message):
            find_files([str(tmp_path / name)])


@pytest.mark.parametrize("documents", ["paragraph", "line"])
def test_a_file_cut_into_units_gives_the_documents_and_lines_of_the_whole(
    tmp_path: Path, documents: str
) -> None:
    paragraphs = [f"document {n}\n" + "word " * (n % 700) for n in range(2500)]
    path = written(tmp_path / "a.txt", "\n\n".join(paragraphs).encode())
    read = options(documents=documents)
    trained = TokenizerOptions(
        fingerprint=None, vocab_size=100, lowercase=True, min_frequency=2, sample_mb=1
    )
    plan = make_plan(
        [path],
        read=read,
        valid_share=0.0,
        tokenizer=trained,
        known=None,
        advance=lambda done, total: None,
    )
    spans = [span for unit in plan.units() for span in unit.spans]
    assert len(spans) > 2
    whole = [(d.text, d.line) for d in read_documents(Span(path=str(path)), read)]
    pieced = [(d.text, d.line) for span in spans for d in read_documents(span, read)]
    assert pieced == whole
