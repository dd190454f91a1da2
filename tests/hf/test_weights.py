"""Weights are read from each format, and nothing but tensors is ever accepted."""

import json
import os
import pickle
import zipfile
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from bertsmith.errors import UserError
from bertsmith.hf import load_masked_lm
from bertsmith.hf.weights import open_weights
from bertsmith.model.heads import MaskedLM


def to_legacy(folder: Path, *, zipped: bool = True) -> Path:
    """Store a folder's weights as pytorch_model.bin instead."""
    tensors = OrderedDict(load_file(folder / "model.safetensors"))
    (folder / "model.safetensors").unlink()
    file = folder / "pytorch_model.bin"
    torch.save(tensors, file, _use_new_zipfile_serialization=zipped)
    return file


def to_shards(folder: Path) -> dict[str, str]:
    """Store a folder's weights in two parts and an index; answers the weight map."""
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    names = sorted(tensors)
    files_by_name: dict[str, str] = {}
    for i, part in enumerate((names[::2], names[1::2])):
        file = f"model-{i + 1:05}-of-00002.safetensors"
        save_file({name: tensors[name] for name in part}, folder / file)
        files_by_name |= dict.fromkeys(part, file)
    write_index(folder, files_by_name)
    return files_by_name


def write_index(folder: Path, files_by_name: object) -> None:
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files_by_name}))


def assert_loads_as(model: MaskedLM, folder: Path) -> None:
    loaded, report = load_masked_lm(folder, seed=0)
    assert report.new == ()
    assert report.dropped == ()
    for ours, original in zip(loaded.parameters(), model.parameters(), strict=True):
        assert torch.equal(ours, original)


@pytest.mark.parametrize("zipped", [True, False])
def test_a_legacy_file_of_tensors_is_read(
    zipped: bool, masked_lm: MaskedLM, masked_lm_folder: Path
) -> None:
    to_legacy(masked_lm_folder, zipped=zipped)
    assert_loads_as(masked_lm, masked_lm_folder)


def test_sharded_weights_are_read(masked_lm: MaskedLM, masked_lm_folder: Path) -> None:
    to_shards(masked_lm_folder)
    assert_loads_as(masked_lm, masked_lm_folder)


class Payload:
    """Unpickling it would make a folder."""

    def __init__(self, canary: Path) -> None:
        self.canary = canary

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.canary),)


@pytest.mark.parametrize("zipped", [True, False])
def test_a_legacy_file_with_code_is_refused_and_does_nothing(
    zipped: bool, masked_lm_folder: Path, tmp_path: Path
) -> None:
    file = to_legacy(masked_lm_folder)
    torch.save(
        {"w": torch.zeros(2), "x": Payload(tmp_path / "canary")},
        file,
        _use_new_zipfile_serialization=zipped,
    )
    with pytest.raises(UserError, match=r"pytorch_model\.bin: cannot be read as tensors") as raised:
        open_weights(masked_lm_folder)
    assert "\n" not in str(raised.value)
    file.write_bytes(pickle.dumps(Payload(tmp_path / "canary")))
    with pytest.raises(UserError, match="cannot be read as tensors"):
        open_weights(masked_lm_folder)
    assert not (tmp_path / "canary").exists()


@pytest.mark.parametrize(
    "content",
    [
        {"state_dict": {"w": torch.zeros(2)}},
        {"w": torch.zeros(2), "epoch": 3},
        {3: torch.zeros(2)},
        [torch.zeros(2)],
        torch.zeros(2),
        {"w": torch.zeros(2).to_sparse()},
    ],
)
def test_a_legacy_file_with_anything_but_named_tensors_is_refused(
    content: object, tmp_path: Path
) -> None:
    torch.save(content, tmp_path / "pytorch_model.bin")
    with pytest.raises(UserError, match="only if it is a flat table of tensors"):
        open_weights(tmp_path)


def test_a_compressed_legacy_file_is_refused_unread(masked_lm_folder: Path) -> None:
    file = to_legacy(masked_lm_folder)
    with zipfile.ZipFile(file) as archive:
        entries = {name: archive.read(name) for name in archive.namelist()}
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in entries.items():
            archive.writestr(name, data)
    with pytest.raises(UserError, match=r"it is compressed, as torch\.save never does"):
        open_weights(masked_lm_folder)


@pytest.mark.parametrize("kept_share", [0.0, 0.001, 0.5, 0.999])
@pytest.mark.parametrize("legacy", [False, True])
def test_a_truncated_file_is_named(kept_share: float, legacy: bool, masked_lm_folder: Path) -> None:
    file = to_legacy(masked_lm_folder) if legacy else masked_lm_folder / "model.safetensors"
    data = file.read_bytes()
    file.write_bytes(data[: int(len(data) * kept_share)])
    with pytest.raises(UserError) as raised:
        load_masked_lm(masked_lm_folder, seed=0)
    assert str(file) in str(raised.value)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    "content",
    [
        b"\xff" * 64,
        (2**60).to_bytes(8, "little") + b"{}",
        (2).to_bytes(8, "little") + b"[]",
        b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 1\n",
    ],
)
def test_a_file_that_is_no_safetensors_is_named(content: bytes, masked_lm_folder: Path) -> None:
    (masked_lm_folder / "model.safetensors").write_bytes(content)
    with pytest.raises(UserError, match=r"model\.safetensors: (truncated|is a Git LFS pointer)"):
        load_masked_lm(masked_lm_folder, seed=0)


@pytest.mark.parametrize("file", ["../model-1.safetensors", "/etc/passwd", "a\\b.safetensors", "x"])
def test_an_index_that_points_out_of_its_folder_is_refused(
    file: str, masked_lm_folder: Path
) -> None:
    files_by_name = to_shards(masked_lm_folder)
    write_index(masked_lm_folder, files_by_name | {"classifier.weight": file})
    with pytest.raises(UserError, match=r"must be \.safetensors files that lie beside it"):
        open_weights(masked_lm_folder)


def test_an_index_that_does_not_hold_is_refused(masked_lm_folder: Path) -> None:
    files_by_name = to_shards(masked_lm_folder)
    first = files_by_name["cls.predictions.bias"]
    write_index(masked_lm_folder, files_by_name | {"absent": first})
    with pytest.raises(UserError, match=f"says that {first} holds absent, which it does not"):
        open_weights(masked_lm_folder)
    write_index(masked_lm_folder, ["no", "map"])
    with pytest.raises(UserError, match="is no index of weights"):
        open_weights(masked_lm_folder)
    write_index(masked_lm_folder, files_by_name)
    (masked_lm_folder / first).unlink()
    with pytest.raises(UserError, match="missing, though"):
        open_weights(masked_lm_folder)


def test_a_folder_without_weights_says_what_was_expected(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"holds no weights; expected model\.safetensors"):
        open_weights(tmp_path)
