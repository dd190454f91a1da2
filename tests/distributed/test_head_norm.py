"""Synchronised batch norm: two processes equal one on the joined batch, however rows lie."""

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from bertsmith.batch import LabelledBatch, pack
from bertsmith.model.config import EncoderConfig
from bertsmith.model.head_norm import BatchNorm, synchronized
from bertsmith.model.heads import SequenceClassifier, initialize
from bertsmith.parallel.world import World
from ranks import run_ranks

COUNTS = [(5, 3), (7, 1), (8, 0), (0, 2), (1, 1), (1, 0), (0, 1)]
"""Rows of each rank; the last two have no variance to measure."""

WIDTH = 16
LENGTHS = ([(4, 9, 2), (7,)], [(3, 5), (6, 2, 8)], [(4, 3), ()], [(5,), (9,)])
"""Tokens of each rank's sequences, step by step; () is a filler's turn."""

TINY = EncoderConfig(
    vocab_size=31,
    hidden_size=WIDTH,
    num_hidden_layers=2,
    num_attention_heads=4,
    intermediate_size=24,
    max_position_embeddings=16,
    initializer_range=0.3,
)


# What the ranks run, and the one process that is their reference


def make_norm(dtype: torch.dtype) -> BatchNorm:
    norm = BatchNorm(WIDTH).to(dtype)
    with torch.no_grad():
        norm.weight.copy_(torch.linspace(0.5, 2.0, WIDTH))
        norm.bias.copy_(torch.linspace(-1.0, 1.0, WIDTH))
        norm.running_mean.fill_(0.25)
        norm.running_var.fill_(3.0)
    return norm


