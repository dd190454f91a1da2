"""Word starts of short real sentences in several scripts, by three kinds of tokenizer."""

import json
from collections.abc import Iterable
from pathlib import Path

import pytest
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from bertsmith.data import words
from bertsmith.data.shards import MANIFEST_FILE, open_shards
from bertsmith.data.tokenizer import TextTokenizer, load_tokenizer, write_tokenizer
from bertsmith.data.words import cutter_of, has_chinese, is_unspaced, word_starts
from bertsmith.errors import UserError
from bertsmith.recipes.config import PrepareConfig
from bertsmith.recipes.prepare import prepare
from bertsmith.report.progress import Speaker

ENGLISH = "The world, unbelievably, isn't flat."
CHINESE = "我喜欢北京大学的图书馆。"
JAPANESE = "私は東京タワーへ行きました。"
KOREAN = "나는 어제 학교에서 친구를 만났습니다."
ARABIC = "ذهبت إلى المدرسة صباحا."
MIXED = "在Python里, print是函数。"
THAI = "ฉันรักภาษาไทย"
TEXTS = [ENGLISH, CHINESE, JAPANESE, KOREAN, ARABIC, MIXED, THAI]
SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]

CHINESE_PARTS = {"我喜欢北京大学的图书馆": ["我", "喜欢", "北京大学", "的", "图书馆"]}
"""What jieba 0.42.1 gives; any other stretch is one part."""


def fixed_cutter(stretch: str) -> Iterable[str]:
    return CHINESE_PARTS.get(stretch, [stretch])


def tokenizer_of(kind: str, *, lowercase: bool = False) -> TextTokenizer:
    """Small enough that words fall into several tokens."""
    if kind == "wordpiece":
        from bertsmith.data.wordpiece import train_wordpiece

        return train_wordpiece(TEXTS * 3, vocab_size=220, lowercase=lowercase, min_frequency=2)
    if kind == "bytes":
        tokenizer = Tokenizer(models.BPE())
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = decoders.ByteLevel()
        trainer = trainers.BpeTrainer(
            vocab_size=300,
            special_tokens=SPECIAL,
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        )
    else:
        tokenizer = Tokenizer(models.Unigram())
        tokenizer.normalizer = normalizers.NFKC()
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
        trainer = trainers.UnigramTrainer(  # type: ignore[assignment]
            vocab_size=160, special_tokens=SPECIAL, unk_token="[UNK]", show_progress=False
        )
    tokenizer.train_from_iterator(TEXTS * 5, trainer)
    roles = dict(
        zip(
            ("pad_token", "unk_token", "cls_token", "sep_token", "mask_token"), SPECIAL, strict=True
        )
    )
    return load_tokenizer_of(tokenizer, roles)


def load_tokenizer_of(tokenizer: Tokenizer, roles: dict[str, str]) -> TextTokenizer:
    import tempfile

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        tokenizer.save(str(folder / "tokenizer.json"))
        (folder / "tokenizer_config.json").write_text(json.dumps(roles))
        return load_tokenizer(folder)


@pytest.fixture(params=["wordpiece", "uncased wordpiece", "bytes", "unigram"])
def tokenizer(request: pytest.FixtureRequest) -> TextTokenizer:
    return tokenizer_of(request.param.split()[-1], lowercase="uncased" in request.param)


def prepared_words(
    tokenizer: TextTokenizer, folder: Path, monkeypatch: pytest.MonkeyPatch, *, cutter: bool
) -> list[list[str]]:
    """The words of each of `TEXTS` after `prepare`, spaces left out, as pieces of the text."""
    source, output = folder / "tokenizer", folder / "out"
    source.mkdir()
    write_tokenizer(source, tokenizer)
    (folder / "text.txt").write_text("\n\n".join(TEXTS))
    if cutter:
        monkeypatch.setattr("bertsmith.data.parts.cutter_of", lambda how: fixed_cutter)
    prepare(
        PrepareConfig(
            input=[str(folder / "text.txt")],
            output=str(output),
            tokenizer=str(source),
            valid_share=0.0,
            workers=1,
            chinese_words="characters",
        )
    )
    corpus = open_shards(output, "train")
    found = []
    for index, text in enumerate(TEXTS):
        encoding = tokenizer.tokenizer.encode(text, add_special_tokens=False)
        assert encoding.ids == corpus.document(index).tolist()
        starts = corpus.word_starts(index)
        assert starts[0]
        cuts = [encoding.offsets[i][0] for i in range(len(starts)) if starts[i]]
        parts = [text[a:b].strip() for a, b in zip(cuts, [*cuts[1:], len(text)], strict=True)]
        found.append([part for part in parts if part])
    return found


