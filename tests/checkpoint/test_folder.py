"""A checkpoint is whole or absent, damage is noticed before use, and what is kept is kept."""

import errno
import io
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from bertsmith.checkpoint.folder import (
    MOMENTS,
    load_moments,
    newest_checkpoint,
    read_state,
    retain,
)
from bertsmith.checkpoint.manifest import MANIFEST, OtherSchemaError, render
from bertsmith.checkpoint.state import RunState
from bertsmith.errors import UserError
from bertsmith.hf.weights import write_weights
from bertsmith.parallel.kept_rows import TrainedRows
from bertsmith.train.config import OptimConfig
from bertsmith.train.optim import AdamW, group_parameters
from checkpoint.conftest import IDENTITY, Save


def names_in(folder: Path) -> list[str]:
    return sorted(p.name for p in folder.iterdir())


def test_state_and_moments_come_back_exactly(tmp_path: Path, optimizer: AdamW, save: Save) -> None:
    path = save(tmp_path, 7)
    model = nn.Linear(7, 3)
    other = AdamW(group_parameters(model, OptimConfig()), OptimConfig())
    load_moments(path, other.named_moments())
    for (_, a), (_, b) in zip(optimizer.named_moments(), other.named_moments(), strict=True):
        assert torch.equal(a, b)
    assert read_state(path) == (RunState(step=7, updates=7, tokens=70), IDENTITY)


def test_every_field_of_the_state_survives_json() -> None:
    state = RunState(step=3, skipped=(1, 2), recent_losses=(0.1, 1 / 3), owes_evaluation=True)
    assert RunState.from_json(json.loads(json.dumps(state.to_json()))) == state


