"""`config.json`: from its keys to an `EncoderConfig`, and back to what `transformers` expects.

Only the keys named here are read. All others are left behind, so that none of them can ask for
code (``auto_map``, ``trust_remote_code``, ``_attn_implementation_internal``), and none of them
comes back when the model is saved.
"""

import dataclasses
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from bertsmith.errors import UserError
from bertsmith.model.config import Activation, EncoderConfig

CONFIG_NAME = "config.json"

SINGLE_LABEL = "single_label_classification"
"""The problem type of a classifier that gives each text one of several labels."""

REGRESSION = "regression"
"""The problem type of a head whose one score is a number."""

PROBLEM_TYPES = (SINGLE_LABEL, "multi_label_classification", REGRESSION)
"""What a head on the whole text may be for."""

OWN_MODEL_TYPE = "bertsmith-bert"
"""The model type of a BERT with a head that `transformers` has not: it refuses what it does not
know, where under its own name it would leave part of the head out and give other scores."""

Task = Literal["encoder", "masked_lm", "paired_lm", "classifier", "token_classifier", "span_model"]

_ARCHITECTURES: dict[Task, str] = {
    "encoder": "BertModel",
    "masked_lm": "BertForMaskedLM",
    "paired_lm": "BertForPreTraining",
    "classifier": "BertForSequenceClassification",
    "token_classifier": "BertForTokenClassification",
    "span_model": "BertForQuestionAnswering",
}

_INTEGERS = (
    "vocab_size",
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "intermediate_size",
    "max_position_embeddings",
    "type_vocab_size",
)
_NUMBERS = (
    "hidden_dropout_prob",
    "attention_probs_dropout_prob",
    "layer_norm_eps",
    "initializer_range",
)
_ACTIVATIONS: dict[str, Activation] = {
    "gelu": "gelu",
    "gelu_python": "gelu",
    "gelu_new": "gelu_new",
    "gelu_fast": "gelu_new",
    "gelu_pytorch_tanh": "gelu_new",
    "relu": "relu",
}
"""Their names of functions we have; the three tanh approximations differ in writing only."""

_DEFAULTS = EncoderConfig()


def model_part(where: Path) -> Path:
    """The `model/` of a run folder; any other path as it is."""
    inner = where / "model"
    is_run = not (where / CONFIG_NAME).exists() and (inner / CONFIG_NAME).exists()
    return inner if is_run else where


def read_config(path: Path) -> EncoderConfig:
    """The encoder that a `config.json`, or the one in a folder, describes.

    Raises:
        UserError: It is missing, no JSON, of another model type, or of a shape no model has.
    """
    file = path / CONFIG_NAME if path.is_dir() else path
    return parse_config(_read_json(file), where=str(file))


def read_labels(folder: Path, *, num_labels: int) -> tuple[str, ...]:
    """Names of a classifier's classes in the order of their ids.

    Args:
        folder: A model folder.
        num_labels: Classes of its head. Where the config names none they are LABEL_0,
            LABEL_1, ..., as in `transformers`.

    Raises:
        UserError: The names are not numbered 0, 1, 2, ... without a gap, or not as many.
    """
    file = folder / CONFIG_NAME
    table = _read_json(file).get("id2label")
    if table is None:
        return tuple(f"LABEL_{i}" for i in range(num_labels))
    try:
        assert isinstance(table, dict)
        names = {int(key): str(value) for key, value in table.items()}
        labels = tuple(names[i] for i in range(len(table)))
    except (AssertionError, KeyError, ValueError):
        raise UserError(
            f"{file}: id2label must map 0, 1, 2, ... to label names; it is {_short(table)}"
        ) from None
    if len(set(labels)) < len(labels):
        raise UserError(f"{file}: id2label gives two ids the same name: {_short(table)}")
    if len(labels) != num_labels:
        raise UserError(
            f"{file}: id2label names {len(labels)} classes but the classifier has {num_labels}"
        )
    return labels


def read_problem_type(folder: Path) -> str | None:
    """What kind of task a saved head was trained for, if the config says."""
    value = _read_json(folder / CONFIG_NAME).get("problem_type")
    return None if value is None else str(value)


def tags_tokens(folder: Path) -> bool:
    """Whether a saved model says of itself that its head gives every token a tag."""
    return _is_of(folder, "token_classifier")


def finds_answers(folder: Path) -> bool:
    """Whether a saved model says of itself that its head finds where an answer stands."""
    return _is_of(folder, "span_model")


def _is_of(folder: Path, task: Task) -> bool:
    named = _read_json(folder / CONFIG_NAME).get("architectures")
    return isinstance(named, list) and _ARCHITECTURES[task] in named


def is_own_model_type(folder: Path) -> bool:
    """Whether a saved model says of itself that `transformers` cannot compute it."""
    return _read_json(folder / CONFIG_NAME).get("model_type") == OWN_MODEL_TYPE


