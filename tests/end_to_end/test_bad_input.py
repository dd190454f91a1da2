"""Every mistake a user makes is one line that says what and where; exit code 2; nothing is lost."""

import csv
import gzip
import json
import os
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from bertsmith import cli
from bertsmith.errors import EXIT_USER_ERROR

Complaint = Callable[..., str]


@pytest.fixture
def complaint(capsys: pytest.CaptureFixture[str]) -> Complaint:
    """Runs a command line that must fail, and gives its one line of complaint."""

    def run(*argv: str | Path) -> str:
        capsys.readouterr()
        code = cli.run([str(word) for word in argv])
        lines = [
            line
            for line in capsys.readouterr().err.splitlines()
            if line.startswith("bertsmith: error: ")
        ]
        assert code == EXIT_USER_ERROR
        assert len(lines) == 1
        return lines[0]

    return run


def state_of(folder: Path) -> dict[str, bytes]:
    """Every file's content."""
    return {str(p): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


def write_rows(path: Path, rows: Sequence[Sequence[str]]) -> Path:
    with path.open("w", encoding="utf-8", newline="") as file:
        csv.writer(file).writerows(rows)
    return path


GOOD = "a paragraph of text\n\nand another one\n\n" * 20


def folder_without_text(place: Path) -> tuple[Path, str]:
    place.mkdir()
    return place, "in"


def empty_file(place: Path) -> tuple[Path, str]:
    place.with_suffix(".txt").write_bytes(b"")
    return place.with_suffix(".txt"), "in.txt: the file is empty"


def undecodable_bytes(place: Path) -> tuple[Path, str]:
    path = place.with_suffix(".txt")
    path.write_bytes(GOOD.encode() + b"caf\xe9 au lait\n")
    return path, f"byte {len(GOOD.encode()) + 3}"


def truncated_gzip(place: Path) -> tuple[Path, str]:
    path = place.with_suffix(".txt.gz")
    path.write_bytes(gzip.compress(os.urandom(200_000).hex().encode())[:-500])
    return path, "in.txt.gz"


def truncated_jsonl(place: Path) -> tuple[Path, str]:
    path = place.with_suffix(".jsonl")
    path.write_text('{"text": "whole"}\n{"text": "cut o')
    return path, "in.jsonl:2"


def field_that_is_missing(place: Path) -> tuple[Path, str]:
    path = place.with_suffix(".jsonl")
    path.write_text('{"text": "whole"}\n{"body": "another name"}\n')
    return path, "in.jsonl:2"


def nothing_there(place: Path) -> tuple[Path, str]:
    return place / "absent", "absent"


@pytest.mark.parametrize(
    "make",
    [
        folder_without_text,
        empty_file,
        undecodable_bytes,
        truncated_gzip,
        truncated_jsonl,
        field_that_is_missing,
        nothing_there,
    ],
)
def test_text_that_cannot_be_prepared(
    make: Callable[[Path], tuple[Path, str]], tmp_path: Path, complaint: Complaint
) -> None:
    path, expected = make(tmp_path / "in")
    said = complaint(
        *("prepare", "--input", path, "--output", tmp_path / "out", "--vocab_size", "60"),
        *("--workers", "1"),
    )
    assert expected in said
    assert not (tmp_path / "out" / "manifest.json").exists()


@pytest.mark.parametrize(
    ("rows", "expected"),
    [
        ([["text", "colour"], ["a b", "x"]], "colour"),
        ([["text", "label"], ["a b", "x"], ["c d", ""]], "row 2"),
        ([["text", "label"], ["a b", "x"], ["", "y"]], "row 2"),
        ([["text", "label"], ["a b", "x"], ["c d"]], "row 2"),
        ([["text", "label"], ["a b", "x"], ["c d", "x"]], "'x'"),
        ([["text", "label"]], "no rows"),
    ],
    ids=["no label column", "empty label", "empty text", "missing label", "one class", "no rows"],
)
def test_tables_that_cannot_be_learned_from(
    rows: list[list[str]], expected: str, tuned: Path, tmp_path: Path, complaint: Complaint
) -> None:
    table = write_rows(tmp_path / "train.csv", rows)
    said = complaint(
        *("finetune", "--model", tuned / "pretrained" / "model", "--data", table),
        *("--output", tmp_path / "out"),
    )
    assert expected in said
    assert "train.csv" in said
    assert not (tmp_path / "out").exists()


def test_a_label_seen_only_in_dev(tuned: Path, tmp_path: Path, complaint: Complaint) -> None:
    train = write_rows(tmp_path / "train.csv", [["text", "label"], ["a b", "x"], ["c d", "y"]])
    dev = write_rows(tmp_path / "dev.csv", [["text", "label"], ["a b", "x"], ["c d", "z"]])
    said = complaint(
        *("finetune", "--model", tuned / "pretrained" / "model", "--data", train),
        *("--eval", dev, "--output", tmp_path / "out"),
    )
    assert "dev.csv" in said
    assert "'z'" in said
    assert not (tmp_path / "out").exists()


def test_another_run_is_not_overwritten(tuned: Path, complaint: Complaint) -> None:
    before = state_of(tuned / "tuned")
    for verb, more in (
        ("pretrain", ("--data", tuned / "prepared", "--model", "bert-tiny", "--steps", "1")),
        ("finetune", ("--data", tuned / "train.csv", "--model", tuned / "pretrained" / "model")),
    ):
        said = complaint(verb, *more, "--output", tuned / "tuned")
        assert "--overwrite" in said
    assert state_of(tuned / "tuned") == before


def copy_of(folder: Path, place: Path) -> Path:
    return Path(shutil.copytree(folder, place / folder.name))


def test_a_tokenizer_that_does_not_fit_the_checkpoint(
    tuned: Path, tmp_path: Path, complaint: Complaint
) -> None:
    model = copy_of(tuned / "pretrained" / "model", tmp_path)
    config = json.loads((model / "config.json").read_text())
    assert config["vocab_size"] == 300
    tokenizer = json.loads((model / "tokenizer.json").read_text())
    tokenizer["model"]["vocab"] |= {f"more{i}": 300 + i for i in range(9)}
    (model / "tokenizer.json").write_text(json.dumps(tokenizer))
    said = complaint(
        *("finetune", "--model", model, "--data", tuned / "train.csv"),
        *("--output", tmp_path / "out"),
    )
    assert "309" in said  # tokens of the tokenizer
    assert "300" in said  # rows of the model
    assert not (tmp_path / "out").exists()


def test_a_length_beyond_the_models_positions(
    tuned: Path, tmp_path: Path, complaint: Complaint
) -> None:
    said = complaint(
        *("finetune", "--model", tuned / "pretrained" / "model"),
        *("--data", tuned / "train.csv", "--output", tmp_path / "out"),
        *("--max_sequence_tokens", "65"),
    )
    assert "max_sequence_tokens" in said
    assert "64" in said
    said = complaint(
        *("pretrain", "--data", tuned / "prepared", "--model", tuned / "shape.json"),
        *("--output", tmp_path / "out", "--steps", "1"),
    )
    assert "max_sequence_tokens" in said
    assert not (tmp_path / "out").exists()


def test_a_damaged_shard_is_named_by_its_hash(
    tuned: Path, tmp_path: Path, complaint: Complaint
) -> None:
    data = copy_of(tuned / "prepared", tmp_path)
    shard = data / "train" / "tokens-00000.bin"
    content = bytearray(shard.read_bytes())
    content[7] ^= 1
    shard.write_bytes(content)
    said = complaint(
        *("pretrain", "--data", data, "--model", tuned / "shape.json", "--steps", "1"),
        *("--output", tmp_path / "out", "--packing.max_sequence_tokens", "64"),
    )
    assert "tokens-00000.bin" in said
    assert "sha256" in said
    assert not (tmp_path / "out").exists()


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_no_permission_to_write(tuned: Path, tmp_path: Path, complaint: Complaint) -> None:
    (tmp_path / "locked").mkdir(mode=0o500)
    said = complaint(
        *("finetune", "--model", tuned / "pretrained" / "model"),
        *("--data", tuned / "train.csv", "--output", tmp_path / "locked" / "out"),
    )
    assert "cannot be written" in said


def test_an_output_below_a_file(tuned: Path, tmp_path: Path, complaint: Complaint) -> None:
    (tmp_path / "file").write_text("not a folder")
    for verb, more in (
        ("prepare", ("--input", tuned / "text", "--vocab_size", "60")),
        (
            "finetune",
            ("--data", tuned / "train.csv", "--model", tuned / "pretrained" / "model"),
        ),
        ("predict", ("--data", tuned / "new.csv", "--model", tuned / "tuned" / "model")),
    ):
        said = complaint(verb, *more, "--output", tmp_path / "file" / "out.csv")
        assert "out.csv" in said
    assert (tmp_path / "file").read_text() == "not a folder"


def test_a_loss_that_is_not_finite_stops_and_names_step_and_documents(
    tuned: Path, tmp_path: Path, complaint: Complaint
) -> None:
    said = complaint(
        *("pretrain", "--data", tuned / "prepared", "--model", tuned / "shape.json"),
        *("--output", tmp_path / "out", "--steps", "60", "--tokens_per_step", "1024"),
        *("--packing.tokens_per_pack", "1024", "--packing.max_sequence_tokens", "64"),
        *("--optim.learning_rate", "1e30", "--optim.warmup_share", "0"),
        *("--save.every_steps", "1", "--precision", "fp32"),
    )
    assert "is not finite" in said
    assert "part-" in said  # the file of a document
    assert json.loads((tmp_path / "out" / "summary.json").read_text())["status"] == "failed"


def test_a_model_that_is_not_there_and_a_hub_that_cannot_be_reached(
    tuned: Path, tmp_path: Path, complaint: Complaint, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    for name in (tmp_path / "absent", "nobody/no-such-model"):
        said = complaint("evaluate", "--model", name, "--data", tuned / "test.csv")
        assert str(name) in said
