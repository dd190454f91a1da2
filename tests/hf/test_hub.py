"""Paths stay on this machine; hub names end in a folder or in one clear line, soon."""

import shutil
import socket
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import huggingface_hub
import pytest

from bertsmith.errors import UserError
from bertsmith.hf import hub, load_encoder, resolve


@pytest.fixture
def no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("the hub was asked")

    monkeypatch.setattr(hub, "_download", refuse)


@pytest.fixture
def silent_server() -> Iterator[str]:
    """Takes connections and never answers."""
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen()
        yield f"http://127.0.0.1:{server.getsockname()[1]}"


@pytest.mark.usefixtures("no_network")
@pytest.mark.parametrize(
    "where",
    [
        "./mini",
        "/nowhere/mini",
        "~/no-such/mini",
        "runs/mini/model",
        "mini/",
        "a b",
        "x//y",
        "",
    ],
)
def test_a_mistyped_path_is_never_taken_for_a_hub_name(
    where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=r"no such folder|is empty"):
        resolve(where)


@pytest.mark.usefixtures("no_network")
def test_a_name_below_a_folder_that_exists_is_a_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "runs").mkdir()
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=r"runs/mini: no such folder; runs/ exists but"):
        resolve("runs/mini")


@pytest.mark.usefixtures("no_network")
def test_a_file_is_not_a_model_folder(tmp_path: Path) -> None:
    (tmp_path / "x").write_text("")
    with pytest.raises(UserError, match="is a file; give the folder"):
        resolve(tmp_path / "x")


@pytest.mark.usefixtures("no_network")
def test_a_folder_is_taken_as_it_is(tmp_path: Path) -> None:
    assert resolve(str(tmp_path)) == tmp_path


def offline(name: str, **_: object) -> Any:
    raise OSError("Connection refused\nmore lines")


def test_an_unreachable_hub_is_said_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(huggingface_hub.HfApi, "model_info", lambda self, name, **_: offline(name))
    with pytest.raises(UserError) as raised:
        load_encoder("no-such-owner/no-such-bert")
    assert str(raised.value) == (
        "no-such-owner/no-such-bert: no such folder here, not in the local cache, and the hub "
        "cannot be asked (Connection refused); go online, or download it elsewhere and give the "
        "folder"
    )


def test_a_hub_that_never_answers_is_given_up_on(
    silent_server: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(hub, "PROBE_SECONDS", 0.2)
    api = huggingface_hub.HfApi(endpoint=silent_server)
    monkeypatch.setattr(huggingface_hub, "HfApi", lambda: api)
    with pytest.raises(UserError, match="the hub cannot be asked"):
        resolve("no-such-owner/no-such-bert")


def test_only_the_files_that_are_read_are_downloaded(
    masked_lm_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    wanted: list[str] = []

    def info(self: object, name: str, *, timeout: float) -> Any:
        assert timeout <= 10
        files = ["model.safetensors", "pytorch_model.bin", "tf_model.h5", "config.json"]
        return SimpleNamespace(
            sha="abc", siblings=[SimpleNamespace(rfilename=file) for file in files]
        )

    def download(name: str, *, revision: str, allow_patterns: list[str]) -> str:
        assert (name, revision) == ("some-owner/some-bert", "abc")
        wanted.extend(allow_patterns)
        shutil.copytree(masked_lm_folder, tmp_path / "cached")
        return str(tmp_path / "cached")

    monkeypatch.setattr(huggingface_hub.HfApi, "model_info", info)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    _, report = load_encoder("some-owner/some-bert")
    assert report.source == str(tmp_path / "cached")
    assert "model.safetensors" in wanted
    assert {"tokenizer.json", "head.safetensors"} <= set(wanted)
    assert not {"pytorch_model.bin", "tf_model.h5"} & set(wanted)


def test_offline_mode_asks_the_cache_only_and_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr(huggingface_hub.HfApi, "model_info", lambda self, name, **_: offline(name))
    with pytest.raises(UserError, match=r"cannot be asked \(HF_HUB_OFFLINE is set\)"):
        resolve("no-such-owner/no-such-bert")
    cached = tmp_path / "cached"

    def local_only(name: str, *, local_files_only: bool) -> str:
        assert local_files_only
        return str(cached)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", local_only)
    assert resolve("some-owner/some-bert") == cached
