"""Training a WordPiece vocabulary, the same on every machine.

The tokenizers library numbers continuing characters ("##a") in the order of a hash map with a
random seed, and ties between merges follow from the numbers: two trainings on one text differ in
hundreds of tokens. So the characters are counted here, given to it in a fixed order, and what it
learns is then a function of the text alone. It also leaves the choice of the alphabet to us:
the most frequent characters, never more than three quarters of the vocabulary.
"""

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer, models, pre_tokenizers, trainers

from bertsmith.data.tokenizer import SPECIAL_TOKENS, TextTokenizer, bert_normalizer, bert_tokenizer

BATCH_CHARACTERS = 1 << 18
"""Texts are normalised and handed over in pieces of this size."""

NUM_CODES = 0x110000
ALPHABET_SHARE = 0.75


def train_wordpiece(
    texts: Iterable[str], *, vocab_size: int, lowercase: bool, min_frequency: int
) -> TextTokenizer:
    """Learn a vocabulary from texts.

    Args:
        texts: Documents.
        vocab_size: Most tokens, the five special ones included; a small text gives fewer.
        lowercase: Lower case and no accents, or the text as it is.
        min_frequency: How often a pair must occur to be merged.
    """
    normalizer = bert_normalizer(lowercase=lowercase)
    pieces = [normalizer.normalize_str(piece) for piece in _batches(texts)]
    alphabet, continuing = _alphabet(pieces, room=vocab_size - len(SPECIAL_TOKENS))
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    first = [*SPECIAL_TOKENS, *alphabet, *(f"##{c}" for c in continuing)]
    trainer = trainers.WordPieceTrainer(
        vocab_size=vocab_size,
        min_frequency=min_frequency,
        show_progress=False,
        special_tokens=first,
        initial_alphabet=alphabet,
        limit_alphabet=len(alphabet),
    )
    tokenizer.train_from_iterator(pieces, trainer)
    learned = sorted(tokenizer.get_vocab(with_added_tokens=False).items(), key=lambda item: item[1])
    known = set(first)
    tokens = first + [token for token, _ in learned if token not in known]
    return bert_tokenizer({token: i for i, token in enumerate(tokens)}, lowercase=lowercase)


def _batches(texts: Iterable[str]) -> Iterable[str]:
    batch: list[str] = []
    size = 0
    for text in texts:
        batch.append(text)
        size += len(text)
        if size >= BATCH_CHARACTERS:
            yield "\n".join(batch)
            batch, size = [], 0
    if batch:
        yield "\n".join(batch)


def _alphabet(pieces: list[str], *, room: int) -> tuple[list[str], list[str]]:
    """The characters to know, and those of them that also stand inside words, in code order."""
    counts = np.zeros(NUM_CODES, np.int64)
    inside = np.zeros(NUM_CODES, np.bool_)
    kinds = _KindsOfCharacter()
    for piece in pieces:
        codes = np.frombuffer(piece.encode("utf-32-le"), np.uint32)
        found, tally = np.unique(codes, return_counts=True)
        counts[found] += tally
        kinds.learn(found)
        in_word = kinds.in_word[codes]
        inside[codes[1:][in_word[1:] & in_word[:-1]]] = True
    counts[kinds.is_space] = 0
    by_count = np.argsort(-counts, kind="stable")
    by_count = by_count[: np.count_nonzero(counts)]
    costs = np.cumsum(1 + inside[by_count])
    kept = np.sort(by_count[costs <= max(int(room * ALPHABET_SHARE), 1)])
    return [chr(c) for c in kept], [chr(c) for c in kept[inside[kept]]]


class _KindsOfCharacter:
    """Which characters BERT's pre-tokenizer keeps in words, and which it drops; asked once each."""

    def __init__(self) -> None:
        self.in_word = np.zeros(NUM_CODES, np.bool_)
        self.is_space = np.zeros(NUM_CODES, np.bool_)
        self._is_known = np.zeros(NUM_CODES, np.bool_)
        self._splitter = pre_tokenizers.BertPreTokenizer()

    def learn(self, codes: NDArray[np.uint32]) -> None:
        for code in codes[~self._is_known[codes]].tolist():
            words = [word for word, _ in self._splitter.pre_tokenize_str("a" + chr(code))]
            self.in_word[code] = words == ["a" + chr(code)]
            self.is_space[code] = words == ["a"]
        self._is_known[codes] = True
