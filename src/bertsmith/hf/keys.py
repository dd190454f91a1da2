"""The table of names: each parameter of ours, and the tensors a Hugging Face BERT stores it in.

One table, read in both directions. Ours are the names inside `MaskedLM`, `PairedLM`,
`SequenceClassifier` and `SpanModel` (the encoder under ``encoder.``); theirs are those of
`BertForMaskedLM`, `BertForPreTraining`, `BertForSequenceClassification` and
`BertForQuestionAnswering`. The one change of shape is that our
``qkv`` is their query, key and value stacked along the rows. A head's norm, which they have no
place for, keeps our name and stands in a file of its own (`hf.head`).
"""

import re
from dataclasses import dataclass

_MODULES = (
    ("encoder.embeddings.token", "bert.embeddings.word_embeddings"),
    ("encoder.embeddings.position", "bert.embeddings.position_embeddings"),
    ("encoder.embeddings.segment", "bert.embeddings.token_type_embeddings"),
    ("encoder.embeddings.norm", "bert.embeddings.LayerNorm"),
    ("pooler", "bert.pooler.dense"),
    ("relation", "cls.seq_relationship"),
    ("classifier", "classifier"),
    ("span_scores", "qa_outputs"),
    ("transform", "cls.predictions.transform.dense"),
    ("norm", "cls.predictions.transform.LayerNorm"),
)
_BLOCK_MODULES = (
    ("attention_out", "attention.output.dense"),
    ("attention_norm", "attention.output.LayerNorm"),
    ("inner", "intermediate.dense"),
    ("inner_out", "output.dense"),
    ("output_norm", "output.LayerNorm"),
)
_QKV = tuple(f"attention.self.{part}" for part in ("query", "key", "value"))

_TO_HF = dict(_MODULES)
_FROM_HF = {theirs: ours for ours, theirs in _MODULES}
_BLOCK_TO_HF = dict(_BLOCK_MODULES)
_BLOCK_FROM_HF = {theirs: ours for ours, theirs in _BLOCK_MODULES}

_OUR_BLOCK = re.compile(r"encoder\.blocks\.(\d+)\.(\w+)\.(weight|bias)")
_THEIR_BLOCK = re.compile(r"bert\.encoder\.layer\.(\d+)\.(.+)\.(weight|bias)")

TIED_WEIGHT = "cls.predictions.decoder.weight"
"""A copy of the token embedding, stored by some writers."""

TIED_BIAS = "cls.predictions.decoder.bias"
"""A copy of ``cls.predictions.bias``, stored by some writers."""

POSITION_IDS = "bert.embeddings.position_ids"
"""0, 1, 2, ...: a buffer that old checkpoints store."""

HEAD_NORM = "head_norm."
"""How the names of a head norm's tensors begin."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Slot:
    """Where a stored tensor goes: a parameter of ours, or a third of one."""

    name: str
    """Our parameter."""

    part: int
    """Which equal share of its rows, from 0."""


def to_hf(name: str) -> tuple[str, ...]:
    """Names of the tensors that hold our parameter, in the order of its rows.

    Raises:
        KeyError: The table has no such parameter, which is a mistake of ours.
    """
    if name.startswith(HEAD_NORM):
        return (name,)
    if name == "bias":
        return ("cls.predictions.bias",)
    if match := _OUR_BLOCK.fullmatch(name):
        layer, module, kind = match.groups()
        modules = _QKV if module == "qkv" else (_BLOCK_TO_HF[module],)
        return tuple(f"bert.encoder.layer.{layer}.{theirs}.{kind}" for theirs in modules)
    module, _, kind = name.rpartition(".")
    return (f"{_TO_HF[module]}.{kind}",)


def from_hf(stored_name: str) -> Slot | None:
    """Where a stored tensor goes; None for one that a model of ours has no place for."""
    name = canonical(stored_name)
    if name == "cls.predictions.bias":
        return Slot(name="bias", part=0)
    if match := _THEIR_BLOCK.fullmatch(name):
        layer, theirs, kind = match.groups()
        if theirs in _QKV:
            return Slot(name=f"encoder.blocks.{layer}.qkv.{kind}", part=_QKV.index(theirs))
        if theirs in _BLOCK_FROM_HF:
            ours = _BLOCK_FROM_HF[theirs]
            return Slot(name=f"encoder.blocks.{layer}.{ours}.{kind}", part=0)
        return None
    module, _, kind = name.rpartition(".")
    if module in _FROM_HF and kind in ("weight", "bias"):
        return Slot(name=f"{_FROM_HF[module]}.{kind}", part=0)
    return None


def canonical(stored_name: str) -> str:
    """The name as `transformers` writes it today.

    Checkpoints of a bare `BertModel` lack the ``bert.`` prefix, and those converted from
    TensorFlow call a LayerNorm's parameters gamma and beta.
    """
    name = stored_name.removeprefix("module.")
    if name.startswith(("embeddings.", "encoder.", "pooler.")):
        name = f"bert.{name}"
    if name.endswith(".LayerNorm.gamma"):
        return name.removesuffix("gamma") + "weight"
    if name.endswith(".LayerNorm.beta"):
        return name.removesuffix("beta") + "bias"
    return name
