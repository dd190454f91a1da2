"""What the planner says of adapters: counted as models have them, held to what a step takes."""

import json
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from bertsmith.batch import LabelledBatch, StepShare, pack
from bertsmith.memory.fit import ways_to_fit
from bertsmith.memory.formula import plan_memory
from bertsmith.memory.ledger import Ledger
from bertsmith.memory.lora_walk import LoraWalk
from bertsmith.memory.shapes import (
    Adapters,
    Body,
    DeviceKind,
    NumberFormat,
    RunShape,
    parameters_of,
)
from bertsmith.model.checkpointing import BlockMode
from bertsmith.model.config import LORA_TARGETS, PRESETS, EncoderConfig, LoraConfig
from bertsmith.model.heads import SequenceClassifier, initialize
from bertsmith.model.kernels import build
from bertsmith.model.lora import attach, freeze_encoder
from bertsmith.parallel.strategies import Strategy
from bertsmith.parallel.world import World
from bertsmith.recipes.config import PlanFinetuneConfig
from bertsmith.recipes.plan import plan
from bertsmith.recipes.planning.report import as_json, as_text
from bertsmith.train.config import OptimConfig
from bertsmith.train.optim import AdamW, group_parameters
from bertsmith.train.precision import Compute
from bertsmith.train.step import train_step
from live_tensors import counted

TINY = EncoderConfig(
    vocab_size=100,
    hidden_size=16,
    num_hidden_layers=2,
    num_attention_heads=2,
    intermediate_size=64,
    max_position_embeddings=32,
)
QUERY_VALUE = Adapters(rank=8, targets=("query", "value"), trains_pooler=False)
SHAPE = RunShape(
    encoder=TINY,
    task="classifier",
    tokens_per_pack=64,
    longest=32,
    read_share=1 / 32,
    num_labels=3,
    adapters=QUERY_VALUE,
    threads=0,
)


def adapted(shape: RunShape) -> SequenceClassifier:
    adapters = shape.adapters
    assert adapters is not None
    model = SequenceClassifier(shape.encoder, num_labels=shape.num_labels)
    initialize(model, config=shape.encoder, seed=0)
    dropout = 0.1 if adapters.drops else 0.0
    config = LoraConfig(rank=adapters.rank, targets=list(adapters.targets), dropout=dropout)
    attach(model, config, seed=0)
    heads = ("pooler", "classifier") if adapters.trains_pooler else ("classifier",)
    freeze_encoder(model, trained=heads)
    return model


@pytest.mark.parametrize("trains_pooler", [False, True])
@pytest.mark.parametrize("targets", [("query",), ("inner", "inner_out"), LORA_TARGETS])
def test_parameters_are_counted_as_the_model_has_them(
    targets: tuple[str, ...], trains_pooler: bool
) -> None:
    adapters = Adapters(rank=3, targets=targets, trains_pooler=trains_pooler)
    shape = replace(SHAPE, adapters=adapters)
    model, counts = adapted(shape), parameters_of(shape)
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    assert counts.trained == trained
    assert counts.trained + counts.frozen == sum(p.numel() for p in model.parameters())
    found = plan_memory(replace(shape, has_snapshot=False))
    assert found.phase_peaks_bytes["optimizer"] == 16 * trained + 4 * counts.frozen


