"""`prepare` as a whole: what it leaves out, what never moves, how it goes on, what it refuses."""

import gzip
import json
import multiprocessing
import os
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from bertsmith.data import part_workers, parts, plan
from bertsmith.data.shards import open_shards
from bertsmith.data.tokenizer import TextTokenizer, load_tokenizer, write_tokenizer
from bertsmith.errors import UserError
from bertsmith.recipes import prepared_folder
from bertsmith.recipes.config import PrepareConfig
from bertsmith.recipes.prepare import main, prepare
from bertsmith.recipes.prepared_folder import PreparedFolder

TEXTS = [f"text {n} is about {'this and ' * (n % 5)}that, {n * n}" for n in range(200)]


@pytest.fixture(autouse=True)
def small_units(monkeypatch: pytest.MonkeyPatch) -> None:
    """Units of 4 kB, so that a little text is the work of many."""
    monkeypatch.setattr(plan, "UNIT_BYTES_LEAST", 4096)


@pytest.fixture
def text(tmp_path: Path) -> Path:
    """A folder with three files of documents: plain, gzip and JSONL."""
    folder = tmp_path / "text"
    folder.mkdir()
    (folder / "a.txt").write_text("\n\n".join(TEXTS[:80]))
    (folder / "b.txt.gz").write_bytes(gzip.compress("\n\n".join(TEXTS[80:150]).encode()))
    lines = [json.dumps({"text": t}) for t in TEXTS[150:]]
    (folder / "c.jsonl").write_text("\n".join(lines) + "\n")
    return folder


def config(text: Path, output: Path, **values: Any) -> PrepareConfig:
    usual = {"vocab_size": 150, "valid_share": 0.1, "workers": 1}
    return PrepareConfig(input=[str(text)], output=str(output), **(usual | values))


