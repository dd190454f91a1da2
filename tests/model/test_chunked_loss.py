"""A loss in chunks is the loss in one piece, and its logits never exist at once."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from bertsmith.batch import MaskedBatch, pack
from bertsmith.model import config as config_module
from bertsmith.model.chunked_loss import NO_TARGET, chunked_loss, row_slices
from bertsmith.model.config import EncoderConfig, logits_rows
from bertsmith.model.heads import MaskedLM, initialize
from bertsmith.model.kernels import build
from live_tensors import counted

V, D, M = 101, 24, 23
ROWS_AT_ONCE = 5

needs_kernels = pytest.mark.skipif(build.load("fp32") is None, reason="no C kernels here")
BODIES = [pytest.param(True, id="kernels", marks=needs_kernels), pytest.param(False, id="plain")]


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(config_module, "LOGITS_BYTES", 4 * V * ROWS_AT_ONCE)


def leaves() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    hidden_MD = torch.randn(M, D, generator=generator)
    table_VD, bias_V = torch.randn(V, D, generator=generator), torch.randn(V, generator=generator)
    targets_M = torch.randint(V, (M,), generator=generator)
    targets_M[[4, M - 2, M - 1]] = NO_TARGET
    for leaf in (hidden_MD, table_VD, bias_V):
        leaf.requires_grad_()
    return hidden_MD, table_VD, bias_V, targets_M


def reference(scale: float) -> tuple[float, list[Tensor]]:
    """torch's own cross-entropy, in float64."""
    *parts, targets_M = leaves()
    wide = [part.detach().double().requires_grad_() for part in parts]
    nats = F.cross_entropy(F.linear(*wide), targets_M, ignore_index=NO_TARGET, reduction="sum")
    (nats * scale).backward()  # type: ignore[no-untyped-call]
    return float(nats.detach()), [part.grad for part in wide if part.grad is not None]


