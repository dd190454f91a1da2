"""Sentences as windows of token ids: every word is read once, from the window that shows it best.

A sentence that the model can read whole is one window. A longer one is read in windows that
overlap; a word's first piece is taken from the window whose middle it is nearest to, so that it has
the most context on its poorer side. Nothing is cut off.

Shape legend: T tokens of all windows end to end, R windows, W words of all sentences end to end, S
sentences; R1 = R + 1, S1 = S + 1; M words that a pack reads.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from bertsmith.batch import MaskedBatch, pack
from bertsmith.data.examples import TEXTS_AT_ONCE, Examples, Steps, packs_by_length
from bertsmith.data.tokenizer import TextTokenizer, word_bounds

FRAME_TOKENS = 2
"""[CLS] and [SEP], around every window."""


@dataclass(frozen=True, kw_only=True)
class Windows:
    """Tokenised sentences. Words are in the order of the sentences, and so are windows."""

    examples: Examples
    """A window each, special tokens included; its owner is the sentence."""

    positions_W: Tensor
    """Place of a word's first piece in the window that reads it, int64."""

    words_R1: Tensor
    """First word that each window reads, then W, int64."""

    words_S1: Tensor
    """First word of each sentence, then W, int64."""

    num_unreadable: int
    """Words of which the tokenizer leaves nothing; they are read as unknown."""

    def packs(self, *, tokens_per_pack: int) -> list[list[int]]:
        """Every window that reads a word once, by length."""
        rows = self.words_R1.diff().nonzero().flatten().tolist()
        return packs_by_length(self.examples.lengths_N, rows, tokens_per_pack=tokens_per_pack)

    def batch(self, rows: Sequence[int], tags_W: Tensor) -> tuple[MaskedBatch, Tensor]:
        """Some windows end to end with the tags of their words, and which words these are, int64.

        Args:
            rows: The windows, in the order of the pack.
            tags_W: Tag ids, int64.
        """
        inputs = self.examples.pack(rows)
        bounds = [(int(self.words_R1[r]), int(self.words_R1[r + 1])) for r in rows]
        words_M = torch.cat([torch.arange(a, b) for a, b in bounds])
        starts = inputs.starts_N1.tolist()
        shifts_M = torch.cat(
            [torch.full((b - a,), starts[i]) for i, (a, b) in enumerate(bounds)]
        ).to(torch.int64)
        positions_M = self.positions_W[words_M] + shifts_M
        return MaskedBatch(
            inputs=inputs, positions_M=positions_M, targets_M=tags_W[words_M]
        ), words_M


