"""`bertsmith selftest parallel`: proves on the user's own machines that ranks change no result.

A small model is trained for some steps on made-up texts: on one device, and then under each
strategy, with dropout on, unequal numbers of tokens and targets, and steps that do not divide by
the ranks. Everything random is the same, so whatever differs is rounding, or a fault.
"""

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from rich.table import Table
from torch import Tensor, nn

from bertsmith.batch import LabelledBatch, MaskedBatch, PackedBatch, StepShare, pack
from bertsmith.errors import EXIT_FAULT
from bertsmith.model.checkpointing import BlockMode
from bertsmith.model.config import EncoderConfig
from bertsmith.model.heads import MaskedLM, SequenceClassifier, initialize
from bertsmith.parallel.choice import devices_here, wrap
from bertsmith.parallel.config import StrategyName
from bertsmith.parallel.strategies import Strategy
from bertsmith.parallel.world import World, joined
from bertsmith.recipes.config import SelftestConfig
from bertsmith.recipes.ranks import facts_to_share
from bertsmith.report.console import table_console
from bertsmith.report.progress import Speaker
from bertsmith.train.config import OptimConfig
from bertsmith.train.optim import AdamW, group_parameters
from bertsmith.train.precision import Compute, choose_compute
from bertsmith.train.step import train_step

Head = Literal["masked language model", "classifier"]

SHAPE = EncoderConfig(
    vocab_size=512,
    hidden_size=64,
    num_hidden_layers=2,
    num_attention_heads=4,
    intermediate_size=128,
    max_position_embeddings=64,
)
NUM_LABELS = 5
OPTIM = OptimConfig(learning_rate=1e-3, schedule="constant", warmup_share=0.0, max_grad_norm=0.5)

BOUNDS = {"cpu": 1e-6, "cuda": 1e-4}
"""Largest relative difference of a loss that is called rounding, in fp32."""


@dataclass(frozen=True, kw_only=True)
class Trained:
    """What a short training gave."""

    losses: list[float]
    grad_norms: list[float]
    weights: dict[str, Tensor]


@dataclass(frozen=True, kw_only=True)
class Difference:
    """How far a strategy is from one device."""

    head: Head
    strategy: str
    grid: str
    """How packs fall on ranks."""

    loss: float
    """Largest relative difference of a step's loss."""

    grad_norm: float
    """Largest relative difference of a step's gradient norm."""

    weights: float
    """Largest difference of a weight, relative to the largest weight of its tensor."""

    @property
    def is_none(self) -> bool:
        """Whether the two are the same to the last bit."""
        return self.loss == self.grad_norm == self.weights == 0.0


def main(config: SelftestConfig) -> int:
    """Run the comparisons, print them, and fail where one is above the bound."""
    with joined(
        config.parallel,
        on_gpus=devices_here(config.device).kind == "cuda",
        facts=facts_to_share(config),
    ) as world:
        speaker = Speaker() if world.is_main else Speaker.silent()
        compute = choose_compute("fp32", config.device, local_rank=world.local_rank)
        speaker.say(f"{config.steps} steps in fp32 on {world.size} ranks ({compute.device.type})")
        differences = compare(world, compute, steps=config.steps, speaker=speaker)
        if not world.is_main:
            return 0
        bound = BOUNDS[compute.device.type]
        console = table_console()
        for grid in dict.fromkeys(d.grid for d in differences):
            console.print(as_table(grid, [d for d in differences if d.grid == grid]))
        for head in ("masked language model", "classifier"):
            ratio, cosine = mean_of_means(head, compute, num_packs=2 * world.size)
            console.print(
                f"for comparison, {head}: the sum of {2 * world.size} packs' mean losses, which "
                f"transformers 5.24 trains BERT on, has a gradient {ratio:.2f} times as long, and "
                f"turned (cosine {cosine:.3f})"
            )
        worst = max(max(d.loss, d.grad_norm) for d in differences)
        verdict = "equal" if worst <= bound else "DIFFERENT"
        console.print(f"{verdict}: the largest difference is {worst:.1e}, the bound {bound:.0e}")
        if world.size == 1:
            console.print(
                "one process: ddp and fsdp were not compared; --parallel.devices 2, or torchrun, "
                "compares them too"
            )
    return 0 if worst <= bound else EXIT_FAULT


