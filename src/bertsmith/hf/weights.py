"""Files of named tensors: safetensors whole or in parts, and the legacy `pytorch_model.bin`.

A tensor is read when it is asked for, one at a time, so that a hostile shape is refused before
any memory is given to it.
"""

import json
import os
import re
import zipfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from bertsmith.errors import UserError

SAFETENSORS = "model.safetensors"
INDEX = "model.safetensors.index.json"
LEGACY = "pytorch_model.bin"

_FLOATS = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
}


@dataclass(frozen=True, kw_only=True, slots=True)
class StoredTensor:
    """A tensor in a file, not read yet."""

    name: str
    shape: tuple[int, ...]
    is_float: bool
    """Whether it holds numbers a weight may have: fp16, bf16, fp32 or fp64."""

    file: Path
    read: Callable[[], Tensor]
    """Reads it as it is stored, on the CPU."""

    def read_float32(self) -> Tensor:
        """Its values in fp32.

        Raises:
            UserError: They are no floats, or some are NaN or infinite.
        """
        if not self.is_float:
            raise UserError(
                f"{self.file}: tensor {self.name} is not stored as fp16, bf16, fp32 or fp64; "
                "quantised checkpoints cannot be trained on"
            )
        try:
            values = self.read().to(torch.float32)
        except SafetensorError as error:
            raise _corrupt(self.file, error) from None
        if not bool(torch.isfinite(values).all()):
            raise UserError(
                f"{self.file}: tensor {self.name} holds NaN or infinite values; "
                "the checkpoint is damaged or its training diverged: use an earlier one"
            )
        return values


def open_weights(folder: Path) -> tuple[StoredTensor, ...]:
    """What tensors a model folder stores, by name.

    Safetensors are preferred; `pytorch_model.bin` is read only where there are none.

    Raises:
        UserError: There are no weights, or the file is damaged or holds more than tensors.
    """
    if (folder / SAFETENSORS).exists():
        stored = open_safetensors(folder / SAFETENSORS)
    elif (folder / INDEX).exists():
        stored = _open_sharded(folder / INDEX)
    elif (folder / LEGACY).exists():
        stored = _open_legacy(folder / LEGACY)
    else:
        raise UserError(
            f"{folder}: holds no weights; expected {SAFETENSORS}, {INDEX} with its parts, "
            f"or {LEGACY}"
        )
    return tuple(sorted(stored, key=lambda tensor: tensor.name))


def write_weights(
    file: Path, tensors: Sequence[tuple[str, Tensor]], *, metadata: Mapping[str, str] | None = None
) -> None:
    """Write named tensors as fp32 safetensors, each on its own storage.

    The file is written in place: whoever needs it whole or not at all writes into a temporary
    folder and renames that.

    Args:
        file: Where to write.
        tensors: Names and values.
        metadata: More to say in the file's header, `read_metadata` gives it back.

    Raises:
        OSError: The disk is full or forbids it.
    """
    content = {
        name: values.detach().to("cpu", torch.float32).contiguous() for name, values in tensors
    }
    assert len(content) == len(tensors), "two tensors have one name"
    try:
        save_file(content, file, metadata={"format": "pt", **(metadata or {})})
    except SafetensorError as error:  # "... (os error 28)"
        number = re.search(r"os error (\d+)", str(error))
        if number is None:
            raise OSError(f"{file.name}: {error}") from error
        raise OSError(int(number[1]), os.strerror(int(number[1])), str(file)) from error


def read_metadata(file: Path) -> dict[str, str]:
    """What the header of a safetensors file says besides its tensors.

    Raises:
        UserError: The file is damaged.
    """
    try:
        with safe_open(file, framework="pt") as handle:
            return dict(handle.metadata() or {})
    except (SafetensorError, OSError) as error:
        raise _corrupt(file, error) from None


def open_safetensors(file: Path) -> list[StoredTensor]:
    """What tensors a safetensors file stores, in its order.

    Raises:
        UserError: The file is damaged.
    """
    try:
        handle: Any = safe_open(file, framework="pt")  # its methods have no types
        stored = []
        for name in handle.keys():  # noqa: SIM118 - no mapping
            view = handle.get_slice(name)
            stored.append(
                StoredTensor(
                    name=name,
                    shape=tuple(view.get_shape()),
                    is_float=view.get_dtype() in _FLOATS,
                    file=file,
                    read=lambda name=name: handle.get_tensor(name),  # type: ignore[misc]
                )
            )
    except (SafetensorError, OSError) as error:
        raise _corrupt(file, error) from None
    return stored


def _open_sharded(index: Path) -> list[StoredTensor]:
    try:
        files_by_name = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        files = sorted(set(files_by_name.values()))
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise UserError(
            f"{index}: is no index of weights (a JSON object with a weight_map from tensor to "
            "file); fetch it again"
        ) from None
    stored = []
    for file in files:
        # A basename cannot lead out of the folder.
        if Path(file).name != file or "\\" in file or not file.endswith(".safetensors"):
            raise UserError(
                f"{index}: weight_map names {file!r}; parts must be .safetensors files that lie "
                "beside it"
            )
        if not (index.parent / file).exists():
            raise UserError(f"{index.parent / file}: missing, though {index.name} names it")
        stored += open_safetensors(index.parent / file)
    by_name = {(tensor.name, tensor.file.name): tensor for tensor in stored}
    for name, file in files_by_name.items():
        if (name, file) not in by_name:
            raise UserError(f"{index}: says that {file} holds {name}, which it does not")
    return [by_name[item] for item in files_by_name.items()]


def _open_legacy(file: Path) -> list[StoredTensor]:
    """Read a pickle that may hold tensors and nothing else; there is no second, laxer try."""
    refuse = (
        "bertsmith reads it only if it is a flat table of tensors and nothing else; "
        "convert it to safetensors with the tool that wrote it, if you trust its origin"
    )
    is_zip = zipfile.is_zipfile(file)
    try:
        # torch writes uncompressed; anything else may grow a thousandfold when read.
        if is_zip and _is_compressed(file):
            raise ValueError("it is compressed, as torch.save never does")
        content = torch.load(file, map_location="cpu", weights_only=True, mmap=is_zip)
    except Exception as error:  # a hostile file may make the reader raise anything
        first = str(error).strip().partition("\n")[0][:160]
        raise UserError(f"{file}: cannot be read as tensors ({first}); {refuse}") from None
    if not isinstance(content, dict) or not all(
        isinstance(name, str) and isinstance(values, Tensor) and values.layout == torch.strided
        for name, values in content.items()
    ):
        raise UserError(f"{file}: holds other things than named tensors; {refuse}")
    return [
        StoredTensor(
            name=name,
            shape=tuple(values.shape),
            is_float=values.dtype in _FLOATS.values(),
            file=file,
            read=lambda values=values: values.detach(),  # type: ignore[misc]
        )
        for name, values in content.items()
    ]


def _is_compressed(file: Path) -> bool:
    with zipfile.ZipFile(file) as archive:
        return any(entry.compress_type != zipfile.ZIP_STORED for entry in archive.infolist())


def _corrupt(file: Path, error: Exception) -> UserError:
    if isinstance(error, PermissionError):
        return UserError(f"{file}: no permission to read it")
    with file.open("rb") as stream:
        is_pointer = stream.read(20) == b"version https://git-"
    if is_pointer:
        return UserError(
            f"{file}: is a Git LFS pointer, not the weights; run `git lfs pull` in its folder"
        )
    return UserError(f"{file}: truncated or damaged ({error}); fetch or copy it again")
