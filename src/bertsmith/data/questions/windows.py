"""Questions as windows of token ids: [CLS] question [SEP] a stretch of the context [SEP].

The question stands before each window; the context moves on, and windows overlap. Nothing of the
context is cut off.

Shape legend: T tokens of all windows end to end, R windows, R2 the same with two columns (an
answer's first token and its last), Q questions, P tokens of a context.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from bertsmith.data.examples import TEXTS_AT_ONCE, Examples
from bertsmith.data.questions.question import Question
from bertsmith.data.tokenizer import TextTokenizer

FRAME_TOKENS = 3
"""[CLS] and two [SEP], in every window."""

MAX_QUESTION_TOKENS = 64
"""A longer question loses its end, as with BERT's `run_squad`; or half a window's room if less."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ReadQuestion:
    """A question and its context as token ids."""

    question_ids: NDArray[np.int32]
    context_ids: NDArray[np.int32]
    offsets_P2: NDArray[np.int32]
    """From which character to which each token of the context stands."""

    answer: tuple[int, int] | None
    """First and last token of the first answer that is given; None: there is none, or the
    tokenizer leaves nothing of it."""

    is_cut: bool
    """Whether the question lost its end."""


@dataclass(frozen=True, kw_only=True)
class QuestionWindows:
    """Tokenised questions. Windows are in the order of the questions, and of each context."""

    examples: Examples
    """A window each, special tokens included; its owner is the question."""

    places_R2: Tensor
    """Where in the window the first given answer begins and ends; 0, which is [CLS], where the
    window has not all of it. int64."""

    contexts_R: Tensor
    """Place in the window of its first token of the context, int64."""

    pieces_R: Tensor
    """Which token of the context that is, int64."""

    offsets: Sequence[NDArray[np.int32]]
    """A question each, as in `ReadQuestion`."""

    num_cut: int
    """Questions that lost their end."""

    def bounds(self, question: int, first: int, last: int) -> tuple[int, int]:
        """From which character to which some tokens of a question's context stand."""
        offsets_P2 = self.offsets[question]
        return int(offsets_P2[first, 0]), int(offsets_P2[last, 1])


def most_question_tokens(longest: int) -> int:
    """How long a question may be in a window of so many tokens."""
    return min(MAX_QUESTION_TOKENS, (longest - FRAME_TOKENS) // 2)


class QuestionTokenizer:
    """Tokenises questions and their contexts."""

    def __init__(
        self, tokenizer: TextTokenizer, *, max_sequence_tokens: int, overlap_tokens: int
    ) -> None:
        """Set up.

        Args:
            tokenizer: Of the model.
            max_sequence_tokens: Most tokens of a window, special ones included.
            overlap_tokens: That a window shares with the one before, at least; at most half of
                what the longest question leaves for the context.
        """
        self._tokenizer, self._vocab = tokenizer.tokenizer, tokenizer.vocab
        self._max_sequence_tokens = max_sequence_tokens
        self._most_question = most_question_tokens(max_sequence_tokens)
        self._overlap = overlap_tokens
        least_room = max_sequence_tokens - FRAME_TOKENS - self._most_question
        assert overlap_tokens < least_room, "windows move on"

    def read(self, questions: Sequence[Question]) -> list[ReadQuestion]:
        """Tokenise; a context that several questions share is read once."""
        found = []
        for start in range(0, len(questions), TEXTS_AT_ONCE):
            some = questions[start : start + TEXTS_AT_ONCE]
            contexts = list(dict.fromkeys(one.context for one in some))
            encoded = self._tokenizer.encode_batch(contexts, add_special_tokens=False)
            ids = {
                context: (
                    np.array(encoding.ids, np.int32),
                    np.array(encoding.offsets, np.int32).reshape(-1, 2),
                )
                for context, encoding in zip(contexts, encoded, strict=True)
            }
            asked = self._tokenizer.encode_batch(
                [one.question for one in some], add_special_tokens=False
            )
            for one, encoding in zip(some, asked, strict=True):
                context_ids, offsets_P2 = ids[one.context]
                found.append(
                    ReadQuestion(
                        question_ids=np.array(encoding.ids[: self._most_question], np.int32),
                        context_ids=context_ids,
                        offsets_P2=offsets_P2,
                        answer=_tokens_of_answer(one, offsets_P2),
                        is_cut=len(encoding.ids) > self._most_question,
                    )
                )
        return found

    def windows(self, questions: Sequence[ReadQuestion]) -> QuestionWindows:
        """Lay questions into windows."""
        ids: list[NDArray[np.int32]] = [np.zeros(0, np.int32)]
        segments: list[NDArray[np.int8]] = [np.zeros(0, np.int8)]
        lengths, owners, contexts, pieces = [0], [], [], []
        places: list[tuple[int, int]] = []
        frame = [np.array([i], np.int32) for i in (self._vocab.cls_id, self._vocab.sep_id)]
        for number, one in enumerate(questions):
            before = len(one.question_ids) + 2
            room = self._max_sequence_tokens - before - 1
            for start in self._starts(len(one.context_ids), room):
                inside = one.context_ids[start : start + room]
                ids += [frame[0], one.question_ids, frame[1], inside, frame[1]]
                segments += [np.zeros(before, np.int8), np.ones(len(inside) + 1, np.int8)]
                lengths.append(before + len(inside) + 1)
                owners.append(number)
                contexts.append(before)
                pieces.append(start)
                places.append(_place(one.answer, start, len(inside), before))
        return QuestionWindows(
            examples=Examples(
                input_ids_T=torch.from_numpy(np.concatenate(ids)),
                segment_ids_T=torch.from_numpy(np.concatenate(segments)),
                starts_N1=torch.tensor(lengths).cumsum(0),
                owners_N=torch.tensor(owners, dtype=torch.int64),
                num_cut=0,
                tokens_cut=0,
            ),
            places_R2=torch.tensor(places, dtype=torch.int64).reshape(-1, 2),
            contexts_R=torch.tensor(contexts, dtype=torch.int64),
            pieces_R=torch.tensor(pieces, dtype=torch.int64),
            offsets=[one.offsets_P2 for one in questions],
            num_cut=sum(one.is_cut for one in questions),
        )

    def _starts(self, num_pieces: int, room: int) -> list[int]:
        """Where windows begin; the last one ends with the context."""
        if num_pieces <= room:
            return [0]
        last = num_pieces - room
        return [*range(0, last, room - self._overlap), last]


def _tokens_of_answer(one: Question, offsets_P2: NDArray[np.int32]) -> tuple[int, int] | None:
    """First and last token that share a character with the first answer."""
    if not one.answers:
        return None
    text, start = one.answers[0]
    starts_P, ends_P = offsets_P2.T
    inside = np.flatnonzero((starts_P < ends_P) & (ends_P > start) & (starts_P < start + len(text)))
    return (int(inside[0]), int(inside[-1])) if len(inside) else None


def _place(
    answer: tuple[int, int] | None, start: int, num_pieces: int, before: int
) -> tuple[int, int]:
    """Where a window has an answer; (0, 0) if it has not all of it."""
    if answer is None or answer[0] < start or answer[1] >= start + num_pieces:
        return 0, 0
    return answer[0] - start + before, answer[1] - start + before