def compare(world: World, compute: Compute, *, steps: int, speaker: Speaker) -> list[Difference]:
    """Every strategy against one device, for both heads; every rank has to take part."""
    cpu = Compute(device=torch.device("cpu"), dtype=torch.float32)
    ways: list[tuple[str, StrategyName, World, Compute]] = [
        ("dp (CPU replicas)", "dp", World(), cpu)
    ]
    gpus = torch.cuda.device_count() if compute.device.type == "cuda" else 0
    if world.size > 1:
        ways += [("ddp", "ddp", world, compute), ("fsdp", "fsdp", world, compute)]
    elif gpus > 1:
        ways.append((f"dp ({gpus} GPUs)", "dp", world, compute))
    ranks = max(world.size, gpus if world.size == 1 else 0, 2)
    differences: list[Difference] = []
    heads: tuple[Head, ...] = ("masked language model", "classifier")
    for head in heads:
        for grid, packs in (
            ("a pack a rank", [ranks]),
            ("three packs a rank, at times one in all", [3 * ranks, 3 * ranks, 1]),
        ):
            alone = {
                on: train_small(head, "none", World(), on, steps=steps, packs=packs)
                for on in {way[3] for way in ways}
            }
            for name, strategy, ranks_of_it, on in ways:
                found = train_small(
                    head, strategy, ranks_of_it, on, steps=steps, packs=packs, dp_devices=ranks
                )
                world.beat(f"the selftest of {name}")
                differences.append(
                    difference(found, alone[on], head=head, strategy=name, grid=grid)
                )
                speaker.say(f"{head}, {name}, {grid}: done")
    return differences


def train_small(
    head: Head,
    strategy_name: StrategyName,
    world: World,
    compute: Compute,
    *,
    steps: int,
    packs: Sequence[int],
    dp_devices: int = 1,
    checkpointing: Sequence[BlockMode] | None = None,
) -> Trained:
    """Train the small model.

    Args:
        head: Its task.
        strategy_name: How.
        world: Ranks that share the steps.
        compute: Device of this rank, and fp32.
        steps: Optimizer steps.
        packs: Packs of step 0, 1, ...; then from the start again.
        dp_devices: Of dp.
        checkpointing: What each block keeps for the backward pass; None: all of it.
    """
    model = new_model(head).to(compute.device)
    if checkpointing is not None:
        model.encoder.checkpoint_blocks(checkpointing)
    strategy = wrap(strategy_name, model, world, dp_devices=dp_devices, dtype=compute.dtype)
    optimizer = AdamW(group_parameters(model, OPTIM), OPTIM)
    losses, grad_norms = [], []
    for step in range(steps):
        world.beat(f"step {step + 1} of the selftest")
        report = train_step(
            strategy,
            share_of(packs_of(head, step, packs[step % len(packs)]), world),
            optimizer,
            compute=compute,
            scaler=None,
            step=step,
            seed=7,
            learning_rate=OPTIM.learning_rate,
            max_grad_norm=OPTIM.max_grad_norm,
        )
        losses.append(report.loss)
        grad_norms.append(report.grad_norm)
    return Trained(losses=losses, grad_norms=grad_norms, weights=weights_of(strategy, model))


def new_model(head: Head) -> MaskedLM | SequenceClassifier:
    """The small model, the same every time."""
    model: MaskedLM | SequenceClassifier
    with torch.random.fork_rng(devices=[]):
        if head == "classifier":
            model = SequenceClassifier(SHAPE, num_labels=NUM_LABELS)
        else:
            model = MaskedLM(SHAPE)
    initialize(model, config=SHAPE, seed=3)
    return model


def packs_of(head: Head, step: int, count: int) -> Sequence[Any]:
    """Packs of a step, of the head's kind: their numbers of tokens and targets differ widely."""
    make = labelled_pack if head == "classifier" else masked_pack
    return [make(step, number) for number in range(count)]


def masked_pack(step: int, number: int) -> MaskedBatch:
    """Random tokens, of which 1 to all are to be named."""
    rng, inputs = _random_pack(step, number)
    count = int(rng.integers(1, inputs.num_tokens + 1))
    positions = np.sort(rng.choice(inputs.num_tokens, count, replace=False))
    targets = rng.integers(5, SHAPE.vocab_size, count)
    return MaskedBatch(
        inputs=inputs,
        positions_M=torch.from_numpy(positions),
        targets_M=torch.from_numpy(targets),
    )


