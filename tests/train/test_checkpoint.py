"""A checkpoint is whole or absent, damage is noticed before use, and what is kept is kept."""

import errno
import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors import SafetensorError

from bertsmith.batch import MaskedBatch
from bertsmith.errors import UserError
from bertsmith.model.heads import MaskedLM
from bertsmith.train import checkpoint as module
from bertsmith.train.checkpoint import (
    RunState,
    keep_newest,
    load_moments,
    newest_checkpoint,
    read_state,
    save_checkpoint,
)
from bertsmith.train.config import OptimConfig
from bertsmith.train.optim import AdamW

NewRun = Callable[[OptimConfig], tuple[MaskedLM, AdamW]]


def write_model(folder: Path) -> None:
    """Stands for the Hugging Face files."""
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(bytes(range(256)) * 4)


def save(folder: Path, optimizer: AdamW, step: int) -> Path:
    return save_checkpoint(
        folder,
        state=RunState(step=step, updates=step, tokens=step * 10),
        moments=list(optimizer.named_moments()),
        write_model=write_model,
        fingerprints={"data": "d", "config": "c"},
    )


def test_state_and_moments_come_back_exactly(tmp_path: Path, new_run: NewRun) -> None:
    _, optimizer = new_run(OptimConfig())
    for number, (_, moment) in enumerate(optimizer.named_moments()):
        moment.normal_(generator=torch.Generator().manual_seed(number))
    path = save(tmp_path, optimizer, 7)
    _, other = new_run(OptimConfig())
    load_moments(path, other, updates=7)
    assert other.updates == 7
    for (_, a), (_, b) in zip(optimizer.named_moments(), other.named_moments(), strict=True):
        assert torch.equal(a, b)
    assert read_state(path) == (
        RunState(step=7, updates=7, tokens=70),
        {"data": "d", "config": "c"},
    )


def test_every_flipped_bit_and_cut_is_noticed_and_the_one_before_is_taken(
    tmp_path: Path, new_run: NewRun
) -> None:
    """150 bits over all files, then each file cut to nothing, half, and one byte less."""
    _, optimizer = new_run(OptimConfig())
    good, bad = save(tmp_path, optimizer, 1), save(tmp_path, optimizer, 2)
    files = sorted(bad.iterdir())
    rng = np.random.default_rng(0)
    damages: list[tuple[Path, bytes]] = []
    for file in [files[i] for i in rng.integers(0, len(files), 150)]:
        content = bytearray(file.read_bytes())
        bit = int(rng.integers(0, 8 * len(content)))
        content[bit // 8] ^= 1 << (bit % 8)
        damages.append((file, bytes(content)))
    for file in files:
        content_whole = file.read_bytes()
        damages += [
            (file, content_whole[:size])
            for size in (0, len(content_whole) // 2, len(content_whole) - 1)
        ]
    unnoticed = 0
    for file, damaged in damages:
        whole = file.read_bytes()
        file.write_bytes(damaged)
        said: list[str] = []
        found = newest_checkpoint(tmp_path, said.append)
        if found == bad:  # only white space of the manifest may change without consequence
            assert file.name == module.MANIFEST
            assert json.loads(damaged) == json.loads(whole)
            unnoticed += 1
        else:
            assert found == good
            assert len(said) == 1
            assert str(bad) in said[0]
        file.write_bytes(whole)
    assert unnoticed <= 3
    assert newest_checkpoint(tmp_path, pytest.fail) == bad


def test_a_missing_file_is_named(tmp_path: Path, new_run: NewRun) -> None:
    _, optimizer = new_run(OptimConfig())
    path = save(tmp_path, optimizer, 3)
    (path / module.MOMENTS).unlink()
    said: list[str] = []
    assert newest_checkpoint(tmp_path, said.append) is None
    assert f"{module.MOMENTS} is missing" in said[0]


def test_a_full_disk_leaves_the_last_one_and_nothing_half(
    tmp_path: Path, new_run: NewRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, optimizer = new_run(OptimConfig())
    good = save(tmp_path, optimizer, 1)

    def fail(path: Path) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(module, "flush", fail)
    with pytest.raises(UserError, match=r"step-2.*No space left.*earlier ones are untouched"):
        save(tmp_path, optimizer, 2)
    assert [p.name for p in tmp_path.iterdir()] == ["step-1"]
    assert newest_checkpoint(tmp_path, pytest.fail) == good


def test_the_newest_and_the_best_are_kept_by_number_not_by_time(
    tmp_path: Path, new_run: NewRun
) -> None:
    _, optimizer = new_run(OptimConfig())
    for step in (100, 9, 20, 3):  # written out of order
        save(tmp_path, optimizer, step)
    (tmp_path / "step-notes").mkdir()
    keep_newest(tmp_path, step=100, keep_last=2, best_step=3)
    assert sorted(p.name for p in tmp_path.iterdir()) == [
        "step-100",
        "step-20",
        "step-3",
        "step-notes",
    ]


def test_another_model_is_refused(
    tmp_path: Path, new_run: NewRun, make_masked_pack: Callable[..., MaskedBatch]
) -> None:
    model, optimizer = new_run(OptimConfig())
    path = save(tmp_path, optimizer, 1)
    model.bias = torch.nn.Parameter(torch.zeros(51))
    from bertsmith.train.optim import group_parameters

    other = AdamW(group_parameters(model, OptimConfig()), OptimConfig())
    with pytest.raises(UserError, match="does not fit this model"):
        load_moments(path, other, updates=1)


def test_damaged_checkpoints_that_were_passed_over_do_not_push_good_ones_out(
    tmp_path: Path, new_run: NewRun
) -> None:
    _, optimizer = new_run(OptimConfig())
    for step in (100, 200, 150):  # 200 was found damaged, the run went back to 100
        save(tmp_path, optimizer, step)
    keep_newest(tmp_path, step=150, keep_last=1, best_step=None)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step-150", "step-200"]


def test_what_a_process_killed_while_saving_left_is_swept(tmp_path: Path, new_run: NewRun) -> None:
    _, optimizer = new_run(OptimConfig())
    (tmp_path / ".tmp-step-7-12345").mkdir()
    (tmp_path / ".tmp-step-7-12345" / "model.safetensors").write_bytes(b"half")
    save(tmp_path, optimizer, 8)
    assert [p.name for p in tmp_path.iterdir()] == ["step-8"]


def test_a_disk_that_fills_while_moments_are_written_is_a_users_error(
    tmp_path: Path, new_run: NewRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, optimizer = new_run(OptimConfig())

    def fail(*args: object, **kwargs: object) -> None:
        raise SafetensorError("I/O error: No space left on device (os error 28)")

    monkeypatch.setattr("bertsmith.hf.weights.save_file", fail)
    with pytest.raises(UserError, match="No space left"):
        save(tmp_path, optimizer, 2)
    assert list(tmp_path.iterdir()) == []
