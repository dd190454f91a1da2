"""Scores over every target of the held-out packs."""

import math
from collections.abc import Callable

import pytest
import torch

from bertsmith.batch import MaskedBatch
from bertsmith.model.heads import MaskedLM
from bertsmith.parallel.world import World
from bertsmith.train.config import OptimConfig
from bertsmith.train.optim import AdamW
from bertsmith.train.precision import Compute
from bertsmith.train.validation import MaskedScores, TypeGroups, score_masked_lm
from live_tensors import counted

NewRun = Callable[[OptimConfig], tuple[MaskedLM, AdamW]]
MakePack = Callable[[int, list[int], int], MaskedBatch]
FP32 = Compute(device=torch.device("cpu"), dtype=torch.float32)


def test_scores_are_those_of_all_targets_together(
    new_run: NewRun, make_masked_pack: MakePack
) -> None:
    """Counts 1 and 9: a mean of the packs' means would weigh them alike."""
    model, _ = new_run(OptimConfig())
    packs = [make_masked_pack(0, [6], 1), make_masked_pack(1, [9, 14], 9)]
    logits = [model.logits_MV(p.inputs, p.positions_M, dropout_seed=None) for p in packs]
    chances = torch.cat(logits).double().log_softmax(-1)
    targets = torch.cat([p.targets_M for p in packs])
    scores = score_masked_lm(model, packs, FP32, World())
    expected = -chances.gather(1, targets[:, None]).mean()
    assert scores.loss == pytest.approx(float(expected.detach()), rel=1e-6)
    assert scores.accuracy == float((chances.argmax(-1) == targets).double().mean())
    assert scores.num_targets == 10
    assert scores.perplexity == pytest.approx(math.exp(scores.loss))


def test_scoring_draws_nothing_and_changes_nothing(
    new_run: NewRun, make_masked_pack: MakePack
) -> None:
    model, _ = new_run(OptimConfig())
    model.train()
    packs = [make_masked_pack(0, [20], 5)]
    before = torch.get_rng_state()
    weights = [p.clone() for p in model.parameters()]
    assert score_masked_lm(model, packs, FP32, World()) == score_masked_lm(
        model, packs, FP32, World()
    )
    assert torch.equal(torch.get_rng_state(), before)
    assert model.training
    assert all(torch.equal(a, b) for a, b in zip(weights, model.parameters(), strict=True))
    assert all(p.grad is None for p in model.parameters())


def test_memory_does_not_grow_with_the_number_of_packs(
    new_run: NewRun, make_masked_pack: MakePack
) -> None:
    """But for the three sums of each pack, 24 bytes."""
    model, _ = new_run(OptimConfig())
    packs = [make_masked_pack(0, [20, 20], 12)] * 40
    peaks = []
    for number in (4, 40):
        with counted() as found:
            score_masked_lm(model, packs[:number], FP32, World())
        peaks.append(found.peak_bytes)
    assert peaks[0] > 1000
    assert 0 <= peaks[1] - peaks[0] <= 36 * 24 + 128


def test_no_target_gives_no_number_and_a_huge_loss_no_overflow(
    new_run: NewRun, make_masked_pack: MakePack
) -> None:
    model, _ = new_run(OptimConfig())
    assert math.isnan(score_masked_lm(model, [make_masked_pack(0, [5], 0)], FP32, World()).loss)
    assert MaskedScores(loss=800.0, accuracy=0.0, num_targets=1).perplexity == math.inf


def test_groups_of_types_are_scored_by_themselves(
    new_run: NewRun, make_masked_pack: MakePack
) -> None:
    """Even ids are one group, odd ones another, id 7 is in none, and a third group has no types."""
    model, _ = new_run(OptimConfig())
    packs = [make_masked_pack(0, [16], 5), make_masked_pack(1, [9, 14], 9)]
    vocab_size = model.encoder.config.vocab_size
    group_V = torch.arange(vocab_size) % 2
    group_V[7] = -1
    groups = TypeGroups(names=("even", "odd", "none"), group_V=group_V)
    scores = score_masked_lm(model, packs, FP32, World(), groups=groups, max_tokens=10)
    logits = [model.logits_MV(p.inputs, p.positions_M, dropout_seed=None) for p in packs]
    chances = torch.cat(logits).detach().double().log_softmax(-1)
    targets = torch.cat([p.targets_M for p in packs])
    nats = -chances.gather(1, targets[:, None])[:, 0]
    right = (chances.argmax(-1) == targets).double()
    for number, name in enumerate(("even", "odd")):
        mine = group_V[targets] == number
        found = scores.groups[name]
        assert 0 < found.num_targets == int(mine.sum()) < 14
        assert found.loss == pytest.approx(float(nats[mine].mean()), rel=1e-6)
        assert found.accuracy == pytest.approx(float(right[mine].mean()))
    assert scores.groups["none"].num_targets == 0
    assert math.isnan(scores.groups["none"].loss)
    assert scores.num_targets == 14
