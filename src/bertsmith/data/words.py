"""Where words begin, for writing systems without spaces too.

A tokenizer's own pre-tokenizer says where words begin, but most take a Chinese, Japanese or Thai
sentence for one word, and BERT's takes each Chinese character for one. So stretches of these
scripts are cut here:

- Chinese: into words by jieba, or characters.
- Japanese, which is text with kana in it: where the script changes between kanji, hiragana and
  katakana, which is about a word, or its stem and its ending.
- Thai, Lao, Khmer, Burmese: tokens are all there is.

Everything else (Korean, Arabic and what is written with spaces) is left to the pre-tokenizer.
"""

import importlib.util
import re
import warnings
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from importlib.metadata import version

import numpy as np
from numpy.typing import NDArray

from bertsmith.errors import UserError

CHARACTERS, JIEBA = "characters", "jieba"

_HAN = "\u3005-\u3007\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\U00020000-\U0003134f"
_UNSPACED = re.compile(
    f"(?P<han>[{_HAN}]+)|(?P<kana>[\u3041-\u309f]+|[\u30a1-\u30fa\u30fc-\u30ff\uff66-\uff9f]+)"
    "|(?P<tokens>[\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff]+)"
)
_KANA = re.compile("[\u3041-\u30fa\uff66-\uff9d]")

Cutter = Callable[[str], Iterable[str]]
"""Parts of a stretch of Chinese characters, end to end."""


def chinese_words(asked: str) -> str:
    """How Chinese words are found: characters, or jieba with its version, on which they depend.

    Args:
        asked: auto (jieba where it is installed), jieba or characters.

    Raises:
        UserError: jieba is asked for and missing.
    """
    if asked == CHARACTERS:
        return CHARACTERS
    if importlib.util.find_spec(JIEBA) is not None:
        return f"{JIEBA} {version(JIEBA)}"
    if asked == JIEBA:
        raise UserError(
            "--chinese_words jieba: jieba is not installed; pip install 'bertsmith[zh]', or give "
            "--chinese_words characters"
        )
    return CHARACTERS


def is_unspaced(text: str) -> bool:
    """Whether a text has a stretch that is cut here."""
    return _UNSPACED.search(text) is not None


def has_chinese(text: str) -> bool:
    """Whether a text has Chinese characters and is not Japanese."""
    return _KANA.search(text) is None and re.search(f"[{_HAN}]", text) is not None


def cutter_of(how: str) -> Cutter:
    """The cutter that `chinese_words` named.

    Raises:
        UserError: It is jieba, of another version than is installed here.
    """
    if how == CHARACTERS:
        return list
    if chinese_words("auto") != how:
        raise UserError(
            f"Chinese words were begun with {how}, and here is {chinese_words('auto')}; install "
            "that one (pip install 'bertsmith[zh]'), or prepare anew with --overwrite"
        )
    return _jieba()


@cache
def _jieba() -> Cutter:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of its imports and old escapes
        import jieba  # noqa: PLC0415 - an extra

    jieba.setLogLevel("ERROR")
    return jieba.lcut  # type: ignore[no-any-return]


def word_starts(
    text: str,
    offsets: Sequence[tuple[int, int]],
    own_starts: NDArray[np.bool_],
    cut_chinese: Cutter,
) -> NDArray[np.bool_]:
    """For each token whether it begins a word.

    Args:
        text: What was tokenised.
        offsets: The characters of the text that each token is of, first and end.
        own_starts: What the tokenizer's pre-tokenizer says.
        cut_chinese: Cuts stretches of Chinese characters.
    """
    is_ours, is_start = _starts_of_characters(text, cut_chinese)
    starts = own_starts.copy()
    before = -1
    for number, (first, end) in enumerate(offsets):
        at = first
        while at < end - 1 and text[at].isspace():  # of a token such as " word"
            at += 1
        if is_ours[at]:
            starts[number] = is_start[at] and at != before
        elif before >= 0 and is_ours[before]:
            starts[number] = True
        before = at
    if len(starts):
        starts[0] = True
    return starts


def _starts_of_characters(
    text: str, cut_chinese: Cutter
) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
    """Which characters are of stretches that are cut here, and which of them begin a part.

    One more than there are: a token may stand behind the last.
    """
    is_ours, is_start = np.zeros((2, len(text) + 1), np.bool_)
    is_japanese = _KANA.search(text) is not None
    for stretch in _UNSPACED.finditer(text):
        first, end = stretch.span()
        is_ours[first:end] = True
        if stretch.lastgroup == "tokens":
            is_start[first:end] = True
        elif stretch.lastgroup == "kana" or is_japanese:
            is_start[first] = True
        else:
            for part in cut_chinese(stretch.group()):
                is_start[first] = True
                first += len(part)
    return is_ours, is_start
