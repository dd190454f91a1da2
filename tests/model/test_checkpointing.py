"""Blocks that are computed again: the same gradients to the bit, and less memory as promised."""

from dataclasses import replace
from typing import Any, Literal

import pytest
import torch
from torch import Tensor

from bertsmith.batch import LabelledBatch, MaskedBatch, PackedBatch, pack
from bertsmith.model.checkpointing import (
    BlockMode,
    Body,
    block_modes,
    kept_bytes,
    kept_bytes_per_token,
    kept_share,
    parse_checkpointing,
)
from bertsmith.model.config import PRESETS, EncoderConfig
from bertsmith.model.heads import MaskedLM, SequenceClassifier, initialize
from bertsmith.model.kernels import build
from live_tensors import held_for_backward

SHAPE = EncoderConfig(
    vocab_size=97,
    hidden_size=40,
    num_hidden_layers=4,
    num_attention_heads=2,
    intermediate_size=72,
    max_position_embeddings=64,
    hidden_dropout_prob=0.2,
    attention_probs_dropout_prob=0.3,
)
LENGTHS = (50, 31, 17, 16, 2, 1)
BASE = PRESETS["bert-base"]
FUSED, TORCH = Body(is_fused=True, element_bytes=4), Body(is_fused=False, element_bytes=4)

MODES: dict[str, tuple[BlockMode, ...]] = {
    "full": ("full",) * 4,
    "selective": ("selective",) * 4,
    "every:2": ("none", "full", "none", "full"),
    "mixed": ("full", "none", "selective", "full"),
}
Head = Literal["masked", "classifier"]


