"""Tokenizer folders against the transformers library; training against itself elsewhere."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from bertsmith.data.tokenizer import (
    SPECIAL_TOKENS,
    bert_tokenizer,
    continues_word,
    load_tokenizer,
    write_tokenizer,
)
from bertsmith.data.wordpiece import train_wordpiece
from bertsmith.errors import UserError

TEXTS = [
    "The cat sat on the mat, and the other cat sat on the hat.",
    "Élan vital: naïve cafés aren't cheap -- 3,50 each!",
    "中文 mixed with English, and emoji \U0001f600.",
    "catsat hatmat [MASK] unbelievably\tlong\u00a0spaces \u200b zero",
] * 5


@pytest.mark.parametrize("lowercase", [True, False])
def test_a_trained_tokenizer_loads_in_transformers_with_equal_ids(
    tmp_path: Path, lowercase: bool
) -> None:
    from transformers import AutoTokenizer

    trained = train_wordpiece(TEXTS, vocab_size=200, lowercase=lowercase, min_frequency=2)
    write_tokenizer(tmp_path, trained)
    theirs = AutoTokenizer.from_pretrained(tmp_path)
    assert theirs.is_fast
    assert type(theirs).__name__.startswith("BertTokenizer")
    assert (theirs.pad_token_id, theirs.unk_token_id, theirs.cls_token_id) == (0, 1, 2)
    assert (theirs.sep_token_id, theirs.mask_token_id) == (3, 4)
    for text in TEXTS[:4]:
        assert theirs(text)["input_ids"] == trained.tokenizer.encode(text).ids
    pair = trained.tokenizer.encode(TEXTS[0], TEXTS[1])
    assert theirs(TEXTS[0], TEXTS[1])["input_ids"] == pair.ids
    assert theirs(TEXTS[0], TEXTS[1])["token_type_ids"] == pair.type_ids
    assert theirs.decode(trained.tokenizer.encode("the cat").ids, skip_special_tokens=True) == (
        "the cat"
    )


def test_a_written_tokenizer_reads_back_as_itself(tmp_path: Path) -> None:
    trained = train_wordpiece(TEXTS, vocab_size=150, lowercase=True, min_frequency=2)
    write_tokenizer(tmp_path, trained)
    assert load_tokenizer(tmp_path).vocab == trained.vocab


def test_lower_case_strips_accents_and_cased_keeps_both() -> None:
    tokens = {
        lowercase: train_wordpiece(
            ["Élan Élan elan"], vocab_size=60, lowercase=lowercase, min_frequency=1
        )
        .tokenizer.encode("Élan", add_special_tokens=False)
        .tokens
        for lowercase in (True, False)
    }
    assert "".join(tokens[True]).replace("##", "") == "elan"
    assert "".join(tokens[False]).replace("##", "") == "Élan"


def test_training_gives_the_same_vocabulary_in_every_process() -> None:
    program = (
        "import random; from bertsmith.data.wordpiece import train_wordpiece\n"
        "rng = random.Random(0)\n"
        "texts = [''.join(rng.choices('abcdefghijklmnop ', k=200)) for _ in range(60)]\n"
        "print(train_wordpiece(texts, vocab_size=400, lowercase=True, min_frequency=2)"
        ".vocab.fingerprint)"
    )
    found = {
        subprocess.run(
            [sys.executable, "-c", program],
            check=True,
            capture_output=True,
            env=os.environ | {"PYTHONHASHSEED": seed},
        ).stdout
        for seed in ("1", "2", "3")
    }
    assert len(found) == 1


def test_the_alphabet_is_the_most_frequent_characters_and_leaves_room_for_words() -> None:
    rare = "".join(chr(0x4E00 + n) for n in range(500))
    trained = train_wordpiece(
        ["hello world " * 50, rare], vocab_size=64, lowercase=True, min_frequency=2
    )
    tokens = trained.tokenizer.get_vocab()
    assert len(tokens) <= 64
    assert sum("\u4e00" <= token[0] <= "\u9fff" for token in tokens) < 0.75 * 59
    assert set("helowrd") <= set(tokens)
    assert {"hello", "world"} <= set(tokens)


def test_a_vocabulary_knows_which_ids_noise_may_be(tmp_path: Path) -> None:
    words = {token: i for i, token in enumerate([*SPECIAL_TOKENS, "a", "b"])} | {"c": 9}
    vocab = bert_tokenizer(words, lowercase=True).vocab
    assert vocab.size == 10
    assert vocab.special_ids == (0, 1, 2, 3, 4)
    assert vocab.ordinary_ids.dtype == np.int64
    assert vocab.ordinary_ids.tolist() == [5, 6, 9]


def test_a_folder_with_only_a_vocabulary_file_is_read_as_bert(tmp_path: Path) -> None:
    words = [*SPECIAL_TOKENS, "ab", "##c", "A"]
    (tmp_path / "vocab.txt").write_text("\n".join(words) + "\n")
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"do_lower_case": False}))
    loaded = load_tokenizer(tmp_path)
    assert loaded.tokenizer.encode("abc A").ids == [2, 5, 6, 7, 3]


@pytest.mark.parametrize("strip_accents", [None, False, True])
@pytest.mark.parametrize("lowercase", [False, True])
@pytest.mark.parametrize("splits", [False, True])
def test_a_vocabulary_file_is_read_with_the_accents_and_chinese_of_its_config(
    tmp_path: Path, strip_accents: bool | None, lowercase: bool, splits: bool
) -> None:
    words = [*SPECIAL_TOKENS, "\u00e9", "e", "\u4e2d\u6587", "\u4e2d", "\u6587"]
    (tmp_path / "vocab.txt").write_text("\n".join(words) + "\n", encoding="utf-8")
    said = {
        "do_lower_case": lowercase,
        "strip_accents": strip_accents,
        "tokenize_chinese_chars": splits,
    }
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(said))
    loaded = load_tokenizer(tmp_path)
    strips = lowercase if strip_accents is None else strip_accents
    wanted = ["e" if strips else "\u00e9", *(words[-2:] if splits else [words[-3]])]
    text = "\u00e9 \u4e2d\u6587"
    assert loaded.tokenizer.encode(text, add_special_tokens=False).tokens == wanted
    assert said.items() <= loaded.config.items()


def test_padding_and_cutting_stored_in_a_tokenizer_are_not_followed(tmp_path: Path) -> None:
    trained = train_wordpiece(TEXTS, vocab_size=150, lowercase=True, min_frequency=2)
    wanted = len(trained.tokenizer.encode(TEXTS[0]))
    trained.tokenizer.enable_truncation(4)
    trained.tokenizer.enable_padding(length=128)
    trained.tokenizer.save(str(tmp_path / "tokenizer.json"))
    assert len(load_tokenizer(tmp_path).tokenizer.encode(TEXTS[0])) == wanted


def test_a_folder_that_is_no_tokenizer_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"holds no tokenizer\.json and no vocab\.txt"):
        load_tokenizer(tmp_path)
    (tmp_path / "vocab.txt").write_text("[PAD]\n[UNK]\na\n")
    with pytest.raises(UserError, match=r"has no \[CLS\], \[SEP\], \[MASK\]"):
        load_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(UserError, match="not a readable tokenizer"):
        load_tokenizer(tmp_path)


def test_a_role_named_by_the_config_is_found(tmp_path: Path) -> None:
    from tokenizers import Tokenizer, models

    Tokenizer(
        models.WordLevel(
            {"<pad>": 0, "<unk>": 1, "<s>": 2, "</s>": 3, "<mask>": 4, "x": 5}, "<unk>"
        )
    ).save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(UserError, match=r"has no pad_token .*'\[PAD\]'"):
        load_tokenizer(tmp_path)
    roles = {"pad_token": "<pad>", "unk_token": "<unk>", "cls_token": "<s>", "sep_token": "</s>"}
    (tmp_path / "special_tokens_map.json").write_text(json.dumps(roles))
    (tmp_path / "tokenizer_config.json").write_text(
        json.dumps({"mask_token": {"content": "<mask>"}})
    )
    vocab = load_tokenizer(tmp_path).vocab
    assert (vocab.cls_id, vocab.mask_id, vocab.ordinary_ids.tolist()) == (2, 4, [5])


def test_ids_alone_tell_word_starts_as_the_library_does() -> None:
    trained = train_wordpiece(TEXTS, vocab_size=150, lowercase=True, min_frequency=2)
    table = continues_word(trained.tokenizer)
    assert table is not None
    for text in [*TEXTS, "## #a ##a unknowable\u4e00\u4e01"]:
        encoding = trained.tokenizer.encode(text, add_special_tokens=False)
        words = np.array(encoding.word_ids)
        wanted = np.diff(words, prepend=-1) != 0
        assert (~table[encoding.ids]).tolist() == wanted.tolist()
