"""Read a model from a Hugging Face folder: the encoder wholly, a head wholly or not at all."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import cast

import torch
from torch import nn

from bertsmith.errors import UserError
from bertsmith.hf.config_json import (
    PROBLEM_TYPES,
    REGRESSION,
    SINGLE_LABEL,
    finds_answers,
    read_config,
    read_head_dropout,
    read_labels,
    read_problem_type,
    tags_tokens,
)
from bertsmith.hf.head import check_fold, open_head
from bertsmith.hf.hub import resolve
from bertsmith.hf.stored_model import LoadReport, StoredModel, listed
from bertsmith.model.config import EncoderConfig, HeadNorm
from bertsmith.model.encoder import Encoder
from bertsmith.model.heads import MaskedLM, PairedLM, SequenceClassifier
from bertsmith.model.objectives import CrossEntropy, Objective, ProblemType, plain_objective
from bertsmith.model.span_model import NUM_ENDS, SpanModel
from bertsmith.model.token_classifier import TokenClassifier


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
    checkpoint = StoredModel.open(folder, config)
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
    with torch.random.fork_rng(devices=[]):  # torch's own start is overwritten: leave no trace
        model = MaskedLM(config)
    return model, _fill_lm(model, folder, parts=(_LM_HEAD,), seed=seed)


def load_paired_lm(
    where: str | Path,
    *,
    seed: int,
    hidden_dropout_prob: float | None = None,
    attention_probs_dropout_prob: float | None = None,
) -> tuple[PairedLM, LoadReport]:
    """As `load_masked_lm`, with a pooler and a head for pairs; each is new where it is lacking."""
    folder = resolve(where)
    config = _config_of(folder, hidden_dropout_prob, attention_probs_dropout_prob)
    with torch.random.fork_rng(devices=[]):
        model = PairedLM(config)
    parts = (_LM_HEAD, ("pooler",), ("relation",))
    return model, _fill_lm(model, folder, parts=parts, seed=seed)


_LM_HEAD = ("transform", "norm", "bias")


def _fill_lm(
    model: MaskedLM, folder: Path, *, parts: Sequence[tuple[str, ...]], seed: int
) -> LoadReport:
    """Give a model what is stored, and check that its decoder may share the token table."""
    checkpoint = StoredModel.open(folder, model.encoder.config)
    report = checkpoint.fill(model, parts=parts, seed=seed)
    if not set(_LM_HEAD) & set(report.new):
        checkpoint.require_tied(model.encoder.embeddings.token.weight)
    return report


def load_classifier(
    where: str | Path,
    *,
    labels: Sequence[str] | None,
    objective: Objective | None = None,
    norm: HeadNorm | None = None,
    seed: int = 0,
    hidden_dropout_prob: float | None = None,
    attention_probs_dropout_prob: float | None = None,
) -> tuple[SequenceClassifier, LoadReport]:
    """An encoder with a classifier of texts, or another head whose scores are of the whole text.

    Args:
        where: A model folder or a hub name.
        labels: Names of the classes to tell apart, in the order of their ids. A stored head is
            kept if it was trained for just these and the same problem type, else it is new, and
            the report says so. None asks for the stored head as it is, whose names `read_labels`
            gives.
        objective: What the scores are learned to be; None: one of the classes, or what the stored
            head was trained for if that is asked for.
        norm: Of the head. Norm and classifier are kept together or new together; only a batch
            norm can be left out and its classifier kept, with the norm folded into it. None: the
            stored one.
        seed: A new pooler and head follow from it.
        hidden_dropout_prob: Overrides the checkpoint's.
        attention_probs_dropout_prob: Overrides the checkpoint's.

    Raises:
        UserError: As for `load_encoder`; also if labels is None and there is no such head to
            load, or the head file does not belong to the rest.
    """
    folder = resolve(where)
    config = _config_of(folder, hidden_dropout_prob, attention_probs_dropout_prob)
    plain = checkpoint = StoredModel.open(folder, config)
    head = open_head(folder)
    stored_norm: HeadNorm = "none" if head is None else head.norm
    norm = norm or stored_norm
    if head is not None and norm == stored_norm:
        checkpoint = checkpoint.with_head(head)
    num_stored = checkpoint.rows_of("classifier.weight")
    must_be_whole = labels is None
    objective = objective or (CrossEntropy() if labels is not None else None)
    keep_head = (
        labels is None
        or objective is None
        or _is_head_for(labels, objective.problem_type, folder, num_stored)
    )
    if labels is None:
        labels = _labels_to_use(folder, num_stored)
    objective = objective or plain_objective(_problem_type(folder, num_scores=len(labels)))
    with torch.random.fork_rng(devices=[]):
        model = SequenceClassifier(config, num_labels=len(labels), norm=norm, objective=objective)
    report = checkpoint.fill(
        model,
        parts=(("pooler",), ("classifier",) if norm == "none" else ("head_norm", "classifier")),
        unwanted=() if keep_head else ("classifier",),
        seed=seed,
    )
    if must_be_whole and report.new:
        raise UserError(
            f"{folder}: lacks part of its classifier ({listed(report.new)}); "
            "run `bertsmith finetune` on it first"
        )
    if head is not None and norm == "batch" and "classifier" not in report.new:
        check_fold(head, model, plain.plain_classifier())
    remarks = _remarks_on_head(folder, config, report, stored=stored_norm, norm=norm)
    return model, replace(report, remarks=remarks)


def load_token_classifier(
    where: str | Path,
    *,
    labels: Sequence[str] | None,
    objective: CrossEntropy | None = None,
    seed: int = 0,
    hidden_dropout_prob: float | None = None,
    attention_probs_dropout_prob: float | None = None,
) -> tuple[TokenClassifier, LoadReport]:
    """An encoder with a classifier of words.

    Args:
        where: A model folder or a hub name.
        labels: Names of the tags, in the order of their ids. A stored head is kept if it was
            trained for just these, else it is new. None asks for the stored head as it is.
        objective: What the scores are learned to be; None: cross-entropy, all tags alike.
        seed: A new head follows from it.
        hidden_dropout_prob: Overrides the checkpoint's.
        attention_probs_dropout_prob: Overrides the checkpoint's.

    Raises:
        UserError: As for `load_encoder`; also if labels is None and there is no such head.
    """
    folder = resolve(where)
    config = _config_of(folder, hidden_dropout_prob, attention_probs_dropout_prob)
    checkpoint = StoredModel.open(folder, config)
    num_stored = checkpoint.rows_of("classifier.weight") if tags_tokens(folder) else None
    keep_head = labels is None
    if labels is None:
        if num_stored is None:
            raise UserError(
                f"{folder}: holds no classifier of words; run `bertsmith finetune --task tokens` "
                "first"
            )
        labels = read_labels(folder, num_labels=num_stored)
    elif num_stored is not None:
        keep_head = _has_names(labels, folder, num_stored)
    with torch.random.fork_rng(devices=[]):
        model = TokenClassifier(config, num_labels=len(labels), objective=objective)
    report = checkpoint.fill(
        model,
        parts=(("classifier",),),
        unwanted=() if keep_head else ("classifier",),
        seed=seed,
    )
    remarks = _remarks_on_head(folder, config, report, stored="none", norm="none")
    return model, replace(report, remarks=remarks)


def load_span_model(
    where: str | Path,
    *,
    is_ready: bool = False,
    seed: int = 0,
    hidden_dropout_prob: float | None = None,
    attention_probs_dropout_prob: float | None = None,
) -> tuple[SpanModel, LoadReport]:
    """An encoder with a head that finds answers, which is new where the checkpoint lacks it.

    Args:
        where: A model folder or a hub name.
        is_ready: Whether the head must be there, and be one that was trained for this.
        seed: A new head follows from it.
        hidden_dropout_prob: Overrides the checkpoint's.
        attention_probs_dropout_prob: Overrides the checkpoint's.

    Raises:
        UserError: As for `load_encoder`; also if the head must be there and is not.
    """
    folder = resolve(where)
    config = _config_of(folder, hidden_dropout_prob, attention_probs_dropout_prob)
    checkpoint = StoredModel.open(folder, config)
    if is_ready and not finds_answers(folder):
        raise UserError(
            f"{folder}: holds no model that finds answers; run `bertsmith finetune --task "
            "questions` first"
        )
    num_stored = checkpoint.rows_of("span_scores.weight")
    if num_stored not in (None, NUM_ENDS):
        raise UserError(
            f"{folder}: its qa_outputs gives {num_stored} scores a token; bertsmith reads heads "
            f"that give {NUM_ENDS}, of an answer's first and last"
        )
    with torch.random.fork_rng(devices=[]):
        model = SpanModel(config)
    report = checkpoint.fill(model, parts=(("span_scores",),), seed=seed)
    if is_ready and report.new:
        raise UserError(
            f"{folder}: lacks part of its head ({listed(report.new)}); run `bertsmith finetune` "
            "on it first"
        )
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
    if read_problem_type(folder) not in (None, *PROBLEM_TYPES):
        raise UserError(
            f"{folder}: problem_type is {read_problem_type(folder)}; bertsmith reads "
            f"{', '.join(PROBLEM_TYPES)}"
        )
    if read_problem_type(folder) == REGRESSION and num_stored != 1:
        raise UserError(
            f"{folder}: its regression head gives {num_stored} numbers a text; bertsmith reads "
            "heads that give one"
        )
    return read_labels(folder, num_labels=num_stored)


def _problem_type(folder: Path, *, num_scores: int) -> ProblemType:
    """What a stored head was trained for; where its config does not say, as `transformers` does."""
    stored = read_problem_type(folder)
    if stored is not None:
        return cast(ProblemType, stored)
    return "regression" if num_scores == 1 else "single_label_classification"


def _is_head_for(
    labels: Sequence[str], problem_type: ProblemType, folder: Path, num_stored: int | None
) -> bool:
    """Whether a stored head was trained for just these classes, in this order."""
    if num_stored is None or (read_problem_type(folder) or SINGLE_LABEL) != problem_type:
        return False
    if problem_type == REGRESSION:  # the name of a number says nothing about it
        return num_stored == 1
    return _has_names(labels, folder, num_stored)


def _has_names(labels: Sequence[str], folder: Path, num_stored: int) -> bool:
    """Whether a stored head's classes have just these names, in this order."""
    try:
        return read_labels(folder, num_labels=num_stored) == tuple(labels)
    except UserError:  # names that cannot be used belong to a head that is replaced
        return False


def _remarks_on_head(
    folder: Path, config: EncoderConfig, report: LoadReport, *, stored: HeadNorm, norm: HeadNorm
) -> tuple[str, ...]:
    """What of a stored head is not as it was."""
    remarks = []
    if stored == "batch" and norm == "none" and "classifier" not in report.new:
        remarks.append("the head's batch norm is folded into its classifier")
    head_dropout = read_head_dropout(folder)
    if head_dropout not in (None, config.hidden_dropout_prob):
        remarks.append(
            f"classifier_dropout {head_dropout} is not followed: the head uses "
            f"hidden_dropout_prob {config.hidden_dropout_prob}"
        )
    return tuple(remarks)