def test_the_first_block_keeps_nothing_below_its_lowest_adapter() -> None:
    """Rows of D = 16 numbers, without dropout, on the kernels; F is four of them.

    inner_out alone: its input of 4 rows, R of its own, the last sum, the output. In block 1 also
    q, k, v, context, the sum before the norm, and 4 rows before the activation.
    """
    T, bare = 64, replace(TINY, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
    adapters = Adapters(rank=8, targets=("inner_out",), trains_pooler=False)
    shape = replace(SHAPE, encoder=bare, adapters=adapters)
    kept = []
    for i in (0, 1):
        ledger = Ledger()
        walk = LoraWalk(shape, ledger, accumulates=False)
        ledger.hold(f"hidden {i}", "activations", 4 * T * 16)
        walk.block_forward(i, "none", T, T)
        ledger.start_phase()
        kept.append(ledger.peak_bytes)
    lowest = 4 * T * (16 * (4 + 1 + 1) + 8 + 2)
    log_sums, moments = T * 2 * 4, T * 8
    assert kept == [lowest, lowest + 4 * T * 16 * (4 + 1 + 4) + log_sums + moments]


@pytest.mark.parametrize("mode", ["none", "selective", "full"])
@pytest.mark.parametrize("targets", [("query", "value"), LORA_TARGETS])
def test_a_step_takes_what_is_planned(mode: BlockMode, targets: tuple[str, ...]) -> None:
    if build.load("fp32") is None:
        pytest.skip("no C kernels here")
    shape = replace(
        SHAPE,
        encoder=replace(PRESETS["bert-tiny"], vocab_size=1000),
        tokens_per_pack=1024,
        longest=64,
        read_share=1 / 64,
        adapters=Adapters(rank=8, targets=targets, trains_pooler=True),
        block_modes=(mode, mode),
        has_snapshot=False,
    )
    inputs = pack([torch.randint(5, 1000, (64,)) for _ in range(16)])
    batch = LabelledBatch(
        inputs=inputs, labels_N=torch.zeros(16, dtype=torch.int64), rows_N=torch.arange(16)
    )
    with counted() as found:
        model = adapted(shape)
        model.encoder.checkpoint_blocks((mode, mode))
        optimizer = AdamW(group_parameters(model, OptimConfig()), OptimConfig())
        train_step(
            Strategy(model, World()),
            StepShare.of_all([batch]),
            optimizer,
            compute=Compute(device=torch.device("cpu"), dtype=torch.float32),
            scaler=None,
            step=0,
            seed=0,
            learning_rate=1e-4,
            max_grad_norm=1.0,
        )
    planned = plan_memory(shape).phase_peaks_bytes["forward and backward"]
    assert -0.03 <= planned / found.peak_bytes - 1.0 <= 0.10


PLACES: list[tuple[DeviceKind, Body]] = [("cpu", "kernels"), ("cpu", "plain"), ("cuda", "plain")]


@settings(max_examples=150)
@given(
    place=st.sampled_from(PLACES),
    number_format=st.sampled_from(["fp32", "bf16", "fp16"]),
    targets=st.sets(st.sampled_from(LORA_TARGETS), min_size=1),
    drops=st.booleans(),
    dropouts=st.tuples(st.sampled_from([0.0, 0.1]), st.sampled_from([0.0, 0.1])),
    mode=st.sampled_from(["none", "selective", "full"]),
    packs=st.integers(1, 3),
)
def test_any_such_run_is_planned_and_needs_less_than_full_training(
    place: tuple[DeviceKind, Body],
    number_format: NumberFormat,
    targets: set[str],
    drops: bool,
    dropouts: tuple[float, float],
    mode: BlockMode,
    packs: int,
) -> None:
    hidden, probs = dropouts
    encoder = replace(
        PRESETS["bert-mini"], hidden_dropout_prob=hidden, attention_probs_dropout_prob=probs
    )
    ordered = tuple(target for target in LORA_TARGETS if target in targets)
    shape = replace(
        SHAPE,
        encoder=encoder,
        tokens_per_pack=256,
        adapters=Adapters(rank=8, targets=ordered, drops=drops),
        number_format=number_format,
        device=place[0],
        body=place[1],
        block_modes=(mode,) * encoder.num_hidden_layers,
        packs_per_step=packs,
    )
    found, whole = plan_memory(shape), plan_memory(replace(shape, adapters=None))
    assert found.peak_bytes < whole.peak_bytes
    more = plan_memory(shape.with_tokens(512))
    assert found.peak_bytes < more.peak_bytes


def test_adapters_are_among_the_ways_to_fit_and_a_plan_counts_what_is_frozen() -> None:
    config = PlanFinetuneConfig(
        model="bert-base", output="", device="4GiB", precision="bf16", flop_per_second=1e12
    )
    way = next(way for way in plan(config).ways if way.options == "--lora.rank 8")
    asked = plan(replace(config, lora=LoraConfig(rank=8)))
    assert way.plan.peak_bytes == asked.plan.peak_bytes
    assert not any("lora" in way.options or "fsdp" in way.options for way in asked.ways)
    # A and B of query and value: 12 layers x 2 x 8 x (768 + 768); pooler and 2 classes.
    trained = 294_912 + 768 * 768 + 768 + 2 * 768 + 2
    assert f"{trained:,} trained parameters, 108,891,648 frozen ones" in as_text(asked)
    assert json.loads(as_json(asked))["parameters"] == trained + 108_891_648


def test_other_runs_have_no_such_way() -> None:
    masked = replace(SHAPE, adapters=None, task="masked_lm")
    normed = replace(SHAPE, adapters=None, head_norm="layer")
    for shape in (masked, normed, SHAPE):
        ways = ways_to_fit(shape, 1 << 20, step_tokens=64, speedup=None, half="bf16")
        assert not any("lora" in way.options for way in ways)
        assert ways
