"""A run, its checkpoints and its resume read and write no pickle: nothing in them can run code."""

from pathlib import Path

import pytest

from fault_harness.runs import fault
from fault_harness.world import World

WATCH = """
import pickle, sys, torch
def note(what):
    with open({path!r}, "a") as file:
        file.write(what + "\\n")
def watch(event, arguments):
    if event == "pickle.find_class":
        note(event)
sys.addaudithook(watch)
def noting(name, real):
    def noted(*arguments, **options):
        note(name)
        return real(*arguments, **options)
    return noted
for module, names in ((pickle, ("load", "loads", "dump", "dumps", "Pickler", "Unpickler")),
                      (torch, ("save", "load"))):
    for name in names:
        setattr(module, name, noting(module.__name__ + "." + name, getattr(module, name)))
"""


@pytest.mark.parametrize("verb", ["pretrain", "finetune"])
def test_saving_and_resuming_touch_no_pickle(verb: str, world: World, tmp_path: Path) -> None:
    noted = tmp_path / "noted"
    watch = WATCH.format(path=str(noted))
    words = getattr(world, verb)(tmp_path / "run")
    killed = fault("bertsmith.train.step:train_step", "kill", nth=10)
    assert world.zygote.run(words, killed, before=watch).code == -9
    done = world.zygote.run([*words, "--resume"], before=watch).must()
    assert "resumed from" in done.errors
    assert not noted.exists(), noted.read_text()


def test_the_watch_sees_a_pickle(world: World, tmp_path: Path) -> None:
    """Else the test above would show nothing."""
    noted = tmp_path / "noted"
    code = WATCH.format(path=str(noted)) + "torch.load, pickle.loads(pickle.dumps(torch.nn.Linear))"
    world.zygote.run(["--version"], before=code).must()
    assert noted.read_text().split() == ["pickle.dumps", "pickle.loads", "pickle.find_class"]