def labelled_pack(step: int, number: int) -> LabelledBatch:
    """Random tokens and classes."""
    rng, inputs = _random_pack(step, number)
    labels = rng.integers(0, NUM_LABELS, inputs.num_sequences)
    return LabelledBatch(
        inputs=inputs,
        labels_N=torch.from_numpy(labels),
        rows_N=torch.arange(inputs.num_sequences),
    )


def share_of(packs: Sequence[Any], world: World) -> StepShare[Any]:
    """A rank's part of a step, with a filler where another rank has more."""
    numbers = range(world.rank, len(packs), world.size)
    mine = [packs[n] for n in numbers]
    if len(mine) < -(-len(packs) // world.size):
        none = torch.zeros(0, dtype=torch.int64)
        if isinstance(packs[0], MaskedBatch):
            mine.append(dataclasses.replace(packs[0], positions_M=none, targets_M=none))
        else:
            mine.append(dataclasses.replace(packs[0], rows_N=none))
    return StepShare(packs=mine, numbers=numbers, num_packs=len(packs))


def _random_pack(step: int, number: int) -> tuple[np.random.Generator, PackedBatch]:
    rng = np.random.Generator(np.random.PCG64([11, step, number]))
    lengths = rng.integers(1, SHAPE.max_position_embeddings, int(rng.integers(1, 9)))
    inputs = pack([torch.from_numpy(rng.integers(5, SHAPE.vocab_size, n)) for n in lengths])
    return rng, dataclasses.replace(inputs, first_row=number << 20)


def weights_of(strategy: Strategy, model: nn.Module) -> dict[str, Tensor]:
    """Weights in one piece, where this rank speaks for its world; else none."""
    named = ((name, p.detach()) for name, p in model.named_parameters())
    return {name: t.cpu().clone() for name, t in strategy.whole_tensors(named)}


def difference(
    found: Trained, alone: Trained, *, head: Head, strategy: str, grid: str
) -> Difference:
    """How far a training is from the one on one device."""
    return Difference(
        head=head,
        strategy=strategy,
        grid=grid,
        loss=_largest(found.losses, alone.losses),
        grad_norm=_largest(found.grad_norms, alone.grad_norms),
        weights=max(
            (
                float((found.weights[name] - alone.weights[name]).abs().max())
                / max(float(alone.weights[name].abs().max()), 1e-12)
                for name in found.weights
            ),
            default=0.0,
        ),
    )


def _largest(found: Sequence[float], wanted: Sequence[float]) -> float:
    """Largest relative difference; infinite where a number is not finite."""
    pairs = list(zip(found, wanted, strict=True))
    if not all(math.isfinite(a) and math.isfinite(b) for a, b in pairs):
        return math.inf
    return max(abs(a - b) / max(abs(b), 1e-12) for a, b in pairs)


def mean_of_means(head: Head, compute: Compute, *, num_packs: int) -> tuple[float, float]:
    """The gradient of the sum of each pack's mean loss, against the right one.

    Returns:
        Ratio of the lengths, and cosine of the angle between the two.
    """
    gradients: list[Tensor] = []
    packs = packs_of(head, 0, num_packs)
    total = sum(p.num_targets for p in packs)
    for own_mean in (True, False):
        model = new_model(head).to(compute.device)
        for one in packs:
            loss = model(one.to(compute.device), dropout_seed=None)
            (loss.nats / (one.num_targets if own_mean else total)).backward()
        gradients.append(
            torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None]).double()
        )
    wrong, right = gradients
    cosine = wrong @ right / (wrong.norm() * right.norm())
    return float(wrong.norm() / right.norm()), float(cosine)


def as_table(title: str, differences: Sequence[Difference]) -> Table:
    """The comparisons of one grid."""
    table = Table("head", "strategy", title=f"largest relative difference to one device: {title}")
    for heading in ("loss", "gradient norm", "weights"):
        table.add_column(heading, justify="right")
    for d in differences:
        values = (d.loss, d.grad_norm, d.weights)
        numbers = ["0"] * 3 if d.is_none else [f"{value:.1e}" for value in values]
        table.add_row(d.head, d.strategy, *numbers)
    return table
