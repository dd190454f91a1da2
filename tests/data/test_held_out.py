"""Validation stands still: what is hidden follows from the document, whatever a run does."""

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from bertsmith.data.config import PackingConfig
from bertsmith.data.held_out import valid_batches
from bertsmith.errors import UserError
from small_corpus import VOCAB, ListCorpus, skewed_lengths


class NumberedCorpus(ListCorpus):
    """Every token has an id of its own: where it stands in the text."""

    def document(self, index: int, /) -> NDArray[np.int64]:
        first = 5 + int(self._lengths_D[:index].sum())
        return first + np.arange(self._lengths_D[index])


def hidden(
    corpus: NumberedCorpus, *, pack: int, sequence: int, max_tokens: int
) -> dict[int, tuple[int, bool]]:
    """For each token: the id in its place, and whether it is asked for."""
    packing = PackingConfig(tokens_per_pack=pack, max_sequence_tokens=sequence)
    found = {}
    for batch in valid_batches(corpus, packing=packing, max_tokens=max_tokens):
        shown_T = batch.inputs.input_ids_T
        ids_T = shown_T.index_copy(0, batch.positions_M, batch.targets_M)
        asked_T = torch.zeros(len(ids_T), dtype=torch.bool)
        asked_T[batch.positions_M] = True
        columns = (ids_T.tolist(), shown_T.tolist(), asked_T.tolist())
        for token, shown, is_asked in zip(*columns, strict=True):
            if token >= 5:  # no special one
                assert token not in found
                found[token] = shown, is_asked
    return found


def test_a_document_hides_the_same_however_it_is_cut_and_packed() -> None:
    corpus = NumberedCorpus(skewed_lengths(100))
    everything = hidden(corpus, pack=256, sequence=64, max_tokens=10**9)
    assert len(everything) == corpus.num_tokens
    assert hidden(corpus, pack=1024, sequence=64, max_tokens=10**9) == everything
    assert hidden(corpus, pack=1024, sequence=512, max_tokens=10**9) == everything
    part = hidden(corpus, pack=256, sequence=64, max_tokens=1000)
    assert part.items() < everything.items()
    assert len(part) <= 1000
    num_hidden = sum(is_asked for _, is_asked in everything.values())
    assert num_hidden / corpus.num_tokens == pytest.approx(0.15, abs=0.01)


def test_eight_of_ten_hidden_tokens_become_masks_and_one_stays() -> None:
    """Devlin et al. 2019; three standard deviations of a binomial of 6,000."""
    corpus = ListCorpus([400] * 100)
    batches = valid_batches(
        corpus,
        packing=PackingConfig(tokens_per_pack=4096, max_sequence_tokens=512),
        max_tokens=10**9,
    )
    shown, targets = (
        np.concatenate(parts)
        for parts in zip(
            *((b.inputs.input_ids_T[b.positions_M].numpy(), b.targets_M.numpy()) for b in batches),
            strict=True,
        )
    )
    assert len(targets) == pytest.approx(6000, abs=200)
    assert np.mean(shown == VOCAB.mask_id) == pytest.approx(0.8, abs=0.016)
    assert np.mean(shown == targets) == pytest.approx(0.1, abs=0.012)


def test_nothing_to_hide_is_refused() -> None:
    packing = PackingConfig(tokens_per_pack=256, max_sequence_tokens=64)
    with pytest.raises(UserError, match="too few words"):
        valid_batches(ListCorpus([0]), packing=packing, max_tokens=99)