def rows_of(case: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """The joined rows of a case, and what their outputs are multiplied with in the loss."""
    generator = torch.Generator().manual_seed(case)
    count = sum(COUNTS[case])
    rows_ND = torch.randn(count, WIDTH, generator=generator, dtype=torch.float64) * 2.0 + 0.5
    weights_ND = torch.randn(count, WIDTH, generator=generator, dtype=torch.float64)
    return rows_ND.to(dtype), weights_ND.to(dtype)


def part_of(rank: int, case: int, dtype: torch.dtype) -> list[Tensor]:
    """The share of a rank in `rows_of`."""
    start, count = sum(COUNTS[case][:rank]), COUNTS[case][rank]
    return [values[start : start + count] for values in rows_of(case, dtype)]


def pass_of(norm: BatchNorm, rows_ND: Tensor, weights_ND: Tensor) -> dict[str, Tensor]:
    """Output and gradients of one training pass, whose loss is no sum of equal parts."""
    rows_ND = rows_ND.clone().requires_grad_()
    output_ND = norm(rows_ND, is_training=True)
    (torch.tanh(output_ND) * weights_ND).sum().backward()  # type: ignore[no-untyped-call]
    assert rows_ND.grad is not None
    assert norm.weight.grad is not None
    assert norm.bias.grad is not None
    return {
        "output": output_ND.detach(),
        "grad": rows_ND.grad,
        "weight_grad": norm.weight.grad,
        "bias_grad": norm.bias.grad,
        "running_mean": norm.running_mean,
        "running_var": norm.running_var,
    }


def norms_of_a_rank(world: World) -> list[dict[str, Tensor]]:
    """Every case twice, fp32 and float64."""
    group = dist.new_group()
    passes = []
    for dtype in (torch.float32, torch.float64):
        for case in range(len(COUNTS)):
            norm = make_norm(dtype)
            assert synchronized(norm, group) is norm
            passes.append(pass_of(norm, *part_of(world.rank, case, dtype)))
    return passes


def make_classifier() -> SequenceClassifier:
    model = SequenceClassifier(TINY, num_labels=3, norm="batch")
    initialize(model, config=TINY, seed=1)
    return model.double()


def pack_of(step: int, ranks: tuple[int, ...]) -> LabelledBatch:
    """The sequences of some ranks as one pack; the filler where there are none.

    A rank's tokens follow those of the rank before it, so dropout is the same in one pack.
    """
    generator = torch.Generator().manual_seed(step)
    sequences, labels, first_row = [], [], 0
    for rank, lengths in enumerate(LENGTHS[step]):
        for length in lengths:
            ids = torch.randint(1, 31, (length,), generator=generator)
            if rank in ranks:
                sequences.append(ids)
                labels.append(int(ids[-1]) % 3)
        if rank < min(ranks):
            first_row += sum(lengths)
    inputs = pack(sequences or [torch.tensor([2, 3])])
    return LabelledBatch(
        inputs=replace(inputs, first_row=first_row),
        labels_N=torch.tensor(labels or [0]),
        rows_N=torch.arange(len(sequences)),
    )


def train_classifier(ranks: tuple[int, ...], group: dist.ProcessGroup | None) -> dict[str, Tensor]:
    """Plain gradient descent on the mean loss of all ranks' sequences; the model at the end."""
    model = make_classifier()
    synchronized(model, group)
    last: dict[str, Tensor] = {}
    for step in range(len(LENGTHS)):
        num_targets = sum(map(len, LENGTHS[step]))
        loss = model(pack_of(step, ranks), dropout_seed=step)
        (loss.nats / num_targets).backward()
        for name, parameter in model.named_parameters():
            assert parameter.grad is not None, name
            if group is not None:
                dist.all_reduce(parameter.grad)
            last[f"grad of {name}"] = parameter.grad.clone()
            with torch.no_grad():
                parameter.sub_(0.2 * parameter.grad)
        model.zero_grad()
    model.eval()
    batch = pack_of(0, (0, 1))
    return {
        **model.state_dict(),
        **last,
        "scores": model.logits_NC(batch.inputs, dropout_seed=None),
    }


def classifier_of_a_rank(world: World) -> dict[str, Tensor]:
    group = dist.new_group()
    return {
        name: values.detach() for name, values in train_classifier((world.rank,), group).items()
    }


def norm_of_a_gpu_rank(world: World) -> list[dict[str, Tensor]]:
    """Both ranks on one GPU, which gloo allows and NCCL does not."""
    passes = []
    for case in range(len(COUNTS)):
        norm = make_norm(torch.float32).cuda()
        synchronized(norm, dist.group.WORLD)
        parts = [values.cuda() for values in part_of(world.rank, case, torch.float32)]
        passes.append({name: values.cpu() for name, values in pass_of(norm, *parts).items()})
    return passes


# The tests


@pytest.fixture(scope="module")
def norms() -> list[list[dict[str, Tensor]]]:
    return run_ranks(norms_of_a_rank)


def assert_ranks_equal_one(
    one: dict[str, Tensor], ranks: list[dict[str, Tensor]], *, bound: float
) -> None:
    for name in ("output", "grad"):
        joined = torch.cat([answer[name] for answer in ranks])
        torch.testing.assert_close(joined, one[name], rtol=bound, atol=bound)
    for name in ("weight_grad", "bias_grad"):
        total = sum(answer[name] for answer in ranks)
        torch.testing.assert_close(total, one[name], rtol=bound, atol=bound)
    for name in ("running_mean", "running_var"):
        for answer in ranks:
            torch.testing.assert_close(answer[name], one[name], rtol=bound, atol=bound)
            assert answer[name].equal(ranks[0][name]), "ranks must not drift apart"


@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 1e-6), (torch.float64, 1e-13)])
@pytest.mark.parametrize("case", range(len(COUNTS)), ids=map(str, COUNTS))
def test_two_processes_equal_one_on_the_joined_rows(
    norms: list[list[dict[str, Tensor]]], case: int, dtype: torch.dtype, bound: float
) -> None:
    place = case + (len(COUNTS) if dtype == torch.float64 else 0)
    one = pass_of(make_norm(dtype), *rows_of(case, dtype))
    assert_ranks_equal_one(one, [answers[place] for answers in norms], bound=bound)


def test_two_processes_train_the_classifier_that_one_trains() -> None:
    """Four steps with dropout: uneven packs, a filler, one sequence on each rank.

    In float64: a pack of two sequences makes their values +1 and -1, and fp32 rounding large. The
    softmax is in fp32 all the same, and rounds by how threads share it out: one thread, as in the
    ranks.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    one = train_classifier((0, 1), None)
    torch.set_num_threads(threads)
    for answer in run_ranks(classifier_of_a_rank):
        assert set(answer) == set(one)
        for name, values in answer.items():
            expected = one[name].detach()
            assert torch.allclose(values, expected, rtol=1e-10, atol=1e-10), name


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_two_processes_on_a_gpu_equal_one_process_here() -> None:
    answers = run_ranks(norm_of_a_gpu_rank)
    for case in range(len(COUNTS)):
        one = pass_of(make_norm(torch.float32), *rows_of(case, torch.float32))
        assert_ranks_equal_one(one, [answer[case] for answer in answers], bound=1e-5)
