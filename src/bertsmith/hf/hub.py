"""From what the user typed to a local folder: a path as it is, a hub name by download."""

import os
import re
from pathlib import Path

from bertsmith.errors import UserError
from bertsmith.hf.config_json import CONFIG_NAME
from bertsmith.hf.head import HEAD_FILE
from bertsmith.hf.save import TOKENIZER_FILES
from bertsmith.hf.weights import INDEX, LEGACY, SAFETENSORS

PROBE_SECONDS = 10.0
"""How long the hub may take to answer before it counts as unreachable."""

_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?", re.ASCII)


def resolve(where: str | Path) -> Path:
    """The local folder of a model, downloaded into Hugging Face's cache if it is a hub name.

    A name is looked up on the hub only if it can be nothing else: not a path with a leading
    ``.``, ``/`` or ``~``, and not below a folder that exists here. So a mistyped path stays on
    this machine. ``HF_HUB_OFFLINE`` and the other variables of huggingface_hub are respected.

    Raises:
        UserError: There is no such folder, or the hub has no such model or does not answer and
            the cache does not hold it.
    """
    if not str(where):
        raise UserError("the model's name is empty; give a folder or a hub name")
    path = Path(where).expanduser()
    if path.is_dir():
        return path
    if path.exists():
        raise UserError(f"{where}: is a file; give the folder that holds {CONFIG_NAME}")
    text = str(where)
    if isinstance(where, Path) or not _HUB_NAME.fullmatch(text):
        raise UserError(f"{where}: no such folder, and the form is not that of a hub name")
    owner, _, name = text.rpartition("/")
    if owner and Path(owner).is_dir():
        raise UserError(f"{where}: no such folder; {owner}/ exists but holds no {name}")
    return _download(text)


def _download(name: str) -> Path:
    # Imported when needed: it takes a quarter of a second, and most runs need no hub.
    from huggingface_hub import HfApi, snapshot_download  # noqa: PLC0415
    from huggingface_hub.errors import (  # noqa: PLC0415
        GatedRepoError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
    )

    instead = "or download it elsewhere and give the folder"
    try:
        # Asked first because it has a time limit; the download alone would retry for minutes.
        info = HfApi().model_info(name, timeout=PROBE_SECONDS)
        stored = {file.rfilename for file in info.siblings or ()}
        wanted = [CONFIG_NAME, HEAD_FILE, *TOKENIZER_FILES, *_weight_files(stored)]
        return Path(snapshot_download(name, revision=info.sha, allow_patterns=wanted))
    except GatedRepoError:
        raise UserError(
            f"{name}: the hub wants you to accept its terms and to log in (`hf auth login`); "
            f"do so, {instead}"
        ) from None
    except RepositoryNotFoundError:
        raise UserError(
            f"{name}: neither a folder here nor a model on the hub; check the spelling"
        ) from None
    except Exception as error:  # its HTTP library changes between versions, and its errors too
        reason = str(error).strip().partition("\n")[0][:120] or type(error).__name__
    try:
        return Path(snapshot_download(name, local_files_only=True))
    except LocalEntryNotFoundError:
        if os.environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "ON", "YES", "TRUE"):
            reason = "HF_HUB_OFFLINE is set"
        raise UserError(
            f"{name}: no such folder here, not in the local cache, and the hub cannot be asked "
            f"({reason}); go online, {instead}"
        ) from None


def _weight_files(stored: set[str]) -> list[str]:
    """Only the weights that will be read: a repository often holds several copies."""
    if SAFETENSORS in stored:
        return [SAFETENSORS]
    if INDEX in stored:
        return [INDEX, "model-*.safetensors"]
    return [LEGACY]
