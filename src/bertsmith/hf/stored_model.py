"""The tensors a model folder stores, and a model filled with them."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor, nn

from bertsmith.errors import UserError
from bertsmith.hf.head import StoredHead
from bertsmith.hf.keys import POSITION_IDS, TIED_BIAS, TIED_WEIGHT, Slot, canonical, from_hf, to_hf
from bertsmith.hf.weights import StoredTensor, open_weights
from bertsmith.model.config import EncoderConfig
from bertsmith.model.encoder import Encoder
from bertsmith.model.heads import initialize

_NAMES_SHOWN = 4


@dataclass(frozen=True, kw_only=True, slots=True)
class LoadReport:
    """What became of a checkpoint's tensors, and of the model's parameters."""

    source: str
    """Folder that was read."""

    loaded: tuple[str, ...]
    """Tensors of the checkpoint that the model now holds."""

    num_loaded_values: int
    """Numbers in them."""

    new: tuple[str, ...]
    """Parts of the model that the checkpoint lacks, newly initialised."""

    dropped: tuple[str, ...]
    """Tensors of the checkpoint that the model has no place for."""

    remarks: tuple[str, ...] = ()
    """Settings of the checkpoint that are not followed."""

    def __str__(self) -> str:
        """All of it in one line."""
        text = (
            f"loaded {len(self.loaded)} tensors ({self.num_loaded_values / 1e6:.1f} M parameters) "
            f"from {self.source}; newly initialised: {listed(self.new)}; "
            f"dropped: {listed(self.dropped)}"
        )
        return "; ".join([text, *self.remarks])


@dataclass(frozen=True, kw_only=True, slots=True)
class StoredModel:
    """The stored tensors of a folder, sorted by where they go."""

    folder: Path
    config: EncoderConfig
    by_slot: dict[Slot, StoredTensor]
    tied_weight: StoredTensor | None
    no_place: tuple[str, ...]

    @classmethod
    def open(cls, folder: Path, config: EncoderConfig) -> "StoredModel":
        """Read the tables of contents, no tensor yet."""
        by_slot: dict[Slot, StoredTensor] = {}
        named: dict[str, StoredTensor] = {}
        no_place = []
        for tensor in open_weights(folder):
            name = canonical(tensor.name)
            slot = from_hf(name)
            if name in (TIED_WEIGHT, TIED_BIAS, POSITION_IDS):
                named[name] = tensor
            elif slot is None:
                no_place.append(tensor.name)
            elif slot in by_slot:
                raise UserError(
                    f"{tensor.file}: holds {to_hf(slot.name)[slot.part]} twice, as "
                    f"{by_slot[slot].name} and {tensor.name}"
                )
            else:
                by_slot[slot] = tensor
        if TIED_BIAS in named:
            by_slot.setdefault(Slot(name="bias", part=0), named[TIED_BIAS])
        stored = cls(
            folder=folder,
            config=config,
            by_slot=by_slot,
            tied_weight=named.get(TIED_WEIGHT),
            no_place=tuple(no_place),
        )
        stored._check_depth()
        stored._check_encoder()
        return stored

    def rows_of(self, name: str) -> int | None:
        """Rows of the tensor stored for a parameter of ours, None without one."""
        tensor = self.by_slot.get(Slot(name=name, part=0))
        return tensor.shape[0] if tensor is not None and tensor.shape else None

    def plain_classifier(self) -> dict[str, StoredTensor]:
        """What is stored of a classifier, under our names."""
        names = ("classifier.weight", "classifier.bias")
        return {s.name: tensor for s, tensor in self.by_slot.items() if s.name in names}

    def with_head(self, head: StoredHead) -> "StoredModel":
        """The same model with the true head in place of the one `transformers` reads."""
        in_head = {Slot(name=tensor.name, part=0): tensor for tensor in head.tensors}
        return replace(self, by_slot=self.by_slot | in_head)

    def fill(
        self,
        model: nn.Module,
        *,
        parts: Sequence[tuple[str, ...]],
        unwanted: Collection[str] = (),
        seed: int = 0,
    ) -> LoadReport:
        """Give every parameter and every running statistic its value, from the file or new.

        Args:
            model: Its encoder, under that name, must be stored wholly.
            parts: Heads, each a group of the model's children or parameters that is loaded if
                all of it is stored, else initialised.
            unwanted: Children that are initialised, with their part, even if they are stored.
            seed: For `initialize`.
        """
        parameters = {**dict(model.named_parameters()), **dict(model.named_buffers())}
        new: list[str] = []
        for part in parts:
            inside = {name: p for name, p in parameters.items() if name.partition(".")[0] in part}
            complete = all(slot in self.by_slot for slot in _targets(inside))
            if not complete or set(part) & set(unwanted):
                new += part
        targets = _targets(
            {name: p for name, p in parameters.items() if name.partition(".")[0] not in new}
        )
        self._check_complete(targets)
        for slot, rows in targets.items():
            rows.copy_(self.by_slot[slot].read_float32())
        _initialize_children(model, new, config=self.config, seed=seed)
        return LoadReport(
            source=str(self.folder),
            loaded=tuple(self.by_slot[slot].name for slot in targets),
            num_loaded_values=sum(rows.numel() for rows in targets.values()),
            new=tuple(new),
            dropped=(
                *self.no_place,
                *(tensor.name for slot, tensor in self.by_slot.items() if slot not in targets),
            ),
        )

    def require_tied(self, token_weight: Tensor) -> None:
        """Refuse a stored output matrix that differs from the token embedding."""
        if self.tied_weight is None:
            return
        if self.tied_weight.shape != tuple(token_weight.shape) or not torch.equal(
            self.tied_weight.read_float32(), token_weight.detach()
        ):
            raise UserError(
                f"{self.tied_weight.file}: {self.tied_weight.name} differs from the token "
                "embedding; bertsmith's masked-LM head is tied to it"
            )

    def _check_depth(self) -> None:
        """Refuse a config that is deeper than the file, before building what it asks for."""
        depth = len({s.name.split(".")[2] for s in self.by_slot if ".blocks." in s.name})
        if self.config.num_hidden_layers > depth:
            raise UserError(
                f"{self.folder}: config.json says num_hidden_layers "
                f"{self.config.num_hidden_layers} but the weights have {depth}; "
                "the two files do not belong together"
            )

    def _check_encoder(self) -> None:
        """Refuse other shapes than the stored ones, before memory is given to the config's."""
        skeleton = nn.Module()
        try:
            with torch.device("meta"):
                skeleton.add_module("encoder", Encoder(self.config))
        except RuntimeError as error:
            raise UserError(
                f"{self.folder}: config.json asks for sizes that no memory holds ({error}); "
                "config and weights do not belong together"
            ) from None
        self._check_complete(_targets(dict(skeleton.named_parameters())))

    def _check_complete(self, targets: dict[Slot, Tensor]) -> None:
        missing = [to_hf(s.name)[s.part] for s in targets if s not in self.by_slot]
        if missing:
            raise UserError(
                f"{self.folder}: the encoder is not complete: {len(missing)} of {len(targets)} "
                f"tensors are missing: {listed(missing)}; the checkpoint is damaged or no BERT"
            )
        wrong = [
            f"{self.by_slot[s].name} is {list(self.by_slot[s].shape)}, expected {list(rows.shape)}"
            for s, rows in targets.items()
            if self.by_slot[s].shape != tuple(rows.shape)
        ]
        if wrong:
            raise UserError(
                f"{self.folder}: config.json and weights disagree: {listed(wrong)}; "
                "the two files do not belong together"
            )


def _targets(parameters: Mapping[str, Tensor]) -> dict[Slot, Tensor]:
    """Views of parameters, cut as a checkpoint stores them."""
    targets = {}
    for name, parameter in parameters.items():
        num_parts = len(to_hf(name))
        for part, rows in enumerate(parameter.detach().chunk(num_parts)):
            targets[Slot(name=name, part=part)] = rows
    return targets


def _initialize_children(
    model: nn.Module, names: Sequence[str], *, config: EncoderConfig, seed: int
) -> None:
    """Initialise some children of a model just as initialising all of it would.

    `initialize` goes by names, so a shell that holds these children alone, under their names,
    gives the same values without drawing the others.
    """
    shell = nn.Module()
    for name in names:
        child = getattr(model, name)
        if isinstance(child, nn.Parameter):
            shell.register_parameter(name, child)
        else:
            shell.add_module(name, child)
    initialize(shell, config=config, seed=seed)


def listed(names: Sequence[str]) -> str:
    """Some names in a line; "nothing" where there are none."""
    if not names:
        return "nothing"
    more = len(names) - _NAMES_SHOWN
    return ", ".join(names[:_NAMES_SHOWN]) + (f" and {more} more" if more > 0 else "")
