"""The planner's arithmetic: by hand for small shapes, against torch, and as properties."""

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from bertsmith.batch import MaskedBatch, PairTargets, StepShare, pack
from bertsmith.memory.fit import again_share, largest_pack, least_needed
from bertsmith.memory.formula import MemoryPlan, plan_memory
from bertsmith.memory.fused_walk import FusedWalk
from bertsmith.memory.ledger import Ledger
from bertsmith.memory.plain_walk import PlainWalk
from bertsmith.memory.shapes import Body, RunShape, parameters_of
from bertsmith.model import encoder as encoder_module
from bertsmith.model.checkpointing import BlockMode
from bertsmith.model.config import PRESETS, EncoderConfig
from bertsmith.model.heads import MaskedLM, PairedLM, SequenceClassifier, initialize
from bertsmith.model.kernels import build
from bertsmith.parallel.strategies import Strategy
from bertsmith.parallel.world import World
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
MLM = RunShape(
    encoder=TINY, task="masked_lm", tokens_per_pack=64, longest=32, read_share=0.15, threads=0
)
BASE = replace(MLM, encoder=PRESETS["bert-base"], tokens_per_pack=4096, longest=512)


def sum_of_parts(plan: MemoryPlan) -> int:
    return (
        plan.weights_bytes
        + plan.gradients_bytes
        + plan.moments_bytes
        + plan.activations_bytes
        + plan.logits_bytes
        + plan.workspace_bytes
        + plan.snapshot_bytes
    )


@pytest.mark.parametrize("config", [TINY, PRESETS["bert-tiny"]])
def test_parameters_are_counted_as_the_models_have_them(config: EncoderConfig) -> None:
    masked, classifier = MaskedLM(config), SequenceClassifier(config, num_labels=3, norm="layer")
    shape = replace(MLM, encoder=config)
    assert parameters_of(shape).trained == sum(p.numel() for p in masked.parameters())
    paired = replace(shape, pair_share=0.01)
    assert parameters_of(paired).trained == sum(p.numel() for p in PairedLM(config).parameters())
    other = replace(shape, task="classifier", num_labels=3, head_norm="layer")
    assert parameters_of(other).trained == sum(p.numel() for p in classifier.parameters())


def test_bert_base_has_its_published_size() -> None:
    """109,514,298: `BertForMaskedLM` of bert-base-uncased; 110,106,428: `BertForPreTraining`."""
    assert parameters_of(BASE).trained == 109_514_298
    assert parameters_of(replace(BASE, pair_share=0.01)).trained == 110_106_428


def test_states_are_sixteen_bytes_a_parameter_and_a_snapshot_twelve() -> None:
    count = parameters_of(MLM).trained
    alone = plan_memory(replace(MLM, has_snapshot=False))
    assert alone.phase_peaks_bytes["optimizer"] == 16 * count
    assert plan_memory(MLM).phase_peaks_bytes["optimizer"] == 28 * count
    assert plan_memory(MLM).phase_peaks_bytes["save"] == 24 * count
    half = plan_memory(replace(MLM, has_snapshot=False, moment_bytes=2))
    assert half.phase_peaks_bytes["optimizer"] == 12 * count


@pytest.mark.parametrize("body", ["kernels", "plain"])
def test_logits_stop_growing_where_they_are_made_in_chunks(body: Body) -> None:
    """BERT's 30,522 columns of fp32: 128 MiB hold 1,099 rows, which 8,192 tokens exceed."""
    tiny = replace(MLM, encoder=PRESETS["bert-tiny"], body=body, has_snapshot=False)
    ledger = Ledger()
    walk = (FusedWalk if body == "kernels" else PlainWalk)(tiny, ledger, accumulates=False)
    walk.head_forward(50_000)
    assert 4 * 1099 * 30522 <= ledger.at_peak["logits"] <= 4 * 1099 * 30522 + 4 * 50_000