@pytest.fixture(params=["kernels", "torch"])
def body(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Both ways to compute a block."""
    if request.param == "torch":
        monkeypatch.setattr(build, "load", lambda storage: None)
    elif build.load("fp32") is None:
        pytest.skip("no C compiler, so there are no kernels to test")
    name: str = request.param
    return name


def inputs(lengths: tuple[int, ...] = LENGTHS) -> PackedBatch:
    generator = torch.Generator().manual_seed(0)
    return pack([torch.randint(5, SHAPE.vocab_size, (n,), generator=generator) for n in lengths])


def batch(head: Head) -> Any:
    if head == "classifier":
        rows_N = torch.arange(len(LENGTHS))
        return LabelledBatch(inputs=inputs(), labels_N=rows_N % 3, rows_N=rows_N)
    positions_M = torch.tensor([0, 1, 30, 55, 80, 116])
    return MaskedBatch(inputs=inputs(), positions_M=positions_M, targets_M=positions_M * 3 % 97)


def new_model(
    head: Head, modes: tuple[BlockMode, ...] | None, shape: EncoderConfig = SHAPE
) -> MaskedLM | SequenceClassifier:
    model = MaskedLM(shape) if head == "masked" else SequenceClassifier(shape, num_labels=3)
    initialize(model, config=shape, seed=1)
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():  # norms and biases too, so that no gradient is 0 by chance
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=0.1)
    if modes is not None:
        model.encoder.checkpoint_blocks(modes)
    return model


def gradients(
    model: MaskedLM | SequenceClassifier,
    head: Head,
    *,
    dtype: torch.dtype = torch.float32,
    passes: int = 1,
) -> tuple[float, dict[str, Tensor]]:
    """Summed loss, and the gradient added up over passes with other dropouts."""
    total = 0.0
    for seed in range(passes):
        with torch.autocast("cpu", dtype, enabled=dtype != torch.float32):
            loss = model(batch(head), dropout_seed=9 + seed)
        loss.nats.backward()
        total += float(loss.nats.detach())
    return total, {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("modes", MODES)
@pytest.mark.parametrize("head", ["masked", "classifier"])
def test_loss_and_gradients_are_the_same_to_the_bit_over_several_passes(
    head: Head, modes: str, body: str
) -> None:
    wanted_loss, wanted = gradients(new_model(head, None), head, passes=2)
    loss, found = gradients(new_model(head, MODES[modes]), head, passes=2)
    assert loss == wanted_loss
    assert found.keys() == wanted.keys()
    for name, expected in wanted.items():
        assert bool(expected.abs().sum() > 0), name
        assert torch.equal(found[name], expected), name


@pytest.mark.parametrize("width", [8, 40, 72, 76])
@pytest.mark.parametrize("activation", ["gelu", "gelu_new", "relu"])
def test_the_same_to_the_bit_for_any_width_and_activation_and_without_dropout(
    width: int, activation: str, body: str
) -> None:
    shape = replace(
        SHAPE,
        hidden_size=width,
        hidden_act=activation,  # type: ignore[arg-type]
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    wanted_loss, wanted = gradients(new_model("masked", None, shape), "masked")
    for modes in ("full", "selective"):
        loss, found = gradients(new_model("masked", MODES[modes], shape), "masked")
        assert loss == wanted_loss
        assert all(torch.equal(found[name], expected) for name, expected in wanted.items())


@pytest.mark.parametrize("modes", MODES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
def test_half_precision_gradients_are_close(dtype: torch.dtype, modes: str, body: str) -> None:
    wanted_loss, wanted = gradients(new_model("masked", None), "masked", dtype=dtype)
    loss, found = gradients(new_model("masked", MODES[modes]), "masked", dtype=dtype)
    assert loss == pytest.approx(wanted_loss, rel=1e-3)
    for name, expected in wanted.items():
        assert float((found[name] - expected).norm()) <= 1e-2 * float(expected.norm()), name


@pytest.mark.parametrize("modes", MODES)
def test_frozen_embeddings_and_blocks_get_no_gradient_and_change_no_other(
    modes: str, body: str
) -> None:
    def frozen(modes: tuple[BlockMode, ...] | None) -> MaskedLM | SequenceClassifier:
        model = new_model("classifier", modes)
        for name, parameter in model.named_parameters():
            if "embeddings" in name or "blocks.0" in name or "blocks.2.inner" in name:
                parameter.requires_grad_(False)
        return model

    _, wanted = gradients(frozen(None), "classifier")
    _, found = gradients(frozen(MODES[modes]), "classifier")
    assert found.keys() == wanted.keys()
    assert not any("blocks.0" in name or "blocks.2.inner." in name for name in found)
    assert all(torch.equal(found[name], expected) for name, expected in wanted.items())


@pytest.mark.parametrize("modes", ["full", "selective"])
def test_inference_is_what_it_was(modes: str, body: str) -> None:
    plain, again = new_model("masked", None), new_model("masked", MODES[modes])
    with torch.no_grad():
        losses = [m(batch("masked"), dropout_seed=None).nats for m in (plain, again)]
    assert torch.equal(*losses)


def measured_bytes_per_token(
    shape: EncoderConfig,
    modes: tuple[BlockMode, ...],
    *,
    dtype: torch.dtype = torch.float32,
    lengths: tuple[int, ...],
    read_share: float = 1.0,
) -> float:
    """What the blocks keep, copies of parameters left out."""
    model = new_model("masked", modes, shape)
    pack_of = inputs(lengths)
    tokens = pack_of.num_tokens
    assert tokens % 16 == 0, "no ghosts"
    rows_M = None if read_share == 1.0 else torch.arange(0, tokens, round(1 / read_share))
    sizes = {p.numel() for p in model.parameters()}
    with held_for_backward() as found, torch.autocast("cpu", dtype, enabled=dtype != torch.float32):
        hidden = model.encoder(pack_of, dropout_seed=3, rows_M=rows_M)
    small = {n * size for n in sizes for size in (2, 4)}
    own = {address: size for address, size in found.items() if size not in small}
    # The embeddings' norm keeps its moments, or in plain torch its sum, too; the output is none
    # of the blocks'.
    own.pop(hidden.untyped_storage().data_ptr(), None)
    return sum(own.values()) / tokens


LENGTHS_EVEN = (64,) * 11 + (32, 32)
EVEN = 11 * 64 + 64


@pytest.mark.parametrize("read_share", [1.0, 0.25])
@pytest.mark.parametrize("modes", ["none", *MODES])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_the_kernels_keep_what_the_table_says(
    dtype: torch.dtype, modes: str, read_share: float
) -> None:
    if build.load("fp32") is None:
        pytest.skip("no C compiler, so there are no kernels to test")
    chosen = MODES.get(modes, ("none",) * 4)
    body = Body(is_fused=True, element_bytes=2 if dtype == torch.bfloat16 else 4)
    found = measured_bytes_per_token(
        SHAPE, chosen, dtype=dtype, lengths=LENGTHS_EVEN, read_share=read_share
    )
    embedding_moments = 8
    said = kept_bytes(SHAPE, chosen, body, read_share=read_share) + embedding_moments
    assert found == pytest.approx(said, rel=0.002)


@pytest.mark.parametrize("drop_probs", [0.0, 0.3])
@pytest.mark.parametrize("drop_hidden", [0.0, 0.2])
@pytest.mark.parametrize("modes", ["none", *MODES])
def test_plain_torch_keeps_what_the_table_says(
    modes: str, drop_hidden: float, drop_probs: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(build, "load", lambda storage: None)
    shape = replace(SHAPE, hidden_dropout_prob=drop_hidden, attention_probs_dropout_prob=drop_probs)
    chosen = MODES.get(modes, ("none",) * 4)
    squares = sum(n * n for n in LENGTHS_EVEN) / sum(LENGTHS_EVEN)
    body = replace(TORCH, sequence_tokens=squares)
    found = measured_bytes_per_token(shape, chosen, lengths=LENGTHS_EVEN)
    embeddings = SHAPE.hidden_size * (4 + (1 if drop_hidden else 0)) + 8 + 3 * 8  # sum, mask, ids
    assert found == pytest.approx(kept_bytes(shape, chosen, body) + embeddings, rel=0.02)


def test_a_block_of_bert_base_keeps_twelve_widths_six_or_one() -> None:
    width, heads = 768, 12
    moments, log_sums = 8, 4 * heads
    assert [kept_bytes_per_token(BASE, mode, FUSED) for mode in ("none", "selective", "full")] == [
        12 * width * 4 + 2 * moments + log_sums,
        6 * width * 4 + 2 * moments + log_sums,
        width * 4 + moments,
    ]


@pytest.mark.parametrize(
    ("text", "modes"),
    [
        ("none", ["none"] * 6),
        ("full", ["full"] * 6),
        ("selective", ["selective"] * 6),
        ("every:1", ["full"] * 6),
        ("every:2", ["none", "full"] * 3),
        ("every:4", ["none", "none", "none", "full", "none", "none"]),
        ("every:6", ["none"] * 5 + ["full"]),
        ("budget:1", ["none"] * 6),
    ],
)
def test_the_blocks_that_a_value_picks(text: str, modes: list[BlockMode]) -> None:
    shape = replace(BASE, num_hidden_layers=6)
    assert list(block_modes(parse_checkpointing(text), shape, FUSED)) == modes


@pytest.mark.parametrize("body", [FUSED, TORCH, Body(is_fused=True, element_bytes=2)])
@pytest.mark.parametrize("share", [0.95, 0.7, 0.5, 0.3, 0.2])
def test_a_budget_is_kept_with_as_little_as_will_do(share: float, body: Body) -> None:
    modes = block_modes(parse_checkpointing(f"budget:{share}"), BASE, body)
    none: tuple[BlockMode, ...] = ("none",) * 12
    for read in (0.0, 0.01, 0.15, 0.5, 1.0):
        bound = share * kept_bytes(BASE, none, body, read_share=read)
        assert kept_bytes(BASE, modes, body, read_share=read) <= bound
    assert ("full" in modes) == (kept_share(BASE, ("selective",) * 12, body) > share)
    weaker = list(modes)
    last = max(
        i for i, mode in enumerate(modes) if mode == ("full" if "full" in modes else "selective")
    )
    weaker[last] = "selective" if "full" in modes else "none"
    assert kept_share(BASE, weaker, body) > share


@pytest.mark.parametrize(
    "text",
    [
        *("", "Full", "all", "full:2", "every", "every:", "every:0", "every:-1", "every:1.5"),
        *("budget", "budget:", "budget:0", "budget:1.01", "budget:nan", "budget:half", "none:1"),
    ],
)
def test_another_value_is_refused_with_the_forms_there_are(text: str) -> None:
    with pytest.raises(ValueError, match=r"every:N .* budget:X") as refused:
        parse_checkpointing(text)
    assert repr(text) in str(refused.value)


@pytest.mark.parametrize("text", ["full,every:2", "selective+budget:0.5"])
def test_two_modes_do_not_combine(text: str) -> None:
    with pytest.raises(ValueError, match="do not combine"):
        parse_checkpointing(text)


def test_what_cannot_be_had_names_what_can() -> None:
    with pytest.raises(ValueError, match=r"has 12 blocks.*at most every:12"):
        block_modes(parse_checkpointing("every:13"), BASE, FUSED)
    with pytest.raises(ValueError, match=r"give budget:(0\.\d+) or more") as refused:
        block_modes(parse_checkpointing("budget:0.01"), BASE, FUSED)
    advised = str(refused.value).rsplit("budget:", 1)[1].split()[0]
    assert set(block_modes(parse_checkpointing(f"budget:{advised}"), BASE, FUSED)) == {"full"}