@pytest.mark.parametrize("kernels", BODIES)
def test_loss_and_gradients_are_those_of_one_piece_to_fp32_rounding(
    kernels: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not kernels:
        monkeypatch.setattr(build, "load", lambda storage: None)
    assert logits_rows(V) == ROWS_AT_ONCE
    hidden_MD, table_VD, bias_V, targets_M = leaves()
    parts = (hidden_MD, table_VD, bias_V)
    nats = chunked_loss(hidden_MD, table_VD, bias_V, targets_M)
    (nats * 0.37).backward()  # type: ignore[no-untyped-call]
    expected_nats, expected = reference(0.37)
    assert float(nats.detach()) == pytest.approx(expected_nats, rel=1e-6)
    for mine, theirs in zip(parts, expected, strict=True):
        assert mine.grad is not None
        assert mine.grad.dtype == torch.float32
        scale = float(theirs.abs().max())
        assert float((mine.grad.double() - theirs).abs().max()) < 2e-6 * scale


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_16_bit_gradients_stay_within_its_rounding(dtype: torch.dtype) -> None:
    """8 bits of mantissa in bf16, 11 in fp16; twice rounded."""
    hidden_MD, table_VD, bias_V, targets_M = leaves()
    parts = (hidden_MD, table_VD, bias_V)
    with torch.autocast("cpu", dtype):
        nats = chunked_loss(hidden_MD, table_VD, bias_V, targets_M)
    (nats * 0.37).backward()  # type: ignore[no-untyped-call]
    expected_nats, expected = reference(0.37)
    share = {torch.bfloat16: 2e-2, torch.float16: 2e-3}[dtype]
    assert float(nats.detach()) == pytest.approx(expected_nats, rel=share)
    for mine, theirs in zip(parts, expected, strict=True):
        assert mine.grad is not None
        assert float((mine.grad.double() - theirs).norm() / theirs.norm()) < share


def test_an_fp16_gradient_is_scaled_before_it_is_rounded() -> None:
    """A softmax over equal scores with a share of 1e-9 is below fp16's least, 6e-8."""
    width = 8
    hidden_MD = torch.ones(2 * ROWS_AT_ONCE, width, requires_grad=True)
    table_VD = torch.zeros(V, width)
    table_VD[0] = 20.7 / width  # the others' chances are e^-20.7 = 1e-9
    table_VD.requires_grad_()
    targets_M = torch.zeros(2 * ROWS_AT_ONCE, dtype=torch.int64)
    with torch.autocast("cpu", torch.float16):
        nats = chunked_loss(hidden_MD, table_VD, torch.zeros(V), targets_M)
    (nats * 2.0**16).backward()  # type: ignore[no-untyped-call]
    assert table_VD.grad is not None
    found = table_VD.grad[1:] / 2.0**16
    torch.testing.assert_close(found, torch.full_like(found, 1e-8), rtol=0.1, atol=0.0)


def test_an_fp16_overflow_reaches_the_gradient() -> None:
    """What makes the scaler back off."""
    hidden_MD, table_VD, bias_V, targets_M = leaves()
    with torch.autocast("cpu", torch.float16):
        nats = chunked_loss(hidden_MD, table_VD, bias_V, targets_M)
    (nats * 2.0**24).backward()  # type: ignore[no-untyped-call]
    assert table_VD.grad is not None
    assert not bool(table_VD.grad.isfinite().all())


def test_frozen_parts_get_no_gradient_and_inference_makes_none() -> None:
    hidden_MD, table_VD, bias_V, targets_M = leaves()
    table_VD.requires_grad_(False)
    chunked_loss(hidden_MD, table_VD, bias_V, targets_M).backward()  # type: ignore[no-untyped-call]
    _, expected = reference(1.0)
    assert table_VD.grad is None
    assert hidden_MD.grad is not None
    torch.testing.assert_close(hidden_MD.grad.double(), expected[0], rtol=1e-5, atol=1e-5)
    with torch.no_grad():
        nats = chunked_loss(hidden_MD, table_VD, bias_V, targets_M)
    assert nats.grad_fn is None


@pytest.mark.parametrize(("count", "sizes"), [(0, [0]), (4, [4]), (5, [5]), (11, [5, 5, 1])])
def test_slices_cover_every_row_once(count: int, sizes: list[int]) -> None:
    slices = list(row_slices(count, 5))
    assert [at.stop - at.start for at in slices] == sizes
    assert torch.cat([torch.arange(count)[at] for at in slices]).tolist() == list(range(count))


def _batch(config: EncoderConfig, num_targets: int) -> MaskedBatch:
    generator = torch.Generator().manual_seed(3)
    inputs = pack([torch.randint(5, 100, (30,), generator=generator) for _ in range(4)])
    return MaskedBatch(
        inputs=inputs,
        positions_M=torch.arange(num_targets),
        targets_M=torch.randint(V, (num_targets,), generator=generator),
    )


@pytest.mark.parametrize("kernels", BODIES)
def test_a_model_takes_chunks_where_one_piece_is_too_large(
    kernels: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same loss and gradients, and the same scores, from a limit that is not reached."""
    if not kernels:
        monkeypatch.setattr(build, "load", lambda storage: None)
    shape = EncoderConfig(
        vocab_size=V,
        hidden_size=D,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=32,
        max_position_embeddings=32,
    )
    found = []
    for limit in (config_module.LOGITS_BYTES, 1 << 30):
        monkeypatch.setattr(config_module, "LOGITS_BYTES", limit)
        model = MaskedLM(shape)
        initialize(model, config=shape, seed=0)
        loss = model(_batch(shape, 40), dropout_seed=5)
        (loss.nats / loss.num_targets).backward()
        scores = model.nats_and_right_M(_batch(shape, 40))
        found.append((loss.nats.detach(), [p.grad for p in model.parameters()], scores))
    (nats, gradients, scores), (whole_nats, whole_gradients, whole_scores) = found
    torch.testing.assert_close(nats, whole_nats, rtol=1e-6, atol=0.0)
    torch.testing.assert_close(scores, whole_scores, rtol=1e-6, atol=0.0)
    for mine, theirs in zip(gradients, whole_gradients, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("kernels", BODIES)
def test_live_bytes_do_not_grow_with_the_logits(
    kernels: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """2,000 rows of 5,000 logits take 40 MB; chunks of 100 rows take 2 MB each."""
    if not kernels:
        monkeypatch.setattr(build, "load", lambda storage: None)
    monkeypatch.setattr(config_module, "LOGITS_BYTES", 4 * 5000 * 100)
    hidden_MD = torch.randn(2000, 8, requires_grad=True)
    table_VD, bias_V = torch.randn(5000, 8, requires_grad=True), torch.zeros(5000)
    targets_M = torch.randint(5000, (2000,))
    with counted() as found:
        chunked_loss(hidden_MD, table_VD, bias_V, targets_M).backward()  # type: ignore[no-untyped-call]
    assert 2_000_000 <= found.peak_bytes < 3_000_000