@pytest.mark.parametrize(("mode", "kept"), [("none", 13), ("selective", 7), ("full", 2)])
def test_a_block_keeps_what_its_mode_says(mode: BlockMode, kept: int) -> None:
    """Rows of D = 16 numbers (F is four of them) beside two norms' moments and 2 heads' log-sums.

    none: its input, q, k, v, context, 2 sums, norm, 4 inner, output = 13. selective, amid others:
    q, k, v, context, 2 sums, output. full: the last sum, output.
    """
    T = 64
    ledger = Ledger()
    walk = FusedWalk(MLM, ledger, accumulates=False)
    ledger.hold("hidden 1", "activations", 4 * T * 16)
    walk.block_forward(1, mode, T, T)
    moments = {"none": 16 + 8, "selective": 16 + 8, "full": 8}[mode]
    assert ledger.at_peak["activations"] >= 4 * T * 16 * kept
    ledger.start_phase()
    assert ledger.peak_bytes == 4 * T * 16 * kept + T * moments


def test_the_planner_knows_how_packs_are_rounded() -> None:
    for tokens in (1, 63, 64, 1000, 1025, 4096, 5001):
        batch = encoder_module.with_ghosts(pack([torch.zeros(tokens, dtype=torch.int64)]))
        assert MLM.computed_rows(tokens) == batch.num_tokens
        rows_M = encoder_module.with_repeats(torch.arange(tokens))
        assert MLM.computed_rows(tokens) == len(rows_M)


def test_counted_bytes_are_those_of_a_tiny_module_by_hand() -> None:
    """200 x 100 inputs, a 100 x 100 weight, its product and their gradients: 80, 40, 80 kB."""
    with counted() as found:
        weight = torch.zeros(100, 100, requires_grad=True)
        inputs = torch.ones(200, 100)
        loss = (inputs @ weight).sum()
        loss.backward()  # type: ignore[no-untyped-call]
    # At its height: weight, inputs, product's gradient (expanded, then made dense), new gradient.
    assert 40_000 + 80_000 + 80_000 <= found.peak_bytes <= 40_000 + 80_000 + 80_000 + 40_000 + 100


@pytest.mark.parametrize("has_pairs", [False, True])
@pytest.mark.parametrize("mode", ["none", "selective", "full"])
def test_a_step_takes_what_is_planned(mode: BlockMode, has_pairs: bool) -> None:
    if build.load("fp32") is None:
        pytest.skip("no C kernels here")
    config = replace(PRESETS["bert-tiny"], vocab_size=1000)
    shape = RunShape(
        encoder=config,
        task="masked_lm",
        tokens_per_pack=1024,
        longest=64,
        read_share=0.15,
        pair_share=has_pairs / 64,
        block_modes=(mode, mode),
        has_snapshot=False,
        threads=0,
    )
    inputs = pack([torch.randint(5, 1000, (64,)) for _ in range(16)])
    positions_M = torch.arange(math.ceil(0.15 * 1024))
    sequences_P = torch.arange(16)
    if has_pairs:
        positions_M = positions_M[~torch.isin(positions_M, inputs.starts_N1)]
    batch = MaskedBatch(
        inputs=inputs,
        positions_M=positions_M,
        targets_M=torch.zeros_like(positions_M),
        pairs=PairTargets(sequences_P=sequences_P, labels_P=sequences_P % 2) if has_pairs else None,
    )
    with counted() as found:
        model = (PairedLM if has_pairs else MaskedLM)(config)
        initialize(model, config=config, seed=0)
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


