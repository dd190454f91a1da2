"""Weighted classes, several labels and numbers: the same gradient however a step is cut."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from bertsmith.batch import LabelledBatch, StepShare, pack, unpack
from bertsmith.model.config import EncoderConfig
from bertsmith.model.heads import SequenceClassifier, initialize
from bertsmith.model.objectives import BinaryCrossEntropy, CrossEntropy, Objective, SquaredError
from bertsmith.parallel.choice import wrap
from bertsmith.parallel.config import StrategyName
from bertsmith.parallel.strategies import Strategy
from bertsmith.parallel.world import World
from bertsmith.train.config import OptimConfig
from bertsmith.train.optim import AdamW, group_parameters
from bertsmith.train.precision import Compute
from bertsmith.train.step import dropout_seed_of, train_step
from ranks import run_ranks

FP32 = Compute(device=torch.device("cpu"), dtype=torch.float32)
CONFIG = EncoderConfig(
    vocab_size=40,
    hidden_size=16,
    num_hidden_layers=1,
    num_attention_heads=2,
    intermediate_size=24,
    max_position_embeddings=16,
    initializer_range=0.3,
)
OBJECTIVES: dict[str, tuple[Objective, int]] = {
    "weighted and smoothed": (
        CrossEntropy(class_weights_C=(0.2, 5.0, 1.0), label_smoothing=0.1),
        3,
    ),
    "focal": (CrossEntropy(class_weights_C=(0.2, 5.0, 1.0), focal_gamma=2.0), 3),
    "several labels": (BinaryCrossEntropy(), 4),
    "weighted several labels": (
        BinaryCrossEntropy(
            present_weights_C=(4.0, 1.0, 9.0, 2.0), absent_weights_C=(0.5, 1.0, 0.1, 1.0)
        ),
        4,
    ),
    "number": (SquaredError(), 1),
}
PACKS = ((4, 7), (3,), (9, 2, 5, 6), (8,))
"""Lengths of the sequences of each pack; weights differ from pack to pack."""


def targets_of(objective: Objective, rows_N: Tensor, num_outputs: int) -> Tensor:
    match objective.problem_type:
        case "regression":
            return (rows_N.float() - 3.0) * 1.5
        case "multi_label_classification":
            return ((rows_N[:, None] * 7 + torch.arange(num_outputs) * 3) % 4 < 2).float()
        case _:
            return rows_N * rows_N % 3


def packs_of(objective: Objective, num_outputs: int) -> list[LabelledBatch]:
    generator, made, row, first = torch.Generator().manual_seed(4), [], 0, 0
    for lengths in PACKS:
        inputs = pack([torch.randint(1, 40, (n,), generator=generator) for n in lengths])
        rows_N = torch.arange(row, row + len(lengths))
        labels_N = targets_of(objective, rows_N, num_outputs)
        made.append(
            LabelledBatch(
                inputs=replace(inputs, first_row=first),
                labels_N=labels_N,
                rows_N=rows_N,
                weights_N=objective.weights(labels_N),
            )
        )
        row, first = row + len(lengths), first + inputs.num_tokens
    return made


def joined(packs: list[LabelledBatch]) -> LabelledBatch:
    texts = [t for p in packs for t in unpack(p.inputs.input_ids_T, p.inputs.starts_N1)]
    weights = [p.weights_N for p in packs if p.weights_N is not None]
    return LabelledBatch(
        inputs=replace(pack(texts), first_row=packs[0].inputs.first_row),
        labels_N=torch.cat([p.labels_N for p in packs]),
        rows_N=torch.cat([p.rows_N for p in packs]),
        weights_N=torch.cat(weights) if weights else None,
    )


def new_model(objective: Objective, num_outputs: int) -> SequenceClassifier:
    model = SequenceClassifier(CONFIG, num_labels=num_outputs, objective=objective)
    initialize(model, config=CONFIG, seed=2)
    return model


def step(
    name: str,
    way: StrategyName,
    world: World,
    cut: Callable[[list[LabelledBatch]], list[LabelledBatch]],
) -> tuple[float, float]:
    """Loss and gradient norm of one step. Dropout is on."""
    objective, num_outputs = OBJECTIVES[name]
    packs = cut(packs_of(objective, num_outputs))
    numbers = range(world.rank, len(packs), world.size)
    mine = [packs[n] for n in numbers]
    if len(mine) < -(-len(packs) // world.size):
        mine.append(packs[0].filler())
    model = new_model(objective, num_outputs)
    strategy: Strategy = wrap(way, model, world, dp_devices=1, dtype=torch.float32)
    optim = OptimConfig(learning_rate=1e-3)
    report = train_step(
        strategy,
        StepShare(packs=mine, numbers=numbers, num_packs=len(packs)),
        AdamW(group_parameters(model, optim), optim),
        compute=FP32,
        scaler=None,
        step=0,
        seed=0,
        learning_rate=1e-3,
        max_grad_norm=None,
    )
    return report.loss, report.grad_norm


def first_three(packs: list[LabelledBatch]) -> list[LabelledBatch]:
    """An odd number of packs, so that a rank has a filler."""
    return [packs[0], packs[1], joined(packs[2:])]


def same(packs: list[LabelledBatch]) -> list[LabelledBatch]:
    return packs


def as_one(packs: list[LabelledBatch]) -> list[LabelledBatch]:
    return [joined(packs)]


def on_a_rank(world: World) -> dict[tuple[str, str], tuple[float, float]]:
    ways: tuple[StrategyName, ...] = ("ddp", "fsdp")
    return {
        (name, f"{way} {cut.__name__}"): step(name, way, world, cut)
        for name in OBJECTIVES
        for way in ways
        for cut in (same, first_three)
    }


@pytest.fixture(scope="module")
def by_rank() -> list[dict[tuple[str, str], tuple[float, float]]]:
    return run_ranks(on_a_rank)


@pytest.mark.parametrize("name", OBJECTIVES)
def test_accumulation_and_ranks_change_nothing(
    name: str, by_rank: list[dict[tuple[str, str], tuple[float, float]]]
) -> None:
    objective, num_outputs = OBJECTIVES[name]
    whole = step(name, "none", World(), as_one)
    assert step(name, "none", World(), same) == pytest.approx(whole, rel=1e-5)
    for found in by_rank:
        for (of, way), numbers in found.items():
            if of == name:
                assert numbers == pytest.approx(whole, rel=1e-5), way
    batch = joined(packs_of(objective, num_outputs))
    mean_of_means = 0.0
    model = new_model(objective, num_outputs)
    with torch.no_grad():
        nats = model(batch, dropout_seed=dropout_seed_of(0, step=0)).nats
        assert whole[0] == pytest.approx(float(nats) / batch.target_counts[0], rel=1e-5)
    for one in packs_of(objective, num_outputs):
        nats = model(one, dropout_seed=None).nats.detach()
        mean_of_means += float(nats) / one.target_counts[0] / len(PACKS)
    right = float(model(batch, dropout_seed=None).nats.detach()) / batch.target_counts[0]
    assert abs(mean_of_means / right - 1) > 0.01, "the packs must tell the two apart"
