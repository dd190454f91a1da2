"""A head's norms equal torch's; what torch has not (one row, no row) is as written."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor, nn

from bertsmith.batch import LabelledBatch, pack
from bertsmith.model.config import EncoderConfig, HeadConfig, HeadNorm
from bertsmith.model.dropout import apply_dropout, dropout_at
from bertsmith.model.head_norm import EPS, BatchNorm, fold
from bertsmith.model.heads import HEAD_SITE, SequenceClassifier, initialize

WIDTH = 6
TINY = EncoderConfig(
    vocab_size=31,
    hidden_size=12,
    num_hidden_layers=1,
    num_attention_heads=3,
    intermediate_size=20,
    max_position_embeddings=16,
    initializer_range=0.5,
)


def rows(count: int, *, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(count, WIDTH, generator=generator) * 2.0 + 0.5


def pair_of_norms() -> tuple[BatchNorm, nn.BatchNorm1d]:
    """Ours and torch's, with the same weight and bias that are not those of the start."""
    ours, theirs = BatchNorm(WIDTH), nn.BatchNorm1d(WIDTH)
    with torch.no_grad():
        for norm in (ours, theirs):
            norm.weight.copy_(torch.linspace(0.5, 2.0, WIDTH))
            norm.bias.copy_(torch.linspace(-1.0, 1.0, WIDTH))
    return ours, theirs