shapes = st.builds(
    lambda config, task, tokens, number_format, place, packs, sharing, ranks: RunShape(
        encoder=config,
        task=task,
        tokens_per_pack=tokens,
        longest=32,
        read_share=0.15,
        most_read=None if task == "masked_lm" else 32,
        trained_rows=None if task == "masked_lm" else 50,
        number_format=number_format,
        device=place[0],
        body=place[1],
        packs_per_step=packs,
        sharing=sharing if ranks > 1 else "none",
        ranks=ranks,
    ),
    st.sampled_from(
        [
            TINY,
            PRESETS["bert-mini"],
            replace(TINY, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0),
        ]
    ),
    st.sampled_from(["masked_lm", "classifier"]),
    st.integers(32, 20_000),
    st.sampled_from(["fp32", "bf16"]),
    st.sampled_from([("cpu", "kernels"), ("cpu", "plain"), ("cuda", "plain")]),
    st.integers(1, 3),
    st.sampled_from(["ddp", "fsdp"]),
    st.integers(1, 8),
)


@given(shapes, st.integers(0, 5000))
@settings(max_examples=60)
def test_more_tokens_never_need_less(shape: RunShape, more: int) -> None:
    larger = shape.with_tokens(shape.tokens_per_pack + more)
    assert plan_memory(larger).peak_bytes >= plan_memory(shape).peak_bytes


@given(shapes)
@settings(max_examples=60)
def test_the_parts_are_the_peak_and_the_peak_is_that_of_its_phase(shape: RunShape) -> None:
    plan = plan_memory(shape)
    assert sum_of_parts(plan) == plan.peak_bytes == max(plan.phase_peaks_bytes.values())
    assert plan.phase_peaks_bytes[plan.peak_phase] == plan.peak_bytes


@given(shapes)
@settings(max_examples=60)
def test_checkpointing_never_needs_more_than_an_input(shape: RunShape) -> None:
    """In packs so small that the last block's height is all that counts, its input is on top."""
    shape = replace(shape, encoder=replace(shape.encoder, num_hidden_layers=6))
    modes: tuple[BlockMode, ...] = ("none", "selective", "full")
    none, selective, full = (
        plan_memory(replace(shape, block_modes=(mode,) * 6)).peak_bytes for mode in modes
    )
    rows = shape.computed_rows(shape.tokens_per_pack)
    one_input = 4 * rows * shape.encoder.hidden_size
    assert full <= none + one_input
    assert selective <= none + one_input
    if rows >= 4096:
        assert full <= selective < none


@given(shapes, st.integers(2, 64))
@settings(max_examples=60)
def test_fsdp_divides_the_states(shape: RunShape, ranks: int) -> None:
    count = parameters_of(replace(shape, trained_rows=None)).trained
    shape = replace(shape, trained_rows=None, sharing="fsdp", ranks=ranks)
    plan = plan_memory(shape)
    assert plan.moments_bytes == math.ceil(8 * count / ranks)
    assert plan.phase_peaks_bytes["optimizer"] - plan.snapshot_bytes <= 16 * count / ranks + 3


def test_the_largest_pack_fits_and_one_that_is_larger_does_not() -> None:
    limit = 6 << 30
    tokens = largest_pack(BASE, limit)
    assert tokens is not None
    assert plan_memory(BASE.with_tokens(tokens)).needed_bytes <= limit
    assert plan_memory(BASE.with_tokens(tokens + 64)).needed_bytes > limit
    assert largest_pack(BASE, 1 << 30) is None


def test_no_way_needs_less_than_the_least() -> None:
    least = least_needed(BASE, formats=["fp32", "bf16"])
    assert least.needed_bytes < plan_memory(BASE).needed_bytes
    assert least.needed_bytes >= 16 * parameters_of(BASE).trained  # states alone


def test_work_done_again_is_that_of_the_products_made_again() -> None:
    """Without attention's own: 4 D^2 + 8 D^2 a block, of which full makes 8 again, selective 4."""
    count = 12
    for mode, share in (("full", 8 / 12 / 3), ("selective", 4 / 12 / 3), ("none", 0.0)):
        modes: tuple[BlockMode, ...] = (mode,) * count  # type: ignore[assignment]
        found = again_share(replace(BASE, longest=1, block_modes=modes))
        assert found == pytest.approx(share, rel=1e-3)
