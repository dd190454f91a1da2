"""The model that pretraining starts from: a preset, a config, a checkpoint, or the run's own."""

from dataclasses import replace
from pathlib import Path

import torch

from bertsmith.data.config import has_pairs
from bertsmith.data.tokenizer import Vocab, load_tokenizer
from bertsmith.errors import UserError
from bertsmith.hf import (
    LoadReport,
    check_vocabulary,
    load_masked_lm,
    load_paired_lm,
    read_config,
    resolve,
)
from bertsmith.model.config import PRESETS, EncoderConfig
from bertsmith.model.heads import MaskedLM, PairedLM, initialize
from bertsmith.recipes.config import PretrainConfig
from bertsmith.say import Say


def make_masked_lm(
    config: PretrainConfig,
    vocab: Vocab,
    *,
    tokenizer_folder: Path,
    checkpoint: Path | None,
    say: Say,
) -> MaskedLM:
    """The model, with weights.

    Args:
        config: Names it, and may override its dropout.
        vocab: Of the prepared data; a new model gets its size from it.
        tokenizer_folder: The data's tokenizer, which a checkpoint's must equal.
        checkpoint: The run's own to go on from; None for a new run.
        say: Told in a line what was loaded and what is new.

    Raises:
        UserError: The model cannot be had, or does not fit the data.
    """
    model: MaskedLM
    if checkpoint is not None:
        model, _ = load_for(config, checkpoint)
        return model
    longest = config.packing.max_sequence_tokens
    shape = new_shape(config.model, vocab, longest=longest)
    if shape is None:
        folder = resolve(config.model)
        model, report = load_for(config, folder)
        check_same_tokenizer(folder, tokenizer_folder, say=say)
        say(str(report))
    else:
        if config.hidden_dropout_prob is not None:
            shape = replace(shape, hidden_dropout_prob=config.hidden_dropout_prob)
        if config.attention_probs_dropout_prob is not None:
            shape = replace(shape, attention_probs_dropout_prob=config.attention_probs_dropout_prob)
        with torch.random.fork_rng(devices=[]):  # torch's own start is overwritten
            model = (PairedLM if has_pairs(config.objective) else MaskedLM)(shape)
        initialize(model, config=shape, seed=config.seed)
        say(f"model: all weights are new, from seed {config.seed}")
    check_vocabulary(model.encoder.config, num_tokens=vocab.size, where=str(tokenizer_folder))
    positions = model.encoder.config.max_position_embeddings
    if longest > positions:
        raise UserError(
            f"--packing.max_sequence_tokens {longest}: the model has {positions} positions; give "
            "at most that"
        )
    if has_pairs(config.objective) and model.encoder.config.type_vocab_size < 2:
        raise UserError(
            f"--objective {config.objective}: the model has a single token type "
            "(type_vocab_size), where two segments need two; give another --model, or --objective "
            "mlm"
        )
    return model


def load_for(config: PretrainConfig, folder: Path) -> tuple[MaskedLM, LoadReport]:
    """A model with the heads that the objective trains; what the folder lacks of them is new.

    Raises:
        UserError: The folder cannot be read.
    """
    load = load_paired_lm if has_pairs(config.objective) else load_masked_lm
    return load(
        folder,
        seed=config.seed,
        hidden_dropout_prob=config.hidden_dropout_prob,
        attention_probs_dropout_prob=config.attention_probs_dropout_prob,
    )


def new_shape(model: str, vocab: Vocab, *, longest: int) -> EncoderConfig | None:
    """The shape of a model from scratch; None if `model` names a checkpoint.

    A preset takes its vocabulary from the data and has positions for the longest sequence. A
    config.json is taken as it is.
    """
    if model in PRESETS:
        return replace(
            PRESETS[model],
            vocab_size=vocab.size,
            max_position_embeddings=max(PRESETS[model].max_position_embeddings, longest),
            pad_token_id=vocab.pad_id,
        )
    return read_config(Path(model)) if model.endswith(".json") else None


def check_same_tokenizer(model_folder: Path, data_tokenizer_folder: Path, *, say: Say) -> None:
    """Refuse data whose ids mean other tokens than the checkpoint's.

    A checkpoint without a tokenizer cannot be checked beyond the vocabulary's size, and one that
    normalises text otherwise (its case, say) is used all the same; both are said.

    Raises:
        UserError: An id stands for another token, or a special token has another id.
    """
    if not any((model_folder / name).exists() for name in ("tokenizer.json", "vocab.txt")):
        say(f"{model_folder}: holds no tokenizer, so only the size of its vocabulary is checked")
        return
    theirs, ours = load_tokenizer(model_folder), load_tokenizer(data_tokenizer_folder)
    advice = f"prepare the text with --tokenizer {model_folder}"
    for role in ("pad_id", "unk_id", "cls_id", "sep_id", "mask_id"):
        mine, other = getattr(ours.vocab, role), getattr(theirs.vocab, role)
        if mine != other:
            name = role.removesuffix("_id")
            raise UserError(
                f"{model_folder}: its {name} token has id {other}, the data's has {mine}; {advice}"
            )
    known = theirs.tokenizer.get_vocab()
    wrong = sorted((i, t) for t, i in ours.tokenizer.get_vocab().items() if known.get(t) != i)
    if wrong:
        token_id, token = wrong[0]
        raise UserError(
            f"{model_folder}: its tokenizer is not the data's ({len(wrong):,} tokens differ, first "
            f"{token!r} with id {token_id}); {advice}"
        )
    if theirs.vocab.fingerprint != ours.vocab.fingerprint:
        say(f"{model_folder}: same tokens as the data's, but text is split in another way")
