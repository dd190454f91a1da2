"""Hide some tokens of a pack and remember what they were.

`mask_pack` is the classic way: a pack draws its tokens for itself. `Masker` hides units of
documents, so that what an epoch hides can know what earlier ones did (`data.covering`).

Shape legend: T packed tokens; M those that may be predicted, or those that are; N sequences; U
units; V ids; G groups of units.
"""

from dataclasses import dataclass, replace
from enum import IntEnum
from fractions import Fraction
from typing import NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from bertsmith.batch import MaskedBatch, PackedBatch
from bertsmith.data.config import MaskingConfig
from bertsmith.data.covering import UnitQueues, units_in_epoch
from bertsmith.data.keyed_random import child_keys, key_of, uniform
from bertsmith.data.mask_units import Units, find_units
from bertsmith.data.rarity import NUM_LEVELS, levels_of_types, speeds


class MaskingVocab(Protocol):
    """What masking asks of a vocabulary."""

    @property
    def mask_id(self) -> int:
        """Id of [MASK]."""

    @property
    def special_ids(self) -> tuple[int, ...]:
        """Ids that are never hidden, [UNK] among them."""

    @property
    def ordinary_ids(self) -> NDArray[np.int64]:
        """All the other ids: noise is drawn from them."""


class _Purpose(IntEnum):
    """What random numbers are for: a part of their keys. Never renumber."""

    ORDER = 0
    PHASE = 1
    SPANS = 2
    FATE = 3


@dataclass(frozen=True, kw_only=True, slots=True)
class PieceText:
    """Pieces of documents, end to end with their special tokens, and where they are from."""

    ids_T: NDArray[np.int64]
    starts_N1: NDArray[np.int64]
    """Where each piece starts, then T."""

    word_starts_T: NDArray[np.bool_] | None
    """Whether a token begins a word; None will do where units are tokens."""

    documents_N: NDArray[np.int64]
    """The number of each piece's document."""

    numbers_N: NDArray[np.int64]
    """The number of each piece in its document."""


class _Predicted(NamedTuple):
    """What an epoch predicts of some pieces."""

    positions_M: NDArray[np.int64]
    """Ascending."""

    sequences_M: NDArray[np.int64]
    """The piece of each."""

    leaders_M: NDArray[np.int64]
    """The position that the first token of its unit has."""


