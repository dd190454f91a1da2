"""Pieces of documents as pairs of segments, of which a head has to judge how they belong together.

A piece is cut in two at the beginning of a word, A before B, and laid as [CLS] A [SEP] B [SEP].

- Sentence order (`mlm+sop`): a coin for each piece puts B before A.
- Next sentence (`mlm+nsp`): the pieces of a block of the corpus are matched two and two in every
  epoch, never two of one document. The two are cut so that their B are of equal length, and a coin
  for both decides whether they exchange them.

So an epoch holds every token once, and lengths are known before anything is drawn. Cuts and
lengths tell nothing of the label, since the coin is thrown after them: half of all pairs are false
on average, and no other way than to read them tells which. A piece of a single word stays whole,
and one without a match, or whose match leaves no cut to both, is a pair in order that is not
judged.

What is drawn follows from seed, epoch and piece: the same for any packs, steps and ranks.

Shape legend: S pieces; N sequences; Q pieces whose tokens they hold; T tokens.

Source: Devlin et al. 2019, "BERT", section 3.1; Lan et al. 2020, "ALBERT", section 3.1.
"""

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from bertsmith.batch import MaskedBatch, PackedBatch, PairTargets
from bertsmith.data.config import Objective, has_pairs
from bertsmith.data.keyed_random import child_keys, key_of, uniform
from bertsmith.data.pieces import Pieces

NOT_JUDGED = -1
"""The label of a sequence that is no pair to judge."""

NO_PIECE = -1

WINDOW_PIECES = 64
"""Pieces next to each other in length that are mixed before they are matched: enough to meet others
in every epoch, few enough to be of like length."""

_PURPOSE = 4
"""What random numbers are for: a part of their keys. 0 to 3 are those of `data.masking`."""

_CUT, _COIN = 0, 1


