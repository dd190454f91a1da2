"""Training waits for a copy in memory; what goes wrong afterwards is told, once."""

import threading
from pathlib import Path

import pytest
import torch
from torch import nn

from bertsmith.checkpoint.commit import NotWrittenError
from bertsmith.checkpoint.saver import NonFiniteWeightsError, Saver, Snapshot


def nothing() -> None:
    """What follows a save."""


def test_a_save_goes_on_while_others_work_and_the_next_waits_for_it(tmp_path: Path) -> None:
    saver = Saver()
    may_end, order = threading.Event(), []

    def slow() -> Path:
        assert may_end.wait(10.0)
        order.append("first")
        return tmp_path / "step-1"

    def quick() -> Path:
        order.append("second")
        return tmp_path / "step-2"

    saver.begin(slow, then=nothing)
    assert saver.is_busy
    assert saver.last_saved is None
    threading.Timer(0.2, may_end.set).start()
    saver.begin(quick, then=nothing)
    saver.finish()
    assert order == ["first", "second"]
    assert saver.last_saved == tmp_path / "step-2"
    assert not saver.is_busy


def test_a_save_that_fails_is_told_once_and_a_later_one_may_do_better(tmp_path: Path) -> None:
    saver = Saver()

    def fail() -> Path:
        raise NotWrittenError("no space")

    saver.begin(fail, then=lambda: pytest.fail("it is not safe"))
    saver.finish()
    assert saver.has_failed
    assert not saver.has_saved_last
    saver.begin(lambda: tmp_path / "step-2", then=nothing)
    saver.finish()
    assert saver.has_saved_last
    assert [str(error) for error in saver.take_errors()] == ["no space"]
    assert saver.take_errors() == []
    assert not saver.has_failed


def test_a_snapshot_keeps_what_was_there_and_reuses_its_room() -> None:
    model = nn.BatchNorm1d(3)
    snapshot = Snapshot(model)
    moment = torch.full((3,), 5.0)
    snapshot.take(model, [("first_moment/weight", moment)])
    rooms = [p.data_ptr() for p in snapshot.model.parameters()]
    with torch.no_grad():
        model.weight.fill_(2.0)
        model.running_mean.fill_(7.0)  # type: ignore[union-attr]
        moment.fill_(6.0)
    assert snapshot.model.weight.tolist() == [1.0] * 3
    assert snapshot.model.running_mean.tolist() == [0.0] * 3  # type: ignore[union-attr]
    assert snapshot.moments[0][1].tolist() == [5.0] * 3
    snapshot.take(model, [("first_moment/weight", moment)])
    assert snapshot.model.weight.tolist() == [2.0] * 3
    assert snapshot.moments[0][1].tolist() == [6.0] * 3
    assert [p.data_ptr() for p in snapshot.model.parameters()] == rooms
    assert snapshot.num_bytes == 4 * 6


@pytest.mark.parametrize("where", ["weight", "running_mean", "first_moment/weight"])
def test_a_number_that_is_not_finite_is_never_saved(where: str) -> None:
    model, moment = nn.BatchNorm1d(3), torch.zeros(3)
    with torch.no_grad():
        named = dict(model.named_parameters()) | dict(model.named_buffers())
        (named | {"first_moment/weight": moment})[where][1] = torch.inf
    snapshot = Snapshot(model)
    snapshot.take(model, [("first_moment/weight", moment)])
    with pytest.raises(NonFiniteWeightsError, match=f"^{where} is not finite"):
        snapshot.check_finite()