def assert_same_statistics(ours: BatchNorm, theirs: nn.BatchNorm1d) -> None:
    assert theirs.running_mean is not None
    assert theirs.running_var is not None
    torch.testing.assert_close(ours.running_mean, theirs.running_mean, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(ours.running_var, theirs.running_var, rtol=1e-6, atol=1e-6)


def test_batch_norm_equals_torchs_over_several_batches_and_in_inference() -> None:
    ours, theirs = pair_of_norms()
    for step, count in enumerate((5, 2, 9)):
        x = rows(count, seed=step)
        inputs = [x.clone().requires_grad_(), x.clone().requires_grad_()]
        outputs = ours(inputs[0], is_training=True), theirs(inputs[1])
        torch.testing.assert_close(*outputs, rtol=1e-5, atol=1e-5)
        weights = rows(count, seed=100 + step)
        for output in outputs:
            (output * weights).sum().backward()
        torch.testing.assert_close(inputs[0].grad, inputs[1].grad, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(ours.weight.grad, theirs.weight.grad, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(ours.bias.grad, theirs.bias.grad, rtol=1e-5, atol=1e-5)
        assert_same_statistics(ours, theirs)
    theirs.eval()
    x = rows(3, seed=7)
    inputs = [x.clone().requires_grad_(), x.clone().requires_grad_()]
    outputs = ours(inputs[0], is_training=False), theirs(inputs[1])
    torch.testing.assert_close(*outputs, rtol=1e-6, atol=1e-6)
    for norm, output in zip((ours, theirs), outputs, strict=True):
        norm.zero_grad()
        output.square().sum().backward()
    torch.testing.assert_close(inputs[0].grad, inputs[1].grad, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(ours.weight.grad, theirs.weight.grad, rtol=1e-5, atol=1e-5)
    assert_same_statistics(ours, theirs)


def test_the_gradient_is_the_derivative() -> None:
    norm = pair_of_norms()[0].double()
    inputs = (rows(4).double().requires_grad_(), norm.weight, norm.bias)

    def normalise(x: Tensor, _weight: Tensor, _bias: Tensor) -> Tensor:
        return torch.tanh(norm(x, is_training=True))

    assert torch.autograd.gradcheck(normalise, inputs)


def test_the_argument_decides_on_training_and_not_the_modules_mode() -> None:
    for mode in (True, False):
        norm = BatchNorm(WIDTH).train(mode)
        norm(rows(4), is_training=False)
        assert norm.running_mean.equal(torch.zeros(WIDTH))
        assert norm.running_var.equal(torch.ones(WIDTH))
        trained = norm(rows(4), is_training=True)
        torch.testing.assert_close(trained.mean(0), torch.zeros(WIDTH), rtol=0.0, atol=1e-6)
        torch.testing.assert_close(norm.running_mean, 0.1 * rows(4).mean(0))


def test_a_gradient_of_inference_outlives_a_training_pass() -> None:
    norm = BatchNorm(WIDTH).double()
    x = rows(3).double().requires_grad_()
    output = norm(x, is_training=False)
    norm(rows(4, seed=1).double(), is_training=True)
    output.sum().backward()
    torch.testing.assert_close(x.grad, torch.full_like(x, (1.0 + EPS) ** -0.5))


def test_a_mean_far_above_the_spread_costs_no_digits() -> None:
    """fp32 sums of squares would lose all of a variance of 1e-4 beside a mean of 1e4."""
    x = (1e4 + rows(50).double() * 1e-2).float()
    expected = (x.double() - x.double().mean(0)) / (x.double().var(0, correction=0) + EPS).sqrt()
    actual = BatchNorm(WIDTH)(x, is_training=True)
    torch.testing.assert_close(actual.double(), expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("count", [0, 1])
def test_too_few_rows_for_a_variance_use_the_running_statistics_and_leave_them(count: int) -> None:
    norm, _ = pair_of_norms()
    norm(rows(8), is_training=True)
    mean_D, variance_D = norm.running_mean.clone(), norm.running_var.clone()
    x = rows(count, seed=1).requires_grad_()
    output = norm(x, is_training=True)
    scale_D = norm.weight / (variance_D + 1e-5).sqrt()
    torch.testing.assert_close(output, (x - mean_D) * scale_D + norm.bias)
    output.sum().backward()
    torch.testing.assert_close(x.grad, scale_D.detach().expand(count, WIDTH))
    torch.testing.assert_close(norm.bias.grad, torch.full((WIDTH,), float(count)))
    assert norm.running_mean.equal(mean_D)
    assert norm.running_var.equal(variance_D)


def test_bf16_rows_come_back_as_bf16_and_are_measured_exactly() -> None:
    norm, _ = pair_of_norms()
    x = rows(7).bfloat16()
    output = norm(x.requires_grad_(), is_training=True)
    output.sum().backward()
    assert (output.dtype, x.grad is not None and x.grad.dtype) == (torch.bfloat16, torch.bfloat16)
    assert norm.weight.grad is not None
    assert norm.weight.grad.dtype == torch.float32
    torch.testing.assert_close(norm.running_mean, (0.1 * x.detach().double().mean(0)).float())


def test_the_folded_classifier_gives_the_scores_of_norm_and_classifier() -> None:
    norm, _ = pair_of_norms()
    for step in range(5):
        norm(rows(8, seed=step), is_training=True)
    classifier = nn.Linear(WIDTH, 3)
    x = rows(9, seed=9)
    expected = classifier(norm(x, is_training=False))
    weight_CD, bias_C = fold(norm, classifier)
    assert weight_CD.dtype == torch.float64
    actual = nn.functional.linear(x, weight_CD.float(), bias_C.float())
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)


def test_the_pass_that_gpus_take_equals_this_one_where_no_other_rank_is() -> None:
    """`SyncBatchNorm` of one rank is torch's batch norm; what stands around it is tried here."""
    outputs, norms = [], []
    for kind in ("ours", "torch"):
        norm, _ = pair_of_norms()
        x = rows(5).requires_grad_()
        by_torch = kind == "torch"
        output = norm._by_sync_batch_norm(x) if by_torch else norm(x, is_training=True)
        (output * rows(5, seed=1)).sum().backward()
        outputs.append((output, x.grad, norm.weight.grad, norm.bias.grad))
        norms.append(norm)
    for ours, theirs in zip(*outputs, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)
    for name in ("running_mean", "running_var"):
        torch.testing.assert_close(getattr(norms[0], name), getattr(norms[1], name))


def test_a_norm_there_is_not_is_refused() -> None:
    with pytest.raises(ValueError, match="norm is 'group'; it must be one of none, batch, layer"):
        HeadConfig(norm="group")  # type: ignore[arg-type]


def classifier_with(norm: HeadNorm) -> SequenceClassifier:
    model = SequenceClassifier(TINY, num_labels=3, norm=norm)
    initialize(model, config=TINY, seed=0)
    if model.head_norm is not None:
        scale_D = torch.linspace(0.5, 2.0, TINY.hidden_size)
        model.head_norm.load_state_dict({"weight": scale_D}, strict=False)
    return model


def labelled(*lengths: int) -> LabelledBatch:
    generator = torch.Generator().manual_seed(sum(lengths))
    return LabelledBatch(
        inputs=pack([torch.randint(1, 31, (n,), generator=generator) for n in lengths]),
        labels_N=torch.arange(len(lengths)) % 3,
        rows_N=torch.arange(len(lengths)),
    )


@contextmanager
def recorded(module: nn.Module) -> Iterator[list[Tensor]]:
    """What a module gives, while the block runs."""
    seen: list[Tensor] = []
    handle = module.register_forward_hook(lambda _m, _i, output: seen.append(output.detach()))
    yield seen
    handle.remove()


@pytest.mark.parametrize("norm", ["none", "batch", "layer"])
def test_the_norm_stands_between_the_pooled_vector_and_dropout(norm: HeadNorm) -> None:
    model, batch = classifier_with(norm), labelled(4, 2, 7)
    with recorded(model.encoder) as hidden:
        actual = model.logits_NC(batch.inputs, dropout_seed=5)
    expected = torch.tanh(model.pooler(hidden[0][:3]))  # rows beyond repeat one of these
    reference: nn.Module = nn.Identity()
    if norm == "batch":
        reference = nn.BatchNorm1d(12)
    elif norm == "layer":
        reference = nn.LayerNorm(12, eps=1e-12)
    if norm != "none":
        reference.load_state_dict({"weight": torch.linspace(0.5, 2.0, 12)}, strict=False)
    drop = dropout_at(drop_prob=0.1, seed=5, site=HEAD_SITE)
    first_N = torch.tensor([0, 4, 6])
    expected = model.classifier(apply_dropout(reference(expected), drop, first_N))
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("mode", [True, False])
def test_a_dropout_seed_means_training_for_the_norm_too(mode: bool) -> None:
    model, batch = classifier_with("batch").train(mode), labelled(4, 2, 7)
    norm = model.head_norm
    assert isinstance(norm, BatchNorm)
    model.logits_NC(batch.inputs, dropout_seed=None)
    assert norm.running_var.equal(torch.ones(12))
    model(batch, dropout_seed=5)
    assert not norm.running_var.equal(torch.ones(12))


@pytest.mark.parametrize("norm", ["none", "batch", "layer"])
def test_a_filler_counts_for_nothing_and_still_has_gradients(norm: HeadNorm) -> None:
    model, batch = classifier_with(norm), labelled(4)
    filler = LabelledBatch(
        inputs=batch.inputs, labels_N=batch.labels_N, rows_N=torch.zeros(0, dtype=torch.int64)
    )
    before = {name: values.clone() for name, values in model.named_buffers()}
    loss = model(filler, dropout_seed=3)
    loss.nats.backward()
    assert (float(loss.nats.detach()), loss.num_targets, filler.num_targets) == (0.0, 0, 0)
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        assert not bool(parameter.grad.any()), name
    assert all(values.equal(before[name]) for name, values in model.named_buffers())


def test_new_norms_begin_as_torchs() -> None:
    model = SequenceClassifier(TINY, num_labels=3, norm="batch")
    assert isinstance(model.head_norm, BatchNorm)
    model.head_norm(torch.randn(4, 12), is_training=True)
    with torch.no_grad():
        model.head_norm.weight.fill_(3.0)
    initialize(model, config=TINY, seed=0)
    fresh = nn.BatchNorm1d(12).state_dict()
    assert all(v.equal(fresh[name]) for name, v in model.head_norm.state_dict().items())