def match_pieces(
    pieces_S: NDArray[np.int64], documents_S: NDArray[np.int64], rng: np.random.Generator
) -> NDArray[np.int64]:
    """Another piece for each, of another document; the other's other is the one itself.

    Few are left without: one if their number is odd, and what a document has of pieces beyond
    half of them all.

    Args:
        pieces_S: Longest first.
        documents_S: The document of each.
        rng: The same state gives the same matches.

    Returns:
        For each piece the number of the other, or `NO_PIECE`.
    """
    num = len(pieces_S)
    order = np.lexsort((rng.random(num), np.arange(num) // WINDOW_PIECES))
    left, right = order[: num - num % 2 : 2].copy(), order[1::2].copy()
    is_same = documents_S[left] == documents_S[right]
    # Side by side by document, each is half of them away from its match: no document is met twice
    # but one that has more than half of these.
    mixed = np.concatenate([left[is_same], right[is_same]])
    mixed = mixed[np.argsort(documents_S[mixed], kind="stable")]
    left[is_same], right[is_same] = np.split(mixed, 2)
    same = np.flatnonzero(documents_S[left] == documents_S[right])
    if len(same):  # all of one document: part some matches that have nothing of it
        only = documents_S[left[same[0]]]
        others = np.flatnonzero((documents_S[left] != only) & (documents_S[right] != only))
        chosen = rng.permutation(others)[: len(same)]
        same = same[: len(chosen)]
        right[same], right[chosen] = right[chosen], right[same]
    is_good = documents_S[left] != documents_S[right]
    matched_S = np.full(num, NO_PIECE)
    matched_S[left[is_good]] = pieces_S[right[is_good]]
    matched_S[right[is_good]] = pieces_S[left[is_good]]
    return matched_S


@dataclass(frozen=True, kw_only=True, slots=True)
class PairLayout:
    """Where each token of a pack of pairs is taken from."""

    sources_Q: NDArray[np.int64]
    """Pieces, ascending, as `Pieces.lay` would lay them end to end."""

    places_T: NDArray[np.int64]
    """The place of each token of the pack among those of the sources."""

    segment_ids_T: NDArray[np.int64]
    starts_N1: NDArray[np.int64]
    labels_N: NDArray[np.int64]
    """0: the second segment follows the first. 1: it does not. Or `NOT_JUDGED`."""

    def packed(self, sources: PackedBatch) -> PackedBatch:
        """The pack of pairs.

        Args:
            sources: The pack of the source pieces, with the place in the step of this one.
        """
        lengths_N = np.diff(self.starts_N1)
        firsts_T = np.repeat(self.starts_N1[:-1], lengths_N)
        return PackedBatch(
            input_ids_T=sources.input_ids_T[torch.from_numpy(self.places_T)],
            position_ids_T=torch.from_numpy(np.arange(len(firsts_T)) - firsts_T),
            segment_ids_T=torch.from_numpy(self.segment_ids_T),
            starts_N1=torch.from_numpy(self.starts_N1.astype(np.int32)),
            longest=int(lengths_N.max()),
            first_row=sources.first_row,
        )

    def arranged(self, masked: MaskedBatch) -> MaskedBatch:
        """The pack of pairs, what is hidden of it and what is to be judged.

        Args:
            masked: The pack of the source pieces with some tokens hidden.
        """
        number_T = torch.full((masked.num_tokens,), -1)
        number_T[masked.positions_M] = torch.arange(masked.num_targets)
        number_T = number_T[torch.from_numpy(self.places_T)]
        positions_M = torch.nonzero(number_T >= 0).flatten()
        return MaskedBatch(
            inputs=self.packed(masked.inputs),
            positions_M=positions_M,
            targets_M=masked.targets_M[number_T[positions_M]],
            pairs=self.targets(),
        )

    def targets(self) -> PairTargets:
        """What is to be judged."""
        sequences_P = np.flatnonzero(self.labels_N != NOT_JUDGED)
        return PairTargets(
            sequences_P=torch.from_numpy(sequences_P),
            labels_P=torch.from_numpy(self.labels_N[sequences_P]),
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class PairMaker:
    """Cuts pieces in two and says which segments meet."""

    objective: Objective
    seed: int

    def __post_init__(self) -> None:
        """There are pairs."""
        assert has_pairs(self.objective)

    def lay(
        self,
        pieces: Pieces,
        pieces_N: NDArray[np.int64],
        matched_N: NDArray[np.int64],
        *,
        epoch: int,
    ) -> PairLayout:
        """Draw the pairs of a pack, one for each piece, and lay them.

        Args:
            pieces: Those of the block.
            pieces_N: Which of them.
            matched_N: What `match_pieces` gave for them; of no matter for the order of segments.
            epoch: From 0.

        Raises:
            UserError: The beginnings of words were never noted.
        """
        seconds_N, labels_N = self._drawn(pieces, pieces_N, matched_N, epoch)
        is_false_N = labels_N == 1
        by_exchange = self.objective == "mlm+nsp"
        # Of whose text the second segment is.
        others_N = np.where(is_false_N & by_exchange, matched_N, pieces_N)
        sources_Q = np.unique(np.concatenate([pieces_N, others_N]))
        starts_Q1 = _starts(pieces, sources_Q)
        own_N = np.searchsorted(sources_Q, pieces_N)
        firsts_N, ends_N = starts_Q1[own_N] + 1, starts_Q1[own_N + 1] - 1
        other_ends_N = starts_Q1[np.searchsorted(sources_Q, others_N) + 1] - 1
        begin_N2 = np.stack([firsts_N, other_ends_N - seconds_N], 1)
        length_N2 = np.stack([ends_N - firsts_N - seconds_N, seconds_N], 1)
        if not by_exchange:
            begin_N2[is_false_N] = begin_N2[is_false_N, ::-1]
            length_N2[is_false_N] = length_N2[is_false_N, ::-1]
        # [CLS], the first segment, [SEP]; and where there is one, the second segment, [SEP].
        one_N, has_second_N = np.ones_like(firsts_N), (seconds_N > 0).astype(np.int64)
        begin_N5 = np.stack([firsts_N - 1, begin_N2[:, 0], ends_N, begin_N2[:, 1], ends_N], 1)
        length_N5 = np.stack([one_N, length_N2[:, 0], one_N, length_N2[:, 1], has_second_N], 1)
        return PairLayout(
            sources_Q=sources_Q,
            places_T=_ranges(begin_N5.ravel(), length_N5.ravel()),
            segment_ids_T=np.repeat(np.tile([0, 0, 0, 1, 1], len(pieces_N)), length_N5.ravel()),
            starts_N1=np.concatenate([[0], np.cumsum(length_N5.sum(1))]),
            labels_N=labels_N,
        )

    def _drawn(
        self,
        pieces: Pieces,
        pieces_N: NDArray[np.int64],
        matched_N: NDArray[np.int64],
        epoch: int,
    ) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Tokens of the second segment of each piece, 0 for none, and the label."""
        is_order = self.objective == "mlm+sop"
        if is_order:
            matched_N = np.full(len(pieces_N), NO_PIECE)
        has_match_N = matched_N != NO_PIECE
        leaders_N = np.where(has_match_N, np.minimum(pieces_N, matched_N), pieces_N)
        keys_N = child_keys(key_of(self.seed, _PURPOSE), pieces.documents_of(leaders_N))
        keys_N = child_keys(child_keys(keys_N, pieces.numbers_of(leaders_N)), epoch)
        cuts_N = uniform(child_keys(keys_N, _CUT))
        labels_N = np.where(uniform(child_keys(keys_N, _COIN)) < 0.5, 1, 0)
        labels_N[~has_match_N & (not is_order)] = NOT_JUDGED
        known_Q = np.unique(np.concatenate([pieces_N, matched_N[has_match_N]]))
        may_cut = _possible_seconds(pieces, known_Q)
        seconds_N = np.zeros(len(pieces_N), np.int64)
        for number, (piece, match) in enumerate(
            zip(pieces_N.tolist(), matched_N.tolist(), strict=True)
        ):
            possible = may_cut[piece]
            if match != NO_PIECE:
                both = min(len(possible), len(may_cut[match]))
                common = possible[:both] & may_cut[match][:both]
                if common.any():
                    possible = common
                else:
                    labels_N[number] = NOT_JUDGED
            lengths = np.flatnonzero(possible) + 1
            if len(lengths):
                seconds_N[number] = lengths[int(cuts_N[number] * len(lengths))]
            else:
                labels_N[number] = NOT_JUDGED
        return seconds_N, labels_N


def _possible_seconds(pieces: Pieces, pieces_Q: NDArray[np.int64]) -> dict[int, NDArray[np.bool_]]:
    """For each piece whether its last 1, 2, ... tokens begin with a word, all but the whole."""
    word_starts_T = pieces.lay_word_starts(pieces_Q)
    starts_Q1 = _starts(pieces, pieces_Q).tolist()
    return {
        piece: word_starts_T[start + 2 : end - 1][::-1]
        for piece, start, end in zip(pieces_Q.tolist(), starts_Q1[:-1], starts_Q1[1:], strict=True)
    }


def _starts(pieces: Pieces, pieces_Q: NDArray[np.int64]) -> NDArray[np.int64]:
    """Where each piece starts when they lie end to end, and the end of the last."""
    return np.concatenate([[0], np.cumsum(pieces.lengths_S[pieces_Q], dtype=np.int64)])


def _ranges(begins: NDArray[np.int64], lengths: NDArray[np.int64]) -> NDArray[np.int64]:
    """Numbers from each beginning on, so many of each, end to end."""
    ends = np.cumsum(lengths)
    found: NDArray[np.int64] = np.repeat(begins - (ends - lengths), lengths)
    return found + np.arange(len(found))
