"""Read a model from a Hugging Face folder: the encoder wholly, a head wholly or not at all."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor, nn

from bertsmith.errors import UserError
from bertsmith.hf.config_json import (
    SINGLE_LABEL,
    read_config,
    read_head_dropout,
    read_labels,
    read_problem_type,
)
from bertsmith.hf.hub import resolve
from bertsmith.hf.keys import POSITION_IDS, TIED_BIAS, TIED_WEIGHT, Slot, canonical, from_hf, to_hf
from bertsmith.hf.weights import StoredTensor, open_weights
from bertsmith.model.config import EncoderConfig
from bertsmith.model.encoder import Encoder
from bertsmith.model.heads import MaskedLM, SequenceClassifier, initialize

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
            f"from {self.source}; newly initialised: {_listed(self.new)}; "
            f"dropped: {_listed(self.dropped)}"
        )
        return "; ".join([text, *self.remarks])


def load_encoder(
    where: str | Path,
    *,
    hidden_dropout_prob: float | None = None,
    attention_probs_dropout_prob: float | None = None,
) -> tuple[Encoder, LoadReport]:
    """The encoder alone, in fp32 on the CPU.

    Args:
        where: A model folder or a hub name.
        hidden_dropout_prob: Overrides the checkpoint's.
        attention_probs_dropout_prob: Overrides the checkpoint's.

    Raises:
        UserError: The folder cannot be read, or does not hold all of an encoder.
    """
    folder = resolve(where)
    config = _config_of(folder, hidden_dropout_prob, attention_probs_dropout_prob)
    checkpoint = _Checkpoint.open(folder, config)
    holder = nn.Module()
    with torch.random.fork_rng(devices=[]):
        encoder = Encoder(config)
    holder.add_module("encoder", encoder)
    return encoder, checkpoint.fill(holder, parts=())


def load_masked_lm(
    where: str | Path,
    *,
    seed: int,
    hidden_dropout_prob: float | None = None,
    attention_probs_dropout_prob: float | None = None,
) -> tuple[MaskedLM, LoadReport]:
    """An encoder with its masked-LM head, which is new where the checkpoint lacks it.

    Args:
        where: A model folder or a hub name.
        seed: A new head follows from it.
        hidden_dropout_prob: Overrides the checkpoint's.
        attention_probs_dropout_prob: Overrides the checkpoint's.

    Raises:
        UserError: As for `load_encoder`; also if the head has an output matrix of its own,
            not tied to the embeddings.
    """
    folder = resolve(where)
    config = _config_of(folder, hidden_dropout_prob, attention_probs_dropout_prob)
    checkpoint = _Checkpoint.open(folder, config)
    with torch.random.fork_rng(devices=[]):  # torch's own start is overwritten: leave no trace
        model = MaskedLM(config)
    head = ("transform", "norm", "bias")
    report = checkpoint.fill(model, parts=(head,), seed=seed)
    if not report.new:
        checkpoint.require_tied(model.encoder.embeddings.token.weight)
    return model, report


def load_classifier(
    where: str | Path,
    *,
    labels: Sequence[str] | None,
    seed: int = 0,
    hidden_dropout_prob: float | None = None,
    attention_probs_dropout_prob: float | None = None,
) -> tuple[SequenceClassifier, LoadReport]:
    """An encoder with a classifier of texts.

    Args:
        where: A model folder or a hub name.
        labels: Names of the classes to tell apart, in the order of their ids. A stored head is
            kept if it was trained for just these, else it is new, and the report says so. None
            asks for the stored head as it is, whose names `read_labels` gives.
        seed: A new pooler and head follow from it.
        hidden_dropout_prob: Overrides the checkpoint's.
        attention_probs_dropout_prob: Overrides the checkpoint's.

    Raises:
        UserError: As for `load_encoder`; also if labels is None and there is no single-label
            head to load.
    """
    folder = resolve(where)
    config = _config_of(folder, hidden_dropout_prob, attention_probs_dropout_prob)
    checkpoint = _Checkpoint.open(folder, config)
    num_stored = checkpoint.rows_of("classifier.weight")
    must_be_whole = labels is None
    keep_head = labels is None or _is_head_for(labels, folder, num_stored)
    if labels is None:
        labels = _labels_to_use(folder, num_stored)
    with torch.random.fork_rng(devices=[]):
        model = SequenceClassifier(config, num_labels=len(labels))
    report = checkpoint.fill(
        model,
        parts=(("pooler",), ("classifier",)),
        unwanted=() if keep_head else ("classifier",),
        seed=seed,
    )
    if must_be_whole and report.new:
        raise UserError(
            f"{folder}: lacks part of its classifier ({_listed(report.new)}); "
            "run `bertsmith finetune` on it first"
        )
    head_dropout = read_head_dropout(folder)
    if head_dropout not in (None, config.hidden_dropout_prob):
        remark = (
            f"classifier_dropout {head_dropout} is not followed: the head uses "
            f"hidden_dropout_prob {config.hidden_dropout_prob}"
        )
        report = replace(report, remarks=(remark,))
    return model, report


def check_vocabulary(config: EncoderConfig, *, num_tokens: int, where: str) -> None:
    """Refuse a tokenizer that can give ids the model has no embedding for.

    Args:
        config: The model's.
        num_tokens: Ids the tokenizer knows, added tokens included.
        where: The tokenizer's name, for the message.
    """
    if num_tokens > config.vocab_size:
        raise UserError(
            f"{where}: the tokenizer has {num_tokens:,} tokens but the model embeds "
            f"{config.vocab_size:,}; use the tokenizer the model was trained with"
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class _Checkpoint:
    """The stored tensors of a folder, sorted by where they go."""

    folder: Path
    config: EncoderConfig
    by_slot: dict[Slot, StoredTensor]
    tied_weight: StoredTensor | None
    no_place: tuple[str, ...]

    @classmethod
    def open(cls, folder: Path, config: EncoderConfig) -> "_Checkpoint":
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
        checkpoint = cls(
            folder=folder,
            config=config,
            by_slot=by_slot,
            tied_weight=named.get(TIED_WEIGHT),
            no_place=tuple(no_place),
        )
        checkpoint._check_depth()
        checkpoint._check_encoder()
        return checkpoint

    def rows_of(self, name: str) -> int | None:
        """Rows of the tensor stored for a parameter of ours, None without one."""
        tensor = self.by_slot.get(Slot(name=name, part=0))
        return tensor.shape[0] if tensor is not None and tensor.shape else None

    def fill(
        self,
        model: nn.Module,
        *,
        parts: Sequence[tuple[str, ...]],
        unwanted: Collection[str] = (),
        seed: int = 0,
    ) -> LoadReport:
        """Give every parameter of a model its value, from the file or new.

        Args:
            model: Its encoder, under that name, must be stored wholly.
            parts: Heads, each a group of the model's children or parameters that is loaded if
                all of it is stored, else initialised.
            unwanted: Children that are initialised even if they are stored.
            seed: For `initialize`.
        """
        parameters = dict(model.named_parameters())
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
                f"tensors are missing: {_listed(missing)}; the checkpoint is damaged or no BERT"
            )
        wrong = [
            f"{self.by_slot[s].name} is {list(self.by_slot[s].shape)}, expected {list(rows.shape)}"
            for s, rows in targets.items()
            if self.by_slot[s].shape != tuple(rows.shape)
        ]
        if wrong:
            raise UserError(
                f"{self.folder}: config.json and weights disagree: {_listed(wrong)}; "
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


def _config_of(folder: Path, hidden: float | None, attention: float | None) -> EncoderConfig:
    config = read_config(folder)
    if hidden is not None:
        config = replace(config, hidden_dropout_prob=hidden)
    if attention is not None:
        config = replace(config, attention_probs_dropout_prob=attention)
    return config


def _labels_to_use(folder: Path, num_stored: int | None) -> tuple[str, ...]:
    """Names of a stored head's classes, if it is one to predict with."""
    if num_stored is None:
        raise UserError(
            f"{folder}: holds no classifier, only an encoder; run `bertsmith finetune` first"
        )
    if read_problem_type(folder) not in (None, SINGLE_LABEL):
        raise UserError(
            f"{folder}: problem_type is {read_problem_type(folder)}; bertsmith reads {SINGLE_LABEL}"
        )
    return read_labels(folder, num_labels=num_stored)


def _is_head_for(labels: Sequence[str], folder: Path, num_stored: int | None) -> bool:
    """Whether a stored head tells apart just these classes, in this order."""
    if num_stored is None or read_problem_type(folder) not in (None, SINGLE_LABEL):
        return False
    try:
        return read_labels(folder, num_labels=num_stored) == tuple(labels)
    except UserError:  # names that cannot be used belong to a head that is replaced
        return False


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


def _listed(names: Sequence[str]) -> str:
    if not names:
        return "nothing"
    more = len(names) - _NAMES_SHOWN
    return ", ".join(names[:_NAMES_SHOWN]) + (f" and {more} more" if more > 0 else "")
