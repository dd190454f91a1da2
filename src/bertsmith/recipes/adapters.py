"""LoRA in a fine-tuning run: what is put on the model, and what is written of it."""

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from bertsmith.durable import why_not_written, write_folder
from bertsmith.errors import UserError
from bertsmith.hf import LoadReport, recover_model
from bertsmith.hf.adapter import (
    HEADS,
    AboutAdapter,
    Adaptable,
    base_fingerprint,
    read_checkpoint_file,
    write_adapter,
    write_checkpoint_file,
)
from bertsmith.model.config import LoraConfig
from bertsmith.model.lora import adapters_of, attach, freeze_encoder
from bertsmith.recipes.config import FinetuneConfig

FOLDER = "adapter"
"""Of a run folder: the best adapter, beside `model/`, which has it merged."""


@dataclass(frozen=True, kw_only=True)
class Lora:
    """The adapters of a run."""

    config: LoraConfig
    seed: int
    base: str
    """As an adapter's folder names it: a hub name, or a path that holds from anywhere."""

    base_sha256: str
    trained: tuple[str, ...]
    """Children of the model that are trained besides."""

    def put_on(self, model: Adaptable, checkpoint: Path | None = None) -> None:
        """Attach adapters to the base; new ones, or a checkpoint's.

        Raises:
            UserError: The checkpoint is of another base, or has other adapters.
        """
        attach(model, self.config, seed=self.seed)
        freeze_encoder(model, trained=self.trained)
        if checkpoint is not None:
            read_checkpoint_file(
                checkpoint,
                model,
                trained=self.trained,
                base_sha256=self.base_sha256,
                base=self.base,
            )

    def write_in_checkpoint(self, folder: Path, model: Adaptable) -> None:
        """Write the file that `put_on` reads."""
        write_checkpoint_file(folder, model, trained=self.trained, base_sha256=self.base_sha256)

    def save(
        self,
        run_folder: Path,
        model: Adaptable,
        *,
        labels: Sequence[str],
        write_more: Callable[[Path], None],
    ) -> None:
        """Write `adapter/`, there whole or not at all.

        Args:
            run_folder: Holds it.
            model: With adapters.
            labels: Names of the classes.
            write_more: Adds files to the folder that it is given.

        Raises:
            UserError: The folder cannot be written.
        """
        folder = (run_folder / FOLDER).absolute()
        about = AboutAdapter(base=self.base, base_sha256=self.base_sha256, labels=tuple(labels))

        def write(fresh: Path) -> None:
            write_adapter(fresh, model, self.config, trained=self.trained, about=about)
            write_more(fresh)

        try:
            recover_model(folder)
            write_folder(
                folder,
                fresh=folder.with_name(f".{folder.name}.new-{os.getpid()}"),
                aside=folder.with_name(f".{folder.name}.old-{os.getpid()}"),
                write=write,
            )
        except OSError as error:
            raise UserError(
                f"{folder}: cannot be written ({why_not_written(error, folder)})"
            ) from error

    def describe(self, model: Adaptable) -> str:
        """One line for the log."""
        low_rank = sum(p.numel() for _, one in adapters_of(model) for p in one.parameters())
        trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
        whole = sum(p.numel() for p in model.parameters()) - low_rank
        of_heads = ""
        if self.trained:
            of_heads = f" and {trained - low_rank:,} in {' and '.join(self.trained)}"
        return (
            f"lora: rank {self.config.rank}, scale {self.config.scale:g}, on "
            f"{', '.join(self.config.targets)} of {len(model.encoder.blocks)} layers; "
            f"{low_rank:,} parameters in adapters{of_heads} are trained, {whole:,} of the base "
            "stay or go along"
        )


def lora_on(
    config: FinetuneConfig,
    source: Path,
    model: Adaptable,
    report: LoadReport,
    checkpoint: Path | None,
) -> Lora | None:
    """The adapters of a run, put on its model: new ones, or those of a checkpoint; None without.

    The head is trained in any case, the pooler if the base has none.

    Args:
        config: Of the run.
        source: Folder of the base.
        model: As it was loaded from there.
        report: Of that.
        checkpoint: Of the run; None: it begins.

    Raises:
        UserError: The rank, or the checkpoint, does not fit the model.
    """
    if not config.lora.is_on:
        return None
    width = model.encoder.config.hidden_size
    if config.lora.rank > width:
        raise UserError(
            f"--lora.rank {config.lora.rank}: is more than the model's width {width}, so that "
            "adapters would be larger than what they adapt; 4 to 32 is usual"
        )
    trained = tuple(
        head for head in HEADS if hasattr(model, head) and (head != "pooler" or head in report.new)
    )
    is_here = Path(config.model).expanduser().exists()
    lora = Lora(
        config=config.lora,
        seed=config.seed,
        base=str(source.absolute()) if is_here else config.model,
        base_sha256=base_fingerprint(model, trained=trained),
        trained=trained,
    )
    lora.put_on(model, checkpoint)
    return lora