def read_head_dropout(folder: Path) -> float | None:
    """``classifier_dropout``: a dropout of the head alone, if the config sets one."""
    raw = _read_json(folder / CONFIG_NAME)
    if raw.get("classifier_dropout") is None:
        return None
    return _number(raw, "classifier_dropout", where=str(folder / CONFIG_NAME))


def parse_config(raw: Mapping[str, object], *, where: str) -> EncoderConfig:
    """An `EncoderConfig` from the parsed JSON; keys it does not know are left behind.

    Args:
        raw: The JSON object.
        where: Name of the file, for messages.

    Raises:
        UserError: See `read_config`.
    """
    model_type = raw.get("model_type")
    if model_type not in ("bert", OWN_MODEL_TYPE):
        raise UserError(
            f"{where}: model_type is {model_type!r}; bertsmith reads BERT checkpoints, "
            'whose model_type is "bert"'
        )
    for key in ("is_decoder", "add_cross_attention"):
        if raw.get(key):
            raise UserError(f"{where}: {key} is set; bertsmith reads encoders only")
    positions = raw.get("position_embedding_type", "absolute")
    if positions != "absolute":
        raise UserError(
            f"{where}: position_embedding_type is {positions!r}; "
            'bertsmith has "absolute" (learned positions) only'
        )
    read: dict[str, Any] = {key: _integer(raw, key, where=where) for key in _INTEGERS}
    read |= {key: _number(raw, key, where=where) for key in _NUMBERS}
    read["hidden_act"] = _activation(raw, where=where)
    if raw.get("pad_token_id") is not None:
        read["pad_token_id"] = _integer(raw, "pad_token_id", where=where)
    try:
        return EncoderConfig(**read)
    except ValueError as error:
        raise UserError(f"{where}: {error}") from None


def config_json(
    config: EncoderConfig,
    *,
    task: Task,
    labels: Sequence[str] | None,
    problem_type: str = SINGLE_LABEL,
    fits_transformers: bool = True,
) -> str:
    """The text of a `config.json` that `transformers` reads unchanged.

    Args:
        config: The encoder.
        task: Which class of theirs the weights belong to.
        labels: Class names in the order of their ids; a classifier's, None for others.
        problem_type: What a classifier's scores of texts mean: `transformers` picks the loss by it,
            and what its pipeline makes of the scores.
        fits_transformers: False if no class of theirs computes this model; they then refuse it.
    """
    has_labels = task in ("classifier", "token_classifier")
    assert (labels is not None) == has_labels, "a classifier has labels, no other does"
    architecture = _ARCHITECTURES[task]
    content: dict[str, object] = {
        "architectures": [architecture if fits_transformers else f"Bertsmith{architecture}"],
        "model_type": "bert" if fits_transformers else OWN_MODEL_TYPE,
        **dataclasses.asdict(config),
        "position_embedding_type": "absolute",
        "tie_word_embeddings": True,
        "dtype": "float32",
    }
    if labels is not None:
        content["id2label"] = {str(i): name for i, name in enumerate(labels)}
        content["label2id"] = {name: i for i, name in enumerate(labels)}
    if task == "classifier":
        content["problem_type"] = problem_type
    return json.dumps(content, indent=2, ensure_ascii=False) + "\n"


def _read_json(file: Path) -> dict[str, object]:
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(
            f"{file}: not found; a model folder holds {CONFIG_NAME} and model.safetensors"
        ) from None
    except OSError as error:
        raise UserError(f"{file}: cannot be read ({error.strerror})") from None
    except (ValueError, RecursionError) as error:
        raise UserError(f"{file}: is no JSON ({str(error)[:100]}); fetch it again") from None
    if not isinstance(content, dict):
        raise UserError(f"{file}: holds {_short(content)}; it must be a JSON object")
    return content


def _integer(raw: Mapping[str, object], key: str, *, where: str) -> int:
    value = raw.get(key, getattr(_DEFAULTS, key))
    if isinstance(value, bool) or not isinstance(value, int):
        raise UserError(f"{where}: {key} is {_short(value)}; it must be a whole number")
    return value


def _number(raw: Mapping[str, object], key: str, *, where: str) -> float:
    value = raw.get(key, getattr(_DEFAULTS, key, None))
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise UserError(f"{where}: {key} is {_short(value)}; it must be a number")
    return float(value)


def _activation(raw: Mapping[str, object], *, where: str) -> Activation:
    value = raw.get("hidden_act", _DEFAULTS.hidden_act)
    if not isinstance(value, str) or value not in _ACTIVATIONS:
        raise UserError(
            f"{where}: hidden_act is {_short(value)}; bertsmith has {', '.join(_ACTIVATIONS)}"
        )
    return _ACTIVATIONS[value]


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