class Masker:
    """Hides units of documents; what is hidden follows from seed, epoch, document and piece alone.

    Not from the pack: it stays whatever the size of packs and steps, the ranks and the shards. A
    piece is a document, or one of the equal parts that a long one is cut into, which are the same
    in every epoch. The share is exact in each piece: of n tokens of which the share is x, floor(x)
    or ceil(x) are predicted, x on average, and over the epochs no error adds up. For words and
    spans the error is less than one of them.
    """

    def __init__(
        self,
        config: MaskingConfig,
        vocab: MaskingVocab,
        *,
        seed: int,
        type_counts_V: NDArray[np.int64] | None = None,
    ) -> None:
        """Make the tables.

        Args:
            config: What to hide.
            vocab: Names the special ids, and the ordinary ones.
            seed: At least 0.
            type_counts_V: How often each id occurs; needed where `rare_boost` is over 0.
        """
        self._config, self._vocab, self._seed = config, vocab, seed
        ordinary = vocab.ordinary_ids
        self._may_predict_V = np.zeros(max(int(ordinary[-1]), *vocab.special_ids) + 1, np.bool_)
        self._may_predict_V[ordinary] = True
        self._levels_V: NDArray[np.int64] | None = None
        if config.rare_boost:
            assert type_counts_V is not None
            self._levels_V = levels_of_types(type_counts_V, rare_boost=config.rare_boost)
        self._laps = [Fraction(0)]

    def mask(self, pack: PackedBatch, text: PieceText, *, epoch: int) -> MaskedBatch:
        """Hide what the epoch predicts.

        Args:
            pack: Pack of the text; left untouched.
            text: The same tokens, and where they are from.
            epoch: From 0.
        """
        predicted = self._predicted(text, epoch)
        return masked_batch(pack, self._hide(text, predicted, epoch=epoch), predicted.positions_M)

    def predicted(self, text: PieceText, *, epoch: int) -> NDArray[np.bool_]:
        """Which tokens the epoch predicts, shape (T,)."""
        predicted_T = np.zeros(len(text.ids_T), np.bool_)
        predicted_T[self._predicted(text, epoch).positions_M] = True
        return predicted_T

    def _predicted(self, text: PieceText, epoch: int) -> _Predicted:
        positions_M = np.flatnonzero(self._may_predict_V[text.ids_T])
        lengths_N = np.diff(text.starts_N1)
        sequences_M = np.repeat(np.arange(len(lengths_N)), lengths_N)[positions_M]
        units = find_units(
            self._config.unit,
            positions_M=positions_M,
            sequences_M=sequences_M,
            word_starts_T=text.word_starts_T,
            keys_N=self._keys(text, _Purpose.SPANS, epoch),
        )
        places_U = positions_M[units.firsts_U] - text.starts_N1[units.sequences_U]
        keys_U = child_keys(self._keys(text, _Purpose.ORDER, epoch)[units.sequences_U], places_U)
        groups_U, speeds_G, keys_G = self._groups(text, units, text.ids_T[positions_M], epoch)
        queues = UnitQueues(
            groups_U=groups_U,
            tokens_U=units.tokens_U,
            keys_U=keys_U,
            speeds_G=speeds_G,
            keys_G=keys_G,
        )
        chosen_U = units_in_epoch(queues, self._laps_to(epoch))
        chosen_M = np.repeat(chosen_U, units.tokens_U)
        leaders_M = np.repeat(positions_M[units.firsts_U], units.tokens_U)
        return _Predicted(positions_M[chosen_M], sequences_M[chosen_M], leaders_M[chosen_M])

    def _groups(
        self, text: PieceText, units: Units, ids_M: NDArray[np.int64], epoch: int
    ) -> tuple[NDArray[np.int64], NDArray[np.float64], NDArray[np.uint64]]:
        """The group of each unit, and of each group its speed and key."""
        keys_N = self._keys(text, _Purpose.PHASE, epoch)
        if self._levels_V is None or len(ids_M) == 0:
            return units.sequences_U, np.ones(len(keys_N)), keys_N
        levels_U = np.maximum.reduceat(self._levels_V[ids_M], units.firsts_U)
        groups_U = units.sequences_U * NUM_LEVELS + levels_U
        tokens_G = np.bincount(groups_U, units.tokens_U, len(keys_N) * NUM_LEVELS)
        speeds_NL = speeds(
            tokens_G.reshape(-1, NUM_LEVELS).astype(np.float64),
            largest_share=self._config.largest_share,
        )
        keys_G = child_keys(keys_N[:, None], np.arange(NUM_LEVELS)).ravel()
        return groups_U, speeds_NL.ravel(), keys_G

    def _hide(self, text: PieceText, predicted: _Predicted, *, epoch: int) -> NDArray[np.int64]:
        """A copy of the ids with the predicted ones hidden: [MASK], noise, or left as they are."""
        config, ordinary = self._config, self._vocab.ordinary_ids
        keys_M = child_keys(self._keys(text, _Purpose.FATE), epoch)[predicted.sequences_M]
        starts_M = text.starts_N1[predicted.sequences_M]
        deciding_M = predicted.leaders_M if config.fate == "unit" else predicted.positions_M
        fate_M = uniform(child_keys(keys_M, 2 * (deciding_M - starts_M)))
        drawn_M = uniform(child_keys(keys_M, 2 * (predicted.positions_M - starts_M) + 1))
        noise_M = ordinary[(drawn_M * len(ordinary)).astype(np.int64)]
        is_masked_M = fate_M < config.hide_share
        is_noise_M = ~is_masked_M & (fate_M < config.hide_share + config.noise_share)
        hidden_T = text.ids_T.copy()
        hidden_T[predicted.positions_M[is_masked_M]] = self._vocab.mask_id
        hidden_T[predicted.positions_M[is_noise_M]] = noise_M[is_noise_M]
        return hidden_T

    def _keys(
        self, text: PieceText, purpose: _Purpose, epoch: int | None = None
    ) -> NDArray[np.uint64]:
        """Keys of the pieces; with an epoch, others in each if epochs are independent."""
        keys_N = child_keys(key_of(self._seed, purpose), text.documents_N)
        keys_N = child_keys(keys_N, text.numbers_N)
        if epoch is not None and self._config.schedule == "independent":
            keys_N = child_keys(keys_N, epoch)
        return keys_N

    def _laps_to(self, epoch: int) -> NDArray[np.float64]:
        """C_0 to C_{epoch + 1}; of independent epochs each is the first of its own queue."""
        if self._config.schedule == "independent":
            return np.array([0.0, float(self._config.share_in(epoch))])
        laps = list(self._laps)  # threads may ask at once: each leaves a whole list
        while len(laps) < epoch + 2:
            laps.append(laps[-1] + self._config.share_in(len(laps) - 1))
        if len(laps) > len(self._laps):
            self._laps = laps
        return np.array([float(lap) for lap in laps[: epoch + 2]])


