"""The C kernels compute what the plain path computes: values, every gradient, and dropout."""

import os
import subprocess
import sys
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from bertsmith.batch import LabelledBatch, MaskedBatch, pack
from bertsmith.model.config import EncoderConfig
from bertsmith.model.heads import MaskedLM, SequenceClassifier, initialize
from bertsmith.model.kernels import build

pytestmark = pytest.mark.skipif(
    build.load("fp32") is None, reason="no C compiler, so there are no kernels to test"
)

SHAPE = EncoderConfig(
    vocab_size=97,
    hidden_size=40,
    num_hidden_layers=2,
    num_attention_heads=2,
    intermediate_size=72,
    max_position_embeddings=64,
    hidden_dropout_prob=0.2,
    attention_probs_dropout_prob=0.3,
)
LENGTHS = (50, 31, 17, 16, 2, 1)


def batch() -> MaskedBatch:
    generator = torch.Generator().manual_seed(0)
    sequences = [torch.randint(5, SHAPE.vocab_size, (n,), generator=generator) for n in LENGTHS]
    inputs = pack(sequences, segments=[torch.arange(n) % 2 for n in LENGTHS])
    positions_M = torch.tensor([0, 1, 30, 55, 80, 116])
    return MaskedBatch(inputs=inputs, positions_M=positions_M, targets_M=(positions_M * 3) % 97)


def new_model(shape: EncoderConfig) -> MaskedLM:
    """Random everywhere, norms and biases too, so that no gradient is 0 by chance."""
    model = MaskedLM(shape)
    initialize(model, config=shape, seed=1)
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=0.1)
    return model


def loss_and_gradients(
    shape: EncoderConfig, *, seed: int | None, dtype: torch.dtype
) -> tuple[float, dict[str, Tensor]]:
    model = new_model(shape)
    with torch.autocast("cpu", dtype, enabled=dtype != torch.float32):
        loss = model(batch(), dropout_seed=seed)
    (loss.nats / loss.num_targets).backward()
    gradients = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    assert len(gradients) == len(list(model.parameters()))
    return float(loss.nats.detach()), gradients


@pytest.mark.parametrize("activation", ["gelu", "gelu_new", "relu"])
@pytest.mark.parametrize("seed", [None, 9])
def test_loss_and_all_gradients_are_those_of_plain_torch_in_fp32(
    activation: str, seed: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    shape = replace(SHAPE, hidden_act=activation)  # type: ignore[arg-type]
    loss, gradients = loss_and_gradients(shape, seed=seed, dtype=torch.float32)
    monkeypatch.setattr(build, "load", lambda storage: None)
    plain_loss, plain = loss_and_gradients(shape, seed=seed, dtype=torch.float32)
    assert loss == pytest.approx(plain_loss, rel=1e-6)
    for name, expected in plain.items():
        scale = float(expected.abs().max())
        worst = float((gradients[name] - expected).abs().max())
        assert worst <= 1e-5 * scale, f"{name}: off by {worst:.1e} at a scale of {scale:.1e}"


@pytest.mark.parametrize("seed", [None, 9])
def test_bf16_gradients_stay_within_its_rounding_of_plain_fp32(
    seed: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    loss, gradients = loss_and_gradients(SHAPE, seed=seed, dtype=torch.bfloat16)
    monkeypatch.setattr(build, "load", lambda storage: None)
    plain_loss, plain = loss_and_gradients(SHAPE, seed=seed, dtype=torch.float32)
    assert loss == pytest.approx(plain_loss, rel=1e-2)
    for name, expected in plain.items():
        if name.endswith("qkv.bias"):  # the key's share is 0 but for rounding: nothing to compare
            continue
        share = float((gradients[name] - expected).norm() / expected.norm())
        assert share < 3e-2, name


def test_dropout_of_the_kernels_drops_what_plain_torch_drops_and_follows_the_seed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    losses = [loss_and_gradients(SHAPE, seed=s, dtype=torch.float32)[0] for s in (1, 2, 1)]
    assert losses[0] == losses[2]
    assert losses[0] != losses[1]
    monkeypatch.setattr(build, "load", lambda storage: None)
    again = [loss_and_gradients(SHAPE, seed=s, dtype=torch.float32)[0] for s in (1, 2)]
    assert again == pytest.approx(losses[:2], rel=1e-6)


@pytest.mark.skipif(os.environ.get("OMP_NUM_THREADS") == "2", reason="this is the inner run")
def test_all_of_this_holds_on_two_threads() -> None:
    """`make test` gives each of its processes one thread; the kernels share work among threads."""
    inner = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:xdist", "-p", "no:cacheprovider", __file__],
        env=os.environ | {"OMP_NUM_THREADS": "2"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert inner.returncode == 0, inner.stdout


def test_frozen_parameters_get_no_gradient_and_change_no_other() -> None:
    def classifier() -> SequenceClassifier:
        model = SequenceClassifier(SHAPE, num_labels=3)
        initialize(model, config=SHAPE, seed=1)
        return model

    inputs = batch().inputs
    labelled = LabelledBatch(
        inputs=inputs,
        labels_N=torch.arange(len(LENGTHS)) % 3,
        rows_N=torch.arange(len(LENGTHS)),
    )
    whole, partly = classifier(), classifier()
    frozen = [p for n, p in partly.named_parameters() if "embeddings" in n or "blocks.0" in n]
    for parameter in frozen:
        parameter.requires_grad_(False)
    for model in (whole, partly):
        model(labelled, dropout_seed=4).nats.backward()
    assert all(p.grad is None for p in frozen)
    for (name, a), b in zip(whole.named_parameters(), partly.parameters(), strict=True):
        if b.requires_grad:
            assert a.grad is not None, name
            assert b.grad is not None, name
            torch.testing.assert_close(b.grad, a.grad, rtol=1e-6, atol=1e-8)


def test_a_compiler_that_fails_leaves_the_plain_path_and_a_reason(
    monkeypatch: pytest.MonkeyPatch, tmp_path: pytest.TempPathFactory
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    for broken, reason in (("false", "refused"), ("no-such-compiler", "no C compiler")):
        monkeypatch.setenv("CC", broken)
        build._open.cache_clear()
        build.load.cache_clear()
        try:
            assert build.load("fp32") is None
            assert reason in build.status()
        finally:
            build._open.cache_clear()
            build.load.cache_clear()


NO_MEMORY_FOR_A_KERNEL = """
import resource
import torch
from bertsmith.model.kernels import build, calls

lib = build.load("fp32")
wide = 1 << 24
logits_MV, bias_V = torch.zeros(1, wide), torch.zeros(wide)
targets_M = torch.zeros(1, dtype=torch.int64)
calls.cross_entropy(lib, logits_MV[:, :8].contiguous(), bias_V[:8], targets_M)  # starts threads
with open("/proc/self/statm") as file:
    mapped_bytes = int(file.read().split()[0]) * resource.getpagesize()
room = mapped_bytes + 5 * wide  # for what torch allocates, not for what the kernel does besides
resource.setrlimit(resource.RLIMIT_AS, (room, room))
try:
    calls.cross_entropy(lib, logits_MV, bias_V, targets_M)
except MemoryError as error:
    print(f"refused: {error}")
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="RLIMIT_AS binds on Linux")
def test_a_kernel_without_memory_for_its_work_raises_and_touches_nothing() -> None:
    done = subprocess.run(
        [sys.executable, "-c", NO_MEMORY_FOR_A_KERNEL], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == "refused: a kernel has no memory for its work\n"