def content(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def decoded(folder: Path, split: Any) -> list[str]:
    corpus = open_shards(folder, split)
    tokenizer = load_tokenizer(folder / "tokenizer").tokenizer
    return [tokenizer.decode(corpus.document(i).tolist()) for i in range(corpus.num_documents)]


def names(folder: Path, split: Any) -> set[str]:
    corpus = open_shards(folder, split)
    return {corpus.name_of(i) for i in range(corpus.num_documents)}


def test_the_manifest_counts_what_was_made_and_hashes_every_file(
    text: Path, tmp_path: Path
) -> None:
    summary = prepare(config(text, tmp_path / "out"))
    assert summary.status == "completed"
    manifest = json.loads((tmp_path / "out" / "manifest.json").read_text())
    counts = manifest["counts"]
    train, valid = (open_shards(tmp_path / "out", split) for split in ("train", "valid"))
    assert counts["documents"] == train.num_documents + valid.num_documents == len(TEXTS)
    assert counts["tokens"] == train.num_tokens + valid.num_tokens
    assert counts["valid_documents"] == valid.num_documents > 0
    assert counts["duplicates"] == counts["unknown_tokens"] == 0
    lengths = sorted(n for s in (train, valid) for n in s.lengths(0, s.num_documents).tolist())
    assert counts["length_percentiles"]["0"] == lengths[0]
    assert counts["length_percentiles"]["50"] == lengths[99]
    assert counts["length_percentiles"]["100"] == lengths[-1]
    on_disk = {n for n in content(tmp_path / "out") if n.endswith(".bin")}
    assert on_disk == set(manifest["files"])
    assert not (tmp_path / "out" / "parts").exists()


def test_exact_duplicates_are_left_out_within_and_across_files(text: Path, tmp_path: Path) -> None:
    (text / "d.txt").write_text(f"{TEXTS[3]}\n\nnew\n\n  {TEXTS[170]}  \n\nnew\n\n{TEXTS[5]}!")
    counts = prepare(config(text, tmp_path / "out")).counts
    assert counts is not None
    assert counts["duplicates"] == 3
    assert counts["documents"] == len(TEXTS) + 2


def test_documents_cut_at_512_are_counted(text: Path, tmp_path: Path) -> None:
    (text / "d.txt").write_text(f"{'a ' * 510}\n\n{'a ' * 511}")
    counts = prepare(config(text, tmp_path / "out")).counts
    assert counts is not None
    assert counts["documents_cut_at_512"] == 1  # 510 and two special tokens just fit


def test_the_validation_split_never_moves_when_text_is_added(text: Path, tmp_path: Path) -> None:
    prepare(config(text, tmp_path / "one"))
    (text / "0.txt").write_text("\n\n".join(f"additional document {n}" for n in range(300)))
    prepare(config(text, tmp_path / "two"))
    for split in ("train", "valid"):
        assert names(tmp_path / "one", split) <= names(tmp_path / "two", split)


def test_two_documents_give_one_for_validation_and_one_gives_none(tmp_path: Path) -> None:
    source = tmp_path / "a.txt"
    for number, share in enumerate((1e-9, 0.999999)):
        source.write_text("one thing\n\nand another")
        out = tmp_path / f"two-{number}"
        prepare(config(source, out, valid_share=share))
        assert [open_shards(out, s).num_documents for s in ("train", "valid")] == [1, 1]
    source.write_text("one thing")
    prepare(config(source, tmp_path / "one"))
    assert [open_shards(tmp_path / "one", s).num_documents for s in ("train", "valid")] == [1, 0]


def test_a_special_token_in_the_text_is_ordinary_text(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("[MASK] [CLS] mask cls [ ]\n\nmask cls [ ]")
    prepare(config(tmp_path / "a.txt", tmp_path / "out", valid_share=0.0, min_frequency=1))
    corpus = open_shards(tmp_path / "out", "train")
    assert all(corpus.document(i).min() >= 5 for i in range(corpus.num_documents))
    assert decoded(tmp_path / "out", "train")[0].replace(" ", "") == "[mask][cls]maskcls[]"


def test_a_given_tokenizer_is_used_as_it_is(
    text: Path, tmp_path: Path, tiny_tokenizer_folder: Path
) -> None:
    prepare(config(text, tmp_path / "out", tokenizer=str(tiny_tokenizer_folder)))
    vocab = open_shards(tmp_path / "out", "train").vocab
    assert vocab == load_tokenizer(tiny_tokenizer_folder).vocab


def test_a_tokenizer_that_is_no_wordpiece_marks_word_starts_too(text: Path, tmp_path: Path) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    bpe = Tokenizer(models.BPE(unk_token="[UNK]"))
    bpe.pre_tokenizer = pre_tokenizers.Whitespace()
    specials = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    bpe.train_from_iterator(TEXTS, trainers.BpeTrainer(vocab_size=80, special_tokens=specials))
    (tmp_path / "bpe").mkdir()
    bpe.save(str(tmp_path / "bpe" / "tokenizer.json"))
    prepare(config(text, tmp_path / "out", tokenizer=str(tmp_path / "bpe"), valid_share=0.0))
    corpus = open_shards(tmp_path / "out", "train")
    for i in range(20):
        words = bpe.encode(TEXTS[i]).word_ids
        wanted = [n == 0 or words[n] != words[n - 1] for n in range(len(words))]
        assert corpus.word_starts(i).tolist() == wanted


def test_a_long_document_is_tokenised_in_pieces_with_the_same_ids(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a.txt").write_text("\n".join(TEXTS))
    prepare(config(tmp_path / "a.txt", tmp_path / "whole"))
    monkeypatch.setattr(parts, "PIECE_CHARACTERS", 100)
    prepare(config(tmp_path / "a.txt", tmp_path / "pieces"))
    whole, pieces = (open_shards(tmp_path / n, "train") for n in ("whole", "pieces"))
    assert whole.num_documents == 1
    assert whole.fingerprint == pieces.fingerprint


def test_several_processes_give_the_same_files(
    text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    many = [f"{t} {n}" for n in range(10) for t in TEXTS]
    (text / "d.txt").write_text("\n\n".join(many))
    prepare(config(text, tmp_path / "one"))
    monkeypatch.setattr(part_workers, "SMALL_BYTES", 0)
    prepare(config(text, tmp_path / "two", workers=2))
    assert content(tmp_path / "one") == content(tmp_path / "two")
    assert multiprocessing.active_children() == []


def test_a_system_that_does_not_say_which_cpus_are_ours_uses_all(
    text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(os, "sched_getaffinity", raising=False)
    monkeypatch.setattr(os, "cpu_count", lambda: 3)
    assert part_workers.usable_cpus() == 3
    assert prepare(config(text, tmp_path / "out", workers=None)).status == "completed"


def test_shards_of_the_work_join_to_the_same_files(text: Path, tmp_path: Path) -> None:
    (text / "d.txt").write_text("\n\n".join(f"{t} {n % 2}" for n in range(3) for t in TEXTS))
    prepare(config(text, tmp_path / "whole"))
    folders = [tmp_path / f"part-{i}" for i in (1, 2, 3)]
    for number, folder in enumerate(folders, 1):
        assert prepare(config(text, folder, shard=f"{number}/3")).status == "shard done"
    joining = PrepareConfig(join=[str(f) for f in folders[::-1]], output=str(tmp_path / "joined"))
    assert prepare(joining).status == "completed"
    assert content(tmp_path / "joined") == content(tmp_path / "whole")
    assert prepare(joining).status == "up to date"


def test_shards_in_one_folder_are_finished_by_the_plain_command(text: Path, tmp_path: Path) -> None:
    (text / "d.txt").write_text("\n\n".join(f"{t} {n}" for n in range(3) for t in TEXTS))
    prepare(config(text, tmp_path / "whole"))
    for shard in ("2/2", "1/2"):
        prepare(config(text, tmp_path / "out", shard=shard))
    prepare(config(text, tmp_path / "out"))
    assert content(tmp_path / "out") == content(tmp_path / "whole")


def test_joining_names_what_is_missing_or_different(text: Path, tmp_path: Path) -> None:
    (text / "d.txt").write_text("\n\n".join(f"{t} {n}" for n in range(3) for t in TEXTS))
    prepare(config(text, tmp_path / "p1", shard="1/2"))
    joining = PrepareConfig(join=[str(tmp_path / "p1")], output=str(tmp_path / "out"))
    with pytest.raises(UserError, match=r"of \d+ parts are missing"):
        prepare(joining)
    prepare(config(text, tmp_path / "p2", shard="2/2", lowercase=False))
    with pytest.raises(UserError, match=r"p2: is of other .*: lowercase was True, is False"):
        prepare(replace(joining, join=[str(tmp_path / "p1"), str(tmp_path / "p2")]))
    with pytest.raises(UserError, match="holds no shard"):
        prepare(replace(joining, join=[str(text)]))
    assert not (tmp_path / "out" / "manifest.json").exists()


def test_a_finished_preparation_is_left_alone(
    text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    wanted = config(text, tmp_path / "out")
    assert main(wanted) == 0
    before = {p: p.stat().st_mtime_ns for p in (tmp_path / "out").rglob("*")}
    os.utime(text / "a.txt")  # touched, not changed
    assert prepare(wanted).status == "up to date"
    assert {p: p.stat().st_mtime_ns for p in (tmp_path / "out").rglob("*")} == before
    assert capsys.readouterr().out.splitlines()[0] == str(tmp_path / "out")


def test_changed_text_and_options_are_noticed_and_nothing_is_replaced_unasked(
    text: Path, tmp_path: Path
) -> None:
    wanted = config(text, tmp_path / "out")
    prepare(wanted)
    before = content(tmp_path / "out")
    with pytest.raises(UserError, match="vocab_size was 150, is 140"):
        prepare(replace(wanted, vocab_size=140))
    (text / "a.txt").write_text("\n\n".join(TEXTS[:79]) + "\n\n" + TEXTS[79][::-1])
    (text / "new.txt").write_text("new")
    (text / "c.jsonl").unlink()
    with pytest.raises(
        UserError, match=r"a\.txt has changed; .*new\.txt is new; .*c\.jsonl is mis"
    ):
        prepare(wanted)
    assert content(tmp_path / "out") == before
    prepare(replace(wanted, overwrite=True))
    prepare(config(text, tmp_path / "anew"))
    assert content(tmp_path / "out") == content(tmp_path / "anew")


def test_a_killed_preparation_goes_on_where_it_stopped(
    text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (text / "d.txt").write_text("\n\n".join(f"{t} {n}" for n in range(3) for t in TEXTS))
    prepare(config(text, tmp_path / "whole"))
    made: list[int] = []
    honest = parts.PartMaker._write

    def dying(self: Any, folder: Path, unit: Any, advance: Any) -> None:
        made.append(unit.number)
        honest(self, folder, unit, advance)
        if len(made) == 2:
            raise KeyboardInterrupt

    monkeypatch.setattr(parts.PartMaker, "_write", dying)
    wanted = config(text, tmp_path / "out")
    assert main(wanted) == 75
    assert not (tmp_path / "out" / "manifest.json").exists()
    assert prepare(wanted).status == "completed"
    assert made[:2] == [0, 1]
    assert made[2:] == list(range(1, len(made) - 1))  # the first was not made again
    assert content(tmp_path / "out") == content(tmp_path / "whole")


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_worker_processes_leave_when_the_parent_is_killed(text: Path, tmp_path: Path) -> None:
    (text / "d.txt").write_text("\n\n".join(f"{t} {n}" for n in range(700) for t in TEXTS[:100]))
    command = [sys.executable, "-m", "bertsmith", "prepare", "--input", str(text)]
    command += ["--output", str(tmp_path / "out"), "--vocab_size", "100", "--workers", "2"]
    child = subprocess.Popen(command, stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 60
    while not list((tmp_path / "out" / "parts").glob("part-*.tmp-*")):
        assert time.monotonic() < deadline
        assert child.poll() is None
        time.sleep(0.01)
    workers = {
        int(p.name.rsplit("-", 1)[1]) for p in (tmp_path / "out" / "parts").glob("part-*.tmp-*")
    }
    assert child.pid not in workers
    child.send_signal(signal.SIGKILL)
    child.wait()
    while any(Path(f"/proc/{pid}").exists() for pid in workers):
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_two_machines_whose_processes_have_one_id_may_keep_the_tokenizer_at_once(
    tmp_path: Path, tiny_tokenizer_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer = load_tokenizer(tiny_tokenizer_folder)
    here, there = (PreparedFolder(str(tmp_path)) for _ in range(2))
    here.work.mkdir()

    def write_while_the_other_does(folder: Path, tokenizer: TextTokenizer) -> None:
        monkeypatch.setattr(prepared_folder, "write_tokenizer", write_tokenizer)
        there.keep_tokenizer(tokenizer)
        write_tokenizer(folder, tokenizer)

    monkeypatch.setattr(prepared_folder, "write_tokenizer", write_while_the_other_does)
    here.keep_tokenizer(tokenizer)
    assert [path.name for path in here.work.iterdir()] == ["tokenizer"]
    kept = here.tokenizer_there()
    assert kept is not None
    assert kept.vocab == tokenizer.vocab
    assert here.tokenizer_folder.stat().st_mode == here.work.stat().st_mode


def test_a_part_that_another_machine_has_just_finished_is_kept(tmp_path: Path) -> None:
    for name in ("fresh", "there"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "tokens.bin").write_text(name)
    parts.put_in_place(tmp_path / "fresh", tmp_path / "there")
    assert content(tmp_path) == {"there/tokens.bin": b"there"}
    with pytest.raises(FileNotFoundError):
        parts.put_in_place(tmp_path / "fresh", tmp_path / "nowhere")


def test_another_preparation_in_the_same_folder_is_kept_out(text: Path, tmp_path: Path) -> None:
    import fcntl

    (tmp_path / "out").mkdir()
    handle = os.open(tmp_path / "out", os.O_RDONLY)
    fcntl.flock(handle, fcntl.LOCK_EX)
    try:
        with pytest.raises(UserError, match="another `bertsmith prepare` is writing"):
            prepare(config(text, tmp_path / "out"))
    finally:
        os.close(handle)
    prepare(config(text, tmp_path / "out"))


def test_a_folder_with_other_files_is_refused_and_kept(text: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    (out / "thesis.tex").write_text("x")
    for overwrite in (False, True):
        with pytest.raises(UserError, match=r"no prepared text \(thesis\.tex\)"):
            prepare(config(text, out, overwrite=overwrite))
    with pytest.raises(UserError, match="is a file"):
        prepare(config(text, out / "thesis.tex"))
    assert content(out) == {"thesis.tex": b"x"}


def test_text_that_gives_nothing_is_refused(text: Path, tmp_path: Path) -> None:
    (text / "e.txt").write_text("")
    with pytest.raises(UserError, match=r"e\.txt: the file is empty"):
        prepare(config(text, tmp_path / "out"))
    blank = tmp_path / "blank.txt"
    blank.write_text("\n \n\u00a0\n")
    with pytest.raises(UserError, match="no document"):
        prepare(config(blank, tmp_path / "out"))
    with pytest.raises(UserError, match="give text with --input"):
        prepare(PrepareConfig(output=str(tmp_path / "out")))


def test_bad_bytes_can_be_skipped_and_are_counted(text: Path, tmp_path: Path) -> None:
    with (text / "a.txt").open("ab") as file:
        file.write(b"\n\nbr\xf6ken\n\nfine")
    with pytest.raises(UserError, match=r"a\.txt: byte [\d,]+ is not UTF-8"):
        prepare(config(text, tmp_path / "out"))
    counts = prepare(config(text, tmp_path / "out", bad_bytes="skip")).counts
    assert counts is not None
    assert counts["undecodable_documents"] == 1
    assert counts["documents"] == len(TEXTS) + 1


def test_a_disk_that_is_full_leaves_what_was_there(
    text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prepare(config(text, tmp_path / "out"))
    before = content(tmp_path / "out")

    def full(self: Any, folder: Path, unit: Any, advance: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(parts.PartMaker, "_write", full)
    with pytest.raises(UserError, match=r"cannot be written .No space left on device"):
        prepare(config(text, tmp_path / "out", vocab_size=140, overwrite=True))
    shutil.rmtree(tmp_path / "out" / "parts")
    assert content(tmp_path / "out") == before


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_folder_that_may_not_be_written_is_refused(text: Path, tmp_path: Path) -> None:
    (tmp_path / "locked").mkdir(mode=0o500)
    with pytest.raises(UserError, match="cannot be written"):
        prepare(config(text, tmp_path / "locked" / "out"))


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"shard": "0/2"}, "shard is '0/2'"),
        ({"shard": "3/2"}, "shard is '3/2'"),
        ({"shard": "x"}, "shard is 'x'"),
        ({"vocab_size": 5}, "vocab_size is 5"),
        ({"valid_share": 1.0}, "valid_share is 1.0"),
        ({"workers": 0}, "workers is 0"),
    ],
)
def test_values_out_of_range_are_refused(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        PrepareConfig(output="out", **values)


def test_text_that_was_read_as_latin1_is_told_before_it_is_tokenized(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = "\n\n".join(f"a paragraph, number {i}, of a book" for i in range(50))
    (tmp_path / "a.txt").write_text(f"{text}\n\nthe cafÃ© of the book\n", encoding="utf-8")
    prepare(PrepareConfig(input=[str(tmp_path / "a.txt")], output=str(tmp_path / "out")))
    told = capsys.readouterr().err
    assert "warning: 1 of 51 documents looks like UTF-8 that was once read as Latin-1" in told
    assert told.index("Latin-1") < told.index("training a tokenizer")
