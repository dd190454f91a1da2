"""Hide some tokens of a pack and remember what they were.

Shape legend: T packed tokens, M masked positions.
"""

from dataclasses import replace
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from bertsmith.batch import MaskedBatch, PackedBatch
from bertsmith.data.config import MaskingConfig


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


def mask_pack(
    pack: PackedBatch, *, config: MaskingConfig, vocab: MaskingVocab, rng: np.random.Generator
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
        vocab: Names the special ids, and the ordinary ones.
        rng: The same state gives the same masks.

    Returns:
        A batch of the same tokens, `positions_M` ascending; M is 0 if no token is ordinary.

    Source:
        Devlin et al. 2019, section 3.1.
    """
    ids_T = pack.input_ids_T.numpy()
    ordinary = ordinary_positions(ids_T, vocab)
    num_hidden = max(round(config.share * len(ordinary)), 1) if len(ordinary) else 0
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
