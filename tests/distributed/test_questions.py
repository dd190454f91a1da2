"""Answers: the same step however it is cut into passes and over ranks, dropout on."""

from dataclasses import replace

import pytest
import torch

from bertsmith.batch import LabelledBatch, StepShare, pack
from bertsmith.model.config import EncoderConfig
from bertsmith.model.heads import initialize
from bertsmith.model.span_model import SpanModel
from bertsmith.parallel.choice import wrap
from bertsmith.parallel.config import StrategyName
from bertsmith.parallel.world import World
from bertsmith.train.config import OptimConfig
from bertsmith.train.optim import AdamW, group_parameters
from bertsmith.train.precision import Compute
from bertsmith.train.step import train_step
from ranks import run_ranks

FP32 = Compute(device=torch.device("cpu"), dtype=torch.float32)
CONFIG = EncoderConfig(
    vocab_size=40,
    hidden_size=16,
    num_hidden_layers=2,
    num_attention_heads=2,
    intermediate_size=24,
    max_position_embeddings=16,
    initializer_range=0.3,
    hidden_dropout_prob=0.2,
)
WINDOWS = (4, 7, 3, 9, 2, 5, 6, 8)
"""Tokens of each."""

WHOLE, CUT = (WINDOWS,), (WINDOWS[:2], WINDOWS[2:3], WINDOWS[3:])
"""A step in one pass; in three, so that one of two ranks has a filler."""


def packs_of(cut: tuple[tuple[int, ...], ...]) -> list[LabelledBatch]:
    generator = torch.Generator().manual_seed(4)
    ids = iter([torch.randint(1, 40, (n,), generator=generator) for n in WINDOWS])
    made, first = [], 0
    for lengths in cut:
        inputs = replace(pack([next(ids) for _ in lengths]), first_row=first)
        places_N2 = torch.tensor([[n // 2, n - 1] if n % 2 else [0, 0] for n in lengths])
        rows_N = torch.arange(len(lengths))
        made.append(LabelledBatch(inputs=inputs, labels_N=places_N2, rows_N=rows_N))
        first += inputs.num_tokens
    return made


def step(way: StrategyName, world: World, cut: tuple[tuple[int, ...], ...]) -> tuple[float, ...]:
    """Loss and gradient norm of one step; and the sum of scores before it, as a judgement has."""
    packs = packs_of(cut)
    numbers = range(world.rank, len(packs), world.size)
    mine = [packs[n] for n in numbers]
    if len(mine) < -(-len(packs) // world.size):
        mine.append(packs[0].filler())
    model = SpanModel(CONFIG)
    initialize(model, config=CONFIG, seed=2)
    strategy = wrap(way, model, world, dp_devices=1, dtype=torch.float32)
    optim = OptimConfig(learning_rate=1e-3)
    optimizer = AdamW(group_parameters(model, optim), optim)
    inputs = packs_of(WHOLE)[0].inputs
    with torch.no_grad():
        scores = float(model.logits_T2(inputs, dropout_seed=None).abs().sum())
    report = train_step(
        strategy,
        StepShare(packs=mine, numbers=numbers, num_packs=len(packs)),
        optimizer,
        compute=FP32,
        scaler=None,
        step=0,
        seed=0,
        learning_rate=1e-3,
        max_grad_norm=None,
    )
    return report.loss, report.grad_norm, scores


def on_a_rank(world: World) -> dict[str, tuple[float, ...]]:
    ways: tuple[StrategyName, ...] = ("ddp", "fsdp")
    return {way: step(way, world, CUT) for way in ways}


def test_passes_and_ranks_change_nothing() -> None:
    whole = step("none", World(), WHOLE)
    assert step("none", World(), CUT) == pytest.approx(whole, rel=1e-5)
    for found in run_ranks(on_a_rank):
        assert set(found) == {"ddp", "fsdp"}
        for way, numbers in found.items():
            assert numbers == pytest.approx(whole, rel=1e-5), way
