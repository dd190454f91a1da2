"""The examples of docs/python.md run, in their order, and its table names what is there."""

import importlib
import re
import shutil
from pathlib import Path

import pytest

from bertsmith.cli import VERBS

PAGE = Path(__file__).parents[2] / "docs" / "python.md"


def test_every_example_of_the_page_runs(
    encoder_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    shutil.copytree(encoder_folder, "encoder")
    words = [a + b for a in "bdfgkl" for b in ("ane", "ole", "iru", "ust")]
    lines = [" ".join(words[(i * k + k) % 24] for k in range(1, 9)) for i in range(200)]
    Path("corpus.txt").write_text("\n".join(lines) + "\n")
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    assert len(blocks) == 8
    names: dict[str, object] = {}
    for block in blocks:
        exec(compile(block, str(PAGE), "exec"), names)
    assert Path("said.csv").exists()
    assert Path("pretrained", "model", "config.json").exists()


def test_the_page_names_a_function_for_every_verb() -> None:
    rows = re.findall(r"^\| ([a-z]+)[^|]*\| `([\w.]+)` \| (.*) \|$", PAGE.read_text(), re.MULTILINE)
    assert {verb for verb, _, _ in rows} == set(VERBS)
    for _, path, configs in rows:
        module, _, name = path.rpartition(".")
        assert callable(getattr(importlib.import_module(module), name))
        for config in re.findall(r"`(\w+)`", configs):
            assert hasattr(importlib.import_module("bertsmith.recipes.config"), config)