def test_words_are_whole_in_every_script_whatever_the_tokenizer(
    tokenizer: TextTokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    english, chinese, japanese, korean, arabic, mixed, thai = prepared_words(
        tokenizer, tmp_path, monkeypatch, cutter=True
    )
    is_unigram = "Metaspace" in tokenizer.tokenizer.to_str()  # keeps a comma with its word
    assert english[0] == "The"
    assert english[1] == ("world," if is_unigram else "world")
    assert any("unbelievably" in word for word in english)
    assert chinese[:4] == ["我", "喜欢", "北京大学", "的"]
    assert chinese[4].startswith("图书馆")
    assert japanese[:3] == ["私", "は", "東京"]
    assert japanese[3].startswith("タワー")  # a token of WordPiece holds more
    assert japanese[-3:-1] == ["行", "きました"]
    assert korean[:3] == ["나는", "어제", "학교에서"]
    assert arabic[:2] == ["ذهبت", "إلى"]
    assert mixed[:2] == ["在", "Python"]
    assert mixed[2].startswith("里")
    assert len(thai) >= 3  # by tokens, not one word


def test_characters_are_words_without_a_segmenter(
    tokenizer: TextTokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    chinese = prepared_words(tokenizer, tmp_path, monkeypatch, cutter=False)[1]
    assert chinese[:10] == list("我喜欢北京大学的图书")


def test_jieba_gives_the_words_that_the_other_tests_take_for_its() -> None:
    jieba = pytest.importorskip("jieba", reason="extra zh")
    assert jieba
    cut = cutter_of(words.chinese_words("auto"))
    for stretch, parts in CHINESE_PARTS.items():
        assert list(cut(stretch)) == parts


def test_a_character_of_several_tokens_is_one_word() -> None:
    import numpy as np

    offsets = [(0, 1), (0, 1), (0, 1), (1, 2), (1, 2), (2, 3)]
    own = np.array([1, 0, 0, 0, 0, 0], bool)
    starts = word_starts("北京。", offsets, own, cutter_of("characters"))
    assert starts.tolist() == [True, False, False, True, False, True]
    assert is_unspaced("北")
    assert not is_unspaced(ENGLISH + KOREAN + ARABIC)
    assert has_chinese(CHINESE)
    assert not has_chinese(JAPANESE)


def test_a_missing_jieba_is_said(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert words.chinese_words("auto") == "characters"
    with pytest.raises(UserError, match=r"pip install 'bertsmith\[zh\]'"):
        words.chinese_words("jieba")
    with pytest.raises(UserError, match=r"begun with jieba 0\.42\.1, and here is characters"):
        cutter_of("jieba 0.42.1")
    said: list[str] = []
    speaker = Speaker()
    monkeypatch.setattr(speaker, "say", said.append)
    for name, text in (("zh", CHINESE), ("en", ENGLISH)):
        said.clear()
        (tmp_path / f"{name}.txt").write_text("\n\n".join([text] * 2 + [text + "!"]))
        prepare(
            PrepareConfig(
                input=[str(tmp_path / f"{name}.txt")], output=str(tmp_path / name), workers=1
            ),
            speaker=speaker,
        )
        assert any("jieba is not installed" in line for line in said) == (name == "zh")


def test_a_folder_of_before_says_that_it_has_no_word_starts(tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("\n\n".join([ENGLISH, KOREAN]))
    output = tmp_path / "out"
    prepare(
        PrepareConfig(
            input=[str(tmp_path / "text.txt")], output=str(output), valid_share=0.0, workers=1
        )
    )
    manifest = json.loads((output / MANIFEST_FILE).read_text())
    assert manifest["words"]["chinese"] in (words.chinese_words("auto"),)
    del manifest["words"]
    (output / MANIFEST_FILE).write_text(json.dumps(manifest))
    corpus = open_shards(output, "train")
    with pytest.raises(UserError, match="prepared without the beginnings of words"):
        corpus.word_starts(0)
