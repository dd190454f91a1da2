"""Reading shards back: what was written, across shard borders, and what is wrong with a folder."""

import json
from itertools import combinations_with_replacement
from pathlib import Path

import numpy as np
import pytest

from bertsmith.data import assembly, shards
from bertsmith.data.shards import TokenCorpus, open_shards
from bertsmith.data.tokenizer import load_tokenizer
from bertsmith.errors import UserError
from bertsmith.recipes.config import PrepareConfig
from bertsmith.recipes.prepare import prepare

TEXTS = [f"document number {n} has {'many ' * (n % 9)}words, undoubtedly" for n in range(120)]


def prepared(root: Path, texts: list[str] = TEXTS) -> Path:
    (root / "text.txt").write_text("\n\n".join(texts))
    config = PrepareConfig(
        input=[str(root / "text.txt")],
        output=str(root / "out"),
        vocab_size=120,
        valid_share=0.2,
        workers=1,
    )
    prepare(config)
    return root / "out"


def everything(folder: Path) -> dict[str, tuple[list[int], list[bool]]]:
    """Ids and word starts by name, of both splits."""
    corpora: list[TokenCorpus] = [open_shards(folder, "train"), open_shards(folder, "valid")]
    return {
        c.name_of(i): (c.document(i).tolist(), c.word_starts(i).tolist())
        for c in corpora
        for i in range(c.num_documents)
    }


def test_every_document_reads_back_as_the_tokenizer_gives_it(tmp_path: Path) -> None:
    folder = prepared(tmp_path)
    tokenizer = load_tokenizer(folder / "tokenizer").tokenizer
    found = everything(folder)
    assert len(found) == len(TEXTS)
    for number, text in enumerate(TEXTS):
        ids, starts = found[f"{tmp_path / 'text.txt'}:{2 * number + 1}"]
        encoding = tokenizer.encode(text, add_special_tokens=False)
        assert ids == encoding.ids
        assert starts == (np.diff(np.array(encoding.word_ids), prepend=-1) != 0).tolist()


def test_documents_are_found_across_shard_borders(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "one").mkdir()
    (tmp_path / "many").mkdir()
    one = prepared(tmp_path / "one")
    monkeypatch.setattr(assembly, "SHARD_TOKENS", 100)
    monkeypatch.setattr(assembly, "SLAB_TOKENS", 50)
    many = prepared(tmp_path / "many")
    assert (many / "train" / "tokens-00003.bin").exists()
    assert not (one / "train" / "tokens-00001.bin").exists()
    assert list(everything(many).values()) == list(everything(one).values())
    corpus = open_shards(many, "train")
    documents = range(corpus.num_documents)
    lengths = [len(corpus.document(i)) for i in documents]
    assert corpus.lengths(0, corpus.num_documents).dtype == np.int64
    assert corpus.num_tokens == sum(lengths)
    for first, stop in combinations_with_replacement([*documents, len(documents)], 2):
        assert corpus.lengths(first, stop).tolist() == lengths[first:stop]
    with pytest.raises(IndexError, match="of 9"):
        corpus.lengths(0, len(documents) + 1)


def test_shards_are_mapped_when_asked_for_and_few_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(assembly, "SHARD_TOKENS", 100)
    monkeypatch.setattr(assembly, "SLAB_TOKENS", 50)
    monkeypatch.setattr(shards, "MAPPED_SHARDS", 2)
    folder = prepared(tmp_path)
    mapped: list[int] = []
    really_map = shards.ShardFiles.map

    def counted(files: shards.ShardFiles) -> shards.Shard:
        mapped.append(files.number)
        return really_map(files)

    monkeypatch.setattr(shards.ShardFiles, "map", counted)
    corpus = open_shards(folder, "train")
    assert (corpus.num_documents, mapped) == (len(TEXTS) - 26, [])
    last = corpus.num_documents - 1
    first_document, last_document = corpus.document(0), corpus.document(last)
    assert mapped == [0, (highest := max(mapped))]
    corpus.lengths(0, corpus.num_documents)  # goes through all: the last is mapped anew
    assert mapped[2:] == list(range(1, highest + 1))
    assert np.array_equal(corpus.document(0), first_document)
    assert np.array_equal(corpus.document(last), last_document)