def mask_pack(
    pack: PackedBatch,
    *,
    config: MaskingConfig,
    vocab: MaskingVocab,
    rng: np.random.Generator,
    share: float | None = None,
) -> MaskedBatch:
    """Hide an exact share of the ordinary tokens of a pack.

    The number hidden is round(share * ordinary tokens), at least 1 where there is any, and not a
    coin flip for each token: steps then weigh alike. What becomes of a hidden token ([MASK],
    noise, itself) is drawn for each, so the 80/10/10 hold exactly on average even where few
    tokens are hidden; rounding three counts would not. [UNK] counts as special: to predict it
    teaches nothing about the word that stood there. (Google's code hides [UNK] too; Hugging
    Face's collator does not.)

    Args:
        pack: Pack to hide tokens in; left untouched.
        config: Shares.
        share: Instead of the config's: that of the epoch.
        vocab: Names the special ids, and the ordinary ones.
        rng: The same state gives the same masks.

    Returns:
        A batch of the same tokens, `positions_M` ascending; M is 0 if no token is ordinary.

    Source:
        Devlin et al. 2019, section 3.1.
    """
    ids_T = pack.input_ids_T.numpy()
    ordinary = ordinary_positions(ids_T, vocab)
    share = config.share if share is None else share
    num_hidden = max(round(share * len(ordinary)), 1) if len(ordinary) else 0
    positions_M = choose_positions(ordinary, num_hidden, rng)
    hidden_T = hide(ids_T, positions_M, config=config, vocab=vocab, rng=rng)
    return masked_batch(pack, hidden_T, positions_M)


def ordinary_positions(ids_T: NDArray[np.int64], vocab: MaskingVocab) -> NDArray[np.int64]:
    """Where the tokens stand that may be hidden, ascending."""
    return np.flatnonzero(np.isin(ids_T, vocab.special_ids, invert=True))


def choose_positions(
    ordinary: NDArray[np.int64], num_hidden: int, rng: np.random.Generator
) -> NDArray[np.int64]:
    """`num_hidden` of the positions, every set of that size as likely, ascending."""
    chosen = rng.choice(len(ordinary), num_hidden, replace=False, shuffle=False)
    return ordinary[np.sort(chosen)]


def hide(
    ids_T: NDArray[np.int64],
    positions_M: NDArray[np.int64],
    *,
    config: MaskingConfig,
    vocab: MaskingVocab,
    rng: np.random.Generator,
) -> NDArray[np.int64]:
    """A copy of the ids with those at `positions_M` hidden: [MASK], noise, or left as they are."""
    fate_M = rng.random(len(positions_M))
    noise_M = vocab.ordinary_ids[rng.integers(len(vocab.ordinary_ids), size=len(positions_M))]
    is_masked_M = fate_M < config.hide_share
    is_noise_M = ~is_masked_M & (fate_M < config.hide_share + config.noise_share)
    hidden_T = ids_T.copy()
    hidden_T[positions_M[is_masked_M]] = vocab.mask_id
    hidden_T[positions_M[is_noise_M]] = noise_M[is_noise_M]
    return hidden_T


def masked_batch(
    pack: PackedBatch, hidden_T: NDArray[np.int64], positions_M: NDArray[np.int64]
) -> MaskedBatch:
    """The pack with hidden ids in place of its own, and its own as targets."""
    where_M = torch.from_numpy(positions_M)
    return MaskedBatch(
        inputs=replace(pack, input_ids_T=torch.from_numpy(hidden_T)),
        positions_M=where_M,
        targets_M=pack.input_ids_T[where_M],
    )
