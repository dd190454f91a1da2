"""A pack in parts is the same pack: every token, target and dropout row once, in order."""

from dataclasses import replace

import torch
from hypothesis import given
from hypothesis import strategies as st

from bertsmith.batch import LabelledBatch, MaskedBatch, pack

LENGTHS = st.lists(st.integers(1, 12), min_size=1, max_size=9)


def masked(lengths: list[int], *, targets: int) -> MaskedBatch:
    inputs = pack([torch.arange(n) + 10 * i for i, n in enumerate(lengths)])
    total = sum(lengths)
    positions_M = torch.randperm(total, generator=torch.Generator().manual_seed(total))[:targets]
    return MaskedBatch(
        inputs=replace(inputs, first_row=1000),
        positions_M=positions_M.sort().values,
        targets_M=torch.arange(len(positions_M)),
    )


@given(LENGTHS, st.integers(1, 40), st.integers(0, 20))
def test_parts_of_a_masked_pack_are_the_pack(
    lengths: list[int], max_tokens: int, targets: int
) -> None:
    whole = masked(lengths, targets=targets)
    parts = whole.cut(max_tokens)
    rows, positions, labels = [], [], []
    for part in parts:
        inputs = part.inputs
        assert part.num_tokens <= max(max_tokens, *lengths)
        assert part.num_tokens <= max_tokens or inputs.num_sequences == 1
        assert inputs.longest == int(inputs.starts_N1.diff().max())
        assert int(inputs.starts_N1[0]) == 0
        assert int(inputs.starts_N1[-1]) == part.num_tokens
        rows += [inputs.first_row + i for i in range(part.num_tokens)]
        positions += (part.positions_M + inputs.first_row - 1000).tolist()
        labels += part.targets_M.tolist()
    assert rows == list(range(1000, 1000 + sum(lengths)))
    assert positions == whole.positions_M.tolist()
    assert labels == whole.targets_M.tolist()
    for name in ("input_ids_T", "position_ids_T", "segment_ids_T"):
        joined = torch.cat([getattr(part.inputs, name) for part in parts])
        assert torch.equal(joined, getattr(whole.inputs, name)), name


@given(LENGTHS, st.integers(1, 40), st.booleans())
def test_parts_of_a_labelled_pack_are_the_pack(
    lengths: list[int], max_tokens: int, is_filler: bool
) -> None:
    count = 0 if is_filler else len(lengths)
    whole = LabelledBatch(
        inputs=pack([torch.arange(n) for n in lengths]),
        labels_N=torch.arange(len(lengths)),
        rows_N=torch.arange(count) + 50,
    )
    parts = whole.cut(max_tokens)
    assert torch.cat([part.labels_N for part in parts]).tolist() == list(range(len(lengths)))
    assert torch.cat([part.rows_N for part in parts]).tolist() == list(range(50, 50 + count))
    assert all(len(part.labels_N) == part.inputs.num_sequences for part in parts)


def test_a_pack_that_fits_is_not_copied() -> None:
    whole = masked([3, 4], targets=2)
    assert whole.cut(7) == [whole]
    assert len(whole.cut(6)) == 2


def test_a_filler_is_computed_and_counts_for_nothing() -> None:
    filler = masked([3, 4], targets=5).filler()
    assert (filler.num_tokens, filler.num_targets) == (3, 0)