def test_a_document_is_a_view_that_cannot_be_written(tmp_path: Path) -> None:
    document = open_shards(prepared(tmp_path), "train").document(0)
    with pytest.raises(ValueError, match="read-only"):
        document[0] = 1


def test_the_fingerprint_follows_the_text(tmp_path: Path) -> None:
    for name in ("a", "b", "c"):
        (tmp_path / name).mkdir()
    a = open_shards(prepared(tmp_path / "a"), "train").fingerprint
    b = open_shards(prepared(tmp_path / "b"), "train").fingerprint
    c = open_shards(prepared(tmp_path / "c", TEXTS[::-1]), "train").fingerprint
    assert a == b != c


def test_a_changed_byte_is_named_by_file_and_hash(tmp_path: Path) -> None:
    folder = prepared(tmp_path)
    file = folder / "train" / "tokens-00000.bin"
    content = bytearray(file.read_bytes())
    content[10] ^= 1
    file.write_bytes(content)
    sha256 = json.loads((folder / "manifest.json").read_text())["files"]["train/tokens-00000.bin"]
    with pytest.raises(UserError, match=rf"tokens-00000\.bin: damaged .*{sha256['sha256']}"):
        open_shards(folder, "train")
    assert open_shards(folder, "train", verify=False).num_documents > 0
    assert open_shards(folder, "valid").num_documents > 0


@pytest.mark.parametrize("kind", ["tokens", "offsets", "words", "places"])
def test_a_file_that_is_cut_off_or_missing_is_named_even_unverified(
    tmp_path: Path, kind: str
) -> None:
    folder = prepared(tmp_path)
    file = folder / "train" / f"{kind}-00000.bin"
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(UserError, match=f"{kind}-00000.bin: damaged"):
        open_shards(folder, "train", verify=False)
    file.unlink()
    with pytest.raises(UserError, match=f"{kind}-00000.bin: cannot be read"):
        open_shards(folder, "train", verify=False)


def test_another_tokenizer_in_the_folder_is_noticed(tmp_path: Path) -> None:
    folder = prepared(tmp_path)
    file = folder / "tokenizer" / "tokenizer.json"
    file.write_text(file.read_text().replace('"lowercase": true', '"lowercase": false'))
    with pytest.raises(UserError, match="not the tokenizer the text was prepared with"):
        open_shards(folder, "train")


def test_a_folder_that_was_not_prepared_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="not a prepared folder"):
        open_shards(tmp_path, "train")
    (tmp_path / "parts").mkdir()
    with pytest.raises(UserError, match="not finished"):
        open_shards(tmp_path, "train")
    (tmp_path / "manifest.json").write_text('{"schema": 99}')
    with pytest.raises(UserError, match="manifest of version 1"):
        open_shards(tmp_path, "train")


def test_a_shard_that_shrinks_or_goes_before_it_is_read_is_named_with_the_document(
    tmp_path: Path,
) -> None:
    folder = prepared(tmp_path)
    corpus = open_shards(folder, "train")
    for kind in ("tokens", "offsets", "words", "places"):
        file = folder / "train" / f"{kind}-00000.bin"
        content = file.read_bytes()
        for left in (b"", content[:-1], content[: len(content) // 2], content + b"more"):
            file.write_bytes(left)
            with pytest.raises(UserError) as caught:
                corpus.document(7)
            assert f"{file}: {len(left):,} bytes where there were {len(content):,}" in str(
                caught.value
            )
            assert "(document 7 was wanted)" in str(caught.value)
        file.unlink()
        with pytest.raises(UserError, match=rf"{kind}-00000\.bin: cannot be read: No such file"):
            corpus.lengths(3, 5)
        file.write_bytes(content)
    assert len(corpus.document(7)) > 0  # a file that was put back is read


def test_a_shard_that_is_replaced_while_it_is_mapped_is_read_as_it_was(tmp_path: Path) -> None:
    """`prepare` replaces files by rename and never shortens one: what is mapped stays whole."""
    folder = prepared(tmp_path)
    corpus = open_shards(folder, "train")
    before = corpus.document(7).tolist()
    for file in (folder / "train").iterdir():
        file.unlink()
    assert corpus.document(7).tolist() == before
