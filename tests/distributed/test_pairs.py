"""Hidden tokens and pairs, a loss of two means: cuts, ranks and strategies give one result."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from bertsmith.batch import StepShare
from bertsmith.data.config import MaskingConfig, Objective, PackingConfig
from bertsmith.data.stream import PretrainStream
from bertsmith.model.config import EncoderConfig
from bertsmith.model.heads import PairedLM, initialize
from bertsmith.parallel.choice import wrap
from bertsmith.parallel.config import StrategyName
from bertsmith.parallel.world import World
from bertsmith.recipes.selftest import Trained, weights_of
from bertsmith.train.config import OptimConfig
from bertsmith.train.optim import AdamW, group_parameters
from bertsmith.train.precision import Compute
from bertsmith.train.step import train_step
from bertsmith.train.validation import score_pairs
from ranks import run_ranks
from small_corpus import ListCorpus

FP32 = Compute(device=torch.device("cpu"), dtype=torch.float32)
SHAPE = EncoderConfig(
    vocab_size=1000,
    hidden_size=16,
    num_hidden_layers=2,
    num_attention_heads=2,
    intermediate_size=32,
    max_position_embeddings=48,
)
CONFIG = OptimConfig(learning_rate=3e-3)
OBJECTIVES: tuple[Objective, ...] = ("mlm+nsp", "mlm+sop")
STRATEGIES: tuple[StrategyName, ...] = ("ddp", "fsdp")


def new_stream(objective: Objective) -> PretrainStream:
    """Nine packs an epoch: steps of four, four and one, which two ranks cannot share evenly."""
    return PretrainStream(
        ListCorpus([1, 30, 7, 90, 2, 55, 41, 12, 80, 33, 9, 64, 25, 50]),
        packing=PackingConfig(tokens_per_pack=64, max_sequence_tokens=48),
        masking=MaskingConfig(share=0.2),
        tokens_per_step=256,
        seed=1,
        objective=objective,
    )


def new_model(shape: EncoderConfig = SHAPE) -> PairedLM:
    with torch.random.fork_rng(devices=[]):
        model = PairedLM(shape)
    initialize(model, config=shape, seed=3)
    return model


def train(
    objective: Objective, name: StrategyName, world: World, *, micro_batch: int | None = None
) -> tuple[Trained, Any]:
    stream, model = new_stream(objective), new_model()
    strategy = wrap(name, model, world, dp_devices=2 if name == "dp" else 1, dtype=torch.float32)
    optimizer = AdamW(group_parameters(model, CONFIG), CONFIG)
    losses, grad_norms = [], []
    for step in range(6):
        share: StepShare[Any] = stream.share(step, rank=world.rank, num_ranks=world.size)
        report = train_step(
            strategy,
            share,
            optimizer,
            compute=FP32,
            scaler=None,
            step=step,
            seed=7,
            learning_rate=CONFIG.learning_rate,
            max_grad_norm=1.0,
            micro_batch_tokens=micro_batch,
        )
        losses.append(report.loss)
        grad_norms.append(report.grad_norm)
    scores = score_pairs(model, [p for s in range(3) for p in stream.step(s)], FP32, world)
    weights = weights_of(strategy, model)
    return Trained(losses=losses, grad_norms=grad_norms, weights=weights), scores


def train_everything(world: World) -> dict[Any, Any]:
    return {(o, name): train(o, name, world) for o in OBJECTIVES for name in STRATEGIES}


@pytest.fixture(scope="module")
def two_ranks() -> list[dict[Any, Any]]:
    return run_ranks(train_everything)


@pytest.fixture(scope="module")
def alone() -> Iterator[dict[Objective, Any]]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield {objective: train(objective, "none", World()) for objective in OBJECTIVES}
    torch.set_num_threads(before)


@pytest.mark.parametrize("way", ["ddp", "fsdp", "dp", "cut"])
@pytest.mark.parametrize("objective", OBJECTIVES)
def test_several_devices_and_smaller_passes_give_one_result(
    objective: Objective,
    way: str,
    two_ranks: list[dict[Any, Any]],
    alone: dict[Objective, Any],
) -> None:
    wanted, wanted_scores = alone[objective]
    if way == "cut":
        found, scores = train(objective, "none", World(), micro_batch=20)
    elif way == "dp":
        found, scores = train(objective, "dp", World())
    else:
        found, scores = two_ranks[0][objective, way]
    assert found.losses == pytest.approx(wanted.losses, rel=1e-5)
    assert found.grad_norms == pytest.approx(wanted.grad_norms, rel=1e-4)
    for key, weight in wanted.weights.items():
        torch.testing.assert_close(found.weights[key], weight, rtol=1e-3, atol=2e-5)
    assert scores.num_targets == wanted_scores.num_targets > 10
    assert scores.accuracy == wanted_scores.accuracy
    assert scores.loss == pytest.approx(wanted_scores.loss, rel=1e-4)


def test_a_step_divides_each_sum_by_the_targets_of_all_its_packs() -> None:
    """Loss and gradient norm of a step, from the two means over its packs together."""
    shape = replace(SHAPE, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
    model, reference = new_model(shape), new_model(shape)
    packs = new_stream("mlm+sop").step(0)
    report = train_step(
        wrap("none", model, World(), dp_devices=1, dtype=torch.float32),
        StepShare.of_all(packs),
        AdamW(group_parameters(model, CONFIG), CONFIG),
        compute=FP32,
        scaler=None,
        step=0,
        seed=7,
        learning_rate=0.0,
        max_grad_norm=None,
    )
    of_tokens, of_pairs = [], []
    for pack in packs:
        assert pack.pairs is not None
        logits_MV = reference.logits_MV(pack.inputs, pack.positions_M, dropout_seed=None)
        of_tokens.append(F.cross_entropy(logits_MV, pack.targets_M, reduction="none"))
        hidden_TD = reference.encoder(pack.inputs, dropout_seed=None)
        first_PD = hidden_TD[pack.inputs.starts_N1[pack.pairs.sequences_P].long()]
        logits_P2 = reference.relation(torch.tanh(reference.pooler(first_PD)))
        of_pairs.append(F.cross_entropy(logits_P2, pack.pairs.labels_P, reduction="none"))
    assert len({len(one) for one in of_tokens}) > 1
    assert len({len(one) for one in of_pairs}) > 1
    loss = torch.cat(of_tokens).mean() + torch.cat(of_pairs).mean()
    loss.backward()  # type: ignore[no-untyped-call]
    squares = [p.grad.square().sum() for p in reference.parameters() if p.grad is not None]
    assert report.loss == pytest.approx(loss.item(), rel=1e-5)
    assert report.grad_norm == pytest.approx(torch.stack(squares).sum().sqrt().item(), rel=1e-4)
    assert report.num_targets == sum(map(len, of_tokens)) + sum(map(len, of_pairs))