def test_every_flipped_bit_and_cut_is_noticed_and_the_one_before_is_taken(
    tmp_path: Path, save: Save
) -> None:
    """150 bits over all files, then each file cut to nothing, half, and one byte less."""
    good, bad = save(tmp_path, 1), save(tmp_path, 2)
    files = sorted(bad.iterdir())
    rng = np.random.default_rng(0)
    damages: list[tuple[Path, bytes]] = []
    for file in [files[i] for i in rng.integers(0, len(files), 150)]:
        content = bytearray(file.read_bytes())
        bit = int(rng.integers(0, 8 * len(content)))
        content[bit // 8] ^= 1 << (bit % 8)
        damages.append((file, bytes(content)))
    for file in files:
        whole = file.read_bytes()
        damages += [(file, whole[:size]) for size in (0, len(whole) // 2, len(whole) - 1)]
    assert len(damages) > 150
    for file, damaged in damages:
        whole = file.read_bytes()
        file.write_bytes(damaged)
        said: list[str] = []
        assert newest_checkpoint(tmp_path, said.append) == good, (file.name, damaged)
        assert len(said) == 1
        assert str(bad) in said[0]
        assert file.name in said[0]
        assert "set aside as damaged-step-2, looking" in said[0]
        (tmp_path / "damaged-step-2").rename(bad)
        file.write_bytes(whole)
    assert newest_checkpoint(tmp_path, pytest.fail) == bad


def test_a_damaged_one_is_set_aside_beside_others_and_never_counted_again(
    tmp_path: Path, save: Save
) -> None:
    (tmp_path / "damaged-step-3").mkdir(parents=True)
    path = save(tmp_path, 3)
    (path / MOMENTS).unlink()
    said: list[str] = []
    assert newest_checkpoint(tmp_path, said.append) is None
    assert f"{MOMENTS} is missing" in said[0]
    assert names_in(tmp_path) == ["damaged-step-3", "damaged-step-3-2"]
    assert newest_checkpoint(tmp_path, pytest.fail) is None


@pytest.mark.parametrize(("version", "who"), [(1, "an older"), (999, "a newer")])
def test_a_checkpoint_of_another_schema_is_refused_and_left_where_it_is(
    tmp_path: Path, save: Save, version: int, who: str
) -> None:
    save(tmp_path, 1)
    path = save(tmp_path, 2)
    content = json.loads((path / MANIFEST).read_text()) | {"schema_version": version}
    content.pop("sha256_of_the_above")
    (path / MANIFEST).write_text(render(content))
    with pytest.raises(OtherSchemaError, match=rf"{who} bertsmith \(schema {version}.*--model"):
        newest_checkpoint(tmp_path, pytest.fail)
    assert names_in(tmp_path) == ["step-1", "step-2"]


def test_the_newest_and_the_best_are_kept_by_number_and_score_not_by_time(
    tmp_path: Path, save: Save
) -> None:
    values = {100: None, 9: -1.0, 20: -3.0, 3: -0.5, 5: -2.0, 50: None}
    for step, value in values.items():  # written out of order
        save(tmp_path, step, value=value)
    (tmp_path / "step-notes").mkdir()
    retain(tmp_path, step=100, keep_last=2, keep_best=2)
    assert names_in(tmp_path) == ["step-100", "step-3", "step-50", "step-9", "step-notes"]


def test_later_ones_do_not_push_good_ones_out(tmp_path: Path, save: Save) -> None:
    for step in (100, 200, 150):  # a disk that could not set 200 aside
        save(tmp_path, step)
    retain(tmp_path, step=150, keep_last=1, keep_best=0)
    assert names_in(tmp_path) == ["step-150", "step-200"]


def test_what_cannot_be_deleted_stays_whole(
    tmp_path: Path, save: Save, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Never half a folder under the name of a whole one."""
    for step in (1, 2):
        save(tmp_path, step)
    monkeypatch.setattr("shutil.rmtree", lambda *args, **kwargs: None)
    retain(tmp_path, step=2, keep_last=1, keep_best=0)
    assert [name for name in names_in(tmp_path) if name.startswith("step-")] == ["step-2"]


def test_another_model_is_refused(tmp_path: Path, save: Save) -> None:
    path = save(tmp_path, 1)
    other = nn.Linear(8, 3)
    made = AdamW(group_parameters(other, OptimConfig()), OptimConfig())
    with pytest.raises(UserError, match="does not fit this model"):
        load_moments(path, made.named_moments())


def unreadable(real: Callable[..., Any], name: str, code: int) -> Callable[..., Any]:
    """What opens a file or a folder; it fails for one of a name."""

    def call(path: Any, *args: Any, **kwargs: Any) -> Any:
        if Path(path).name == name:
            raise OSError(code, os.strerror(code))
        return real(path, *args, **kwargs)

    return call


@pytest.mark.parametrize("code", [errno.EIO, errno.EACCES, errno.EMFILE])
@pytest.mark.parametrize("name", [MANIFEST, MOMENTS])
def test_what_cannot_be_read_is_not_taken_for_damaged(
    tmp_path: Path, save: Save, monkeypatch: pytest.MonkeyPatch, name: str, code: int
) -> None:
    """One line instead; nothing is renamed, and the one before is not taken in its place."""
    save(tmp_path, 1)
    path = save(tmp_path, 2)
    with monkeypatch.context() as patch:
        patch.setattr(io, "open", unreadable(io.open, name, code))
        with pytest.raises(UserError, match=rf"{name}: cannot be read \({os.strerror(code)}"):
            newest_checkpoint(tmp_path, pytest.fail)
    assert names_in(tmp_path) == ["step-1", "step-2"]
    assert newest_checkpoint(tmp_path, pytest.fail) == path


def test_a_folder_that_cannot_be_listed_does_not_hold_nothing(
    tmp_path: Path, save: Save, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(tmp_path / "checkpoints", 1)
    monkeypatch.setattr(os, "scandir", unreadable(os.scandir, "checkpoints", errno.EACCES))
    with pytest.raises(UserError, match=r"checkpoints: cannot be read \(Permission denied"):
        newest_checkpoint(tmp_path / "checkpoints", pytest.fail)


def test_what_may_be_the_best_is_not_deleted_because_it_cannot_be_read(
    tmp_path: Path, save: Save, monkeypatch: pytest.MonkeyPatch
) -> None:
    for step in (1, 2, 3):
        save(tmp_path, step)
    real = Path.read_text

    def read_text(self: Path, **kwargs: Any) -> str:
        if self.parent.name == "step-1":
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        return real(self, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "read_text", read_text)
        retain(tmp_path, step=3, keep_last=1, keep_best=1)
    assert names_in(tmp_path) == ["step-1", "step-3"]


def test_a_moment_that_is_missing_and_one_of_another_shape_are_told_apart(
    tmp_path: Path, save: Save
) -> None:
    path = save(tmp_path, 1)
    with pytest.raises(UserError, match=r"first_moment/weight has the shape \[3, 7\], .* \[3, 8\]"):
        load_moments(path, [("first_moment/weight", torch.zeros(3, 8))])
    with pytest.raises(UserError, match="first_moment/other is missing"):
        load_moments(path, [("first_moment/other", torch.zeros(3, 8))])


def test_moments_of_some_rows_are_stored_whole_and_found_again(tmp_path: Path) -> None:
    """Rows 1, 2 and 4 of six are trained; the others have never had a gradient."""
    rows = TrainedRows("token.weight", torch.tensor([4, 1, 2, 1]), num_rows=6)
    narrow_RD = torch.tensor([[1.0, 1.5], [2.0, 2.5], [4.0, 4.5]])
    other = torch.ones(3, 2)
    named = [("first_moment/token.weight", narrow_RD), ("first_moment/bias", other)]
    stored = dict(rows.whole(named))
    assert stored["first_moment/token.weight"].tolist() == [
        *([0.0, 0.0], [1.0, 1.5], [2.0, 2.5], [0.0, 0.0], [4.0, 4.5], [0.0, 0.0])
    ]
    assert stored["first_moment/bias"] is other
    for held in (stored["first_moment/token.weight"], narrow_RD):  # whole; as it once was stored
        write_weights(tmp_path / MOMENTS, [("first_moment/token.weight", held)])
        mine_RD, whole_VD = torch.zeros(3, 2), torch.zeros(6, 2)
        for moment in (mine_RD, whole_VD):
            load_moments(tmp_path, [("first_moment/token.weight", moment)], rows=rows)
        assert torch.equal(mine_RD, narrow_RD)
        assert torch.equal(whole_VD, stored["first_moment/token.weight"])