class WindowTokenizer:
    """Tokenises sentences whose words are given, as transformers' `is_split_into_words`."""

    def __init__(
        self, tokenizer: TextTokenizer, *, max_sequence_tokens: int, overlap_tokens: int
    ) -> None:
        """Set up.

        Args:
            tokenizer: Of the model; puts [CLS] and [SEP] around a text.
            max_sequence_tokens: Most tokens of a window, special ones included.
            overlap_tokens: That a window shares with the one before, at least; less than its room.
        """
        self._tokenizer, self._vocab = tokenizer.tokenizer, tokenizer.vocab
        self._unknown = tokenizer.roles["unk_token"]
        self._room = max_sequence_tokens - FRAME_TOKENS
        self._step = self._room - overlap_tokens
        assert self._step > 0, "windows move on"

    def encode(self, sentences: Sequence[Sequence[str]]) -> Windows:
        """Tokenise sentences, none of them empty."""
        ids: list[np.ndarray] = []
        lengths = [0]
        positions: list[int] = []
        words_R1, words_S1, sentences_R = [0], [0], []
        num_unreadable = 0
        for number, (piece_ids, first_pieces, num_lost) in enumerate(self._pieces(sentences)):
            num_unreadable += num_lost
            starts = self._starts(len(piece_ids))
            window_of = self._window_of(np.array(first_pieces), np.array(starts))
            for i, start in enumerate(starts):
                inside = piece_ids[start : start + self._room]
                ids.append(np.array([self._vocab.cls_id, *inside, self._vocab.sep_id], np.int32))
                lengths.append(len(ids[-1]))
                read = [
                    p - start + 1 for p, w in zip(first_pieces, window_of, strict=True) if w == i
                ]
                positions += read
                words_R1.append(len(positions))
                sentences_R.append(number)
            words_S1.append(len(positions))
        return Windows(
            examples=Examples(
                input_ids_T=torch.from_numpy(np.concatenate(ids)),
                segment_ids_T=None,
                starts_N1=torch.tensor(lengths).cumsum(0),
                owners_N=torch.tensor(sentences_R),
                num_cut=0,
                tokens_cut=0,
            ),
            positions_W=torch.tensor(positions),
            words_R1=torch.tensor(words_R1),
            words_S1=torch.tensor(words_S1),
            num_unreadable=num_unreadable,
        )

    def split(self, text: str) -> list[tuple[int, int]]:
        """Where the words of a text stand, from and to, as the tokenizer parts it."""
        return word_bounds(self._tokenizer, text)

    def _pieces(
        self, sentences: Sequence[Sequence[str]]
    ) -> "list[tuple[list[int], list[int], int]]":
        """Of each sentence the pieces' ids, where its words begin, how many are unreadable."""
        found = []
        for start in range(0, len(sentences), TEXTS_AT_ONCE):
            some = [list(words) for words in sentences[start : start + TEXTS_AT_ONCE]]
            encodings = self._tokenizer.encode_batch(
                some, is_pretokenized=True, add_special_tokens=False
            )
            for words, whole in zip(some, encodings, strict=True):
                encoding, num_lost = whole, 0
                lost = set(range(len(words))) - set(whole.word_ids)
                if lost:
                    readable = [self._unknown if i in lost else w for i, w in enumerate(words)]
                    num_lost = len(lost)
                    encoding = self._tokenizer.encode(
                        readable, is_pretokenized=True, add_special_tokens=False
                    )
                of_word: dict[int, int] = {}
                for place, word in enumerate(encoding.word_ids):
                    if word is not None:
                        of_word.setdefault(word, place)
                assert len(of_word) == len(words), "every word has a piece"
                found.append((encoding.ids, [of_word[i] for i in range(len(words))], num_lost))
        return found

    def _starts(self, num_pieces: int) -> list[int]:
        """Where windows begin; the last one ends with the sentence."""
        if num_pieces <= self._room:
            return [0]
        last = num_pieces - self._room
        return [*range(0, last, self._step), last]

    def _window_of(self, places_W: np.ndarray, starts_R: np.ndarray) -> list[int]:
        """The window in whose middle a place is most nearly; of two the earlier."""
        middles_R = starts_R + (self._room - 1) / 2
        far_WR = np.abs(places_W[:, None] - middles_R[None, :])
        nearest: list[int] = far_WR.argmin(1).tolist()
        return nearest


class TaggingSteps(Steps[MaskedBatch]):
    """What each optimizer step sees: windows, and the tags of their words."""

    def __init__(
        self,
        windows: Windows,
        tags_W: Tensor,
        *,
        examples_per_step: int,
        tokens_per_pack: int,
        seed: int,
        at_once: int = 1,
        weights_W: Tensor | None = None,
    ) -> None:
        """As `Steps`; `tags_W` are tag ids, int64, and `weights_W` those of the loss's terms."""
        super().__init__(
            windows.examples,
            examples_per_step=examples_per_step,
            tokens_per_pack=tokens_per_pack,
            seed=seed,
            at_once=at_once,
        )
        self._windows, self._tags_W, self._weights_W = windows, tags_W, weights_W

    def _batch(self, rows: list[int]) -> MaskedBatch:
        batch, words_M = self._windows.batch(rows, self._tags_W)
        if self._weights_W is None:
            return batch
        return replace(batch, weights_M=self._weights_W[words_M])


def largest_tagged(windows: Windows, tags_W: Tensor, *, tokens: int, longest: int) -> MaskedBatch:
    """A pack that needs as much memory as any: each of its tokens is a word.

    Args:
        windows: Whose tokens occur.
        tags_W: Whose tags occur.
        tokens: In the pack.
        longest: Of a window: all have as many, but for the last.
    """
    known_T = windows.examples.input_ids_T
    ids_T = known_T[torch.arange(tokens) % len(known_T)]
    inputs = pack(list(torch.split(ids_T, longest)))
    return MaskedBatch(
        inputs=inputs,
        positions_M=torch.arange(tokens),
        targets_M=tags_W[torch.arange(tokens) % len(tags_W)],
    )
