"""What is loaded, new and dropped is said; an encoder is loaded wholly or refused."""

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor

from bertsmith.errors import UserError
from bertsmith.hf import (
    check_vocabulary,
    load_classifier,
    load_encoder,
    load_masked_lm,
    load_paired_lm,
)
from bertsmith.model.config import EncoderConfig
from bertsmith.model.heads import MaskedLM, SequenceClassifier, initialize

Change = Callable[[dict[str, Tensor]], dict[str, Tensor]]


def rewrite(folder: Path, change: Change) -> None:
    """Change the stored tensors of a folder."""
    file = folder / "model.safetensors"
    save_file(change(load_file(file)), file, metadata={"format": "pt"})


def reconfigure(folder: Path, **changes: object) -> None:
    """Change keys of a folder's config.json."""
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def test_one_line_says_what_was_loaded_new_and_dropped(
    masked_lm_folder: Path, classifier: SequenceClassifier
) -> None:
    model, report = load_classifier(masked_lm_folder, labels=["a", "b"], seed=3)
    num_values = sum(p.numel() for p in model.encoder.parameters())
    assert report.num_loaded_values == num_values
    assert report.new == ("pooler", "classifier")
    assert str(report) == (
        f"loaded 37 tensors ({num_values / 1e6:.1f} M parameters) from {masked_lm_folder}; "
        "newly initialised: pooler, classifier; dropped: cls.predictions.bias, "
        "cls.predictions.transform.LayerNorm.bias, cls.predictions.transform.LayerNorm.weight, "
        "cls.predictions.transform.dense.bias and 1 more"
    )


def test_new_parts_equal_those_of_a_wholly_new_model_of_the_same_seed(
    masked_lm_folder: Path, classifier_folder: Path, tiny_config: EncoderConfig
) -> None:
    fresh = SequenceClassifier(tiny_config, num_labels=2)
    initialize(fresh, config=tiny_config, seed=3)
    model, _ = load_classifier(masked_lm_folder, labels=["a", "b"], seed=3)
    assert torch.equal(model.pooler.weight, fresh.pooler.weight)
    assert torch.equal(model.classifier.weight, fresh.classifier.weight)
    other, _ = load_classifier(masked_lm_folder, labels=["a", "b"], seed=4)
    assert not torch.equal(other.classifier.weight, fresh.classifier.weight)

    fresh_lm = MaskedLM(tiny_config)
    initialize(fresh_lm, config=tiny_config, seed=3)
    lm, report = load_masked_lm(classifier_folder, seed=3)
    assert report.new == ("transform", "norm", "bias")
    assert torch.equal(lm.transform.weight, fresh_lm.transform.weight)
    assert torch.equal(lm.norm.weight, torch.ones(12))
    assert torch.equal(lm.bias, torch.zeros(tiny_config.vocab_size))


def test_loading_leaves_the_global_generator_alone(masked_lm_folder: Path) -> None:
    torch.manual_seed(0)
    expected = torch.rand(1)
    torch.manual_seed(0)
    load_classifier(masked_lm_folder, labels=["a", "b"], seed=3)
    assert torch.equal(torch.rand(1), expected)


def test_a_stored_head_is_kept_for_its_own_labels_only(
    classifier: SequenceClassifier, classifier_folder: Path
) -> None:
    same, report = load_classifier(classifier_folder, labels=["bad", "good", "so-so"], seed=3)
    assert report.new == ()
    assert torch.equal(same.classifier.weight, classifier.classifier.weight)
    other, report = load_classifier(classifier_folder, labels=["good", "bad", "so-so"], seed=3)
    assert report.new == ("classifier",)
    assert report.dropped == ("classifier.bias", "classifier.weight")
    assert torch.equal(other.pooler.weight, classifier.pooler.weight)
    assert not torch.equal(other.classifier.weight, classifier.classifier.weight)


def test_a_stored_head_whose_names_are_unusable_is_replaced(classifier_folder: Path) -> None:
    reconfigure(classifier_folder, id2label={"0": "a"})
    _, report = load_classifier(classifier_folder, labels=["a", "b"], seed=3)
    assert report.new == ("classifier",)
    reconfigure(classifier_folder, id2label=None, problem_type="multi_label_classification")
    _, report = load_classifier(classifier_folder, labels=["LABEL_0", "LABEL_1", "LABEL_2"])
    assert report.new == ("classifier",)


def test_a_head_without_names_has_those_transformers_implies(
    classifier: SequenceClassifier, classifier_folder: Path
) -> None:
    reconfigure(classifier_folder, id2label=None)
    model, _ = load_classifier(classifier_folder, labels=["LABEL_0", "LABEL_1", "LABEL_2"])
    assert torch.equal(model.classifier.weight, classifier.classifier.weight)


def test_a_model_without_a_head_for_the_task_is_refused(
    masked_lm_folder: Path, classifier_folder: Path
) -> None:
    with pytest.raises(UserError, match="holds no classifier, only an encoder; run"):
        load_classifier(masked_lm_folder, labels=None)
    reconfigure(classifier_folder, problem_type="regression")
    with pytest.raises(UserError, match="its regression head gives 3 numbers a text"):
        load_classifier(classifier_folder, labels=None)
    reconfigure(classifier_folder, problem_type="ranking")
    with pytest.raises(UserError, match="problem_type is ranking; bertsmith reads single_label"):
        load_classifier(classifier_folder, labels=None)
    reconfigure(classifier_folder, problem_type=None, id2label={"0": "a"})
    with pytest.raises(UserError, match="names 1 classes but the classifier has 3"):
        load_classifier(classifier_folder, labels=None)


def test_half_a_classifier_is_refused_when_it_is_to_be_used(classifier_folder: Path) -> None:
    rewrite(
        classifier_folder, lambda t: {k: v for k, v in t.items() if k != "bert.pooler.dense.bias"}
    )
    with pytest.raises(UserError, match=r"lacks part of its classifier \(pooler\)"):
        load_classifier(classifier_folder, labels=None)


def test_dropout_can_be_overridden(masked_lm_folder: Path) -> None:
    model, _ = load_masked_lm(
        masked_lm_folder, seed=0, hidden_dropout_prob=0.3, attention_probs_dropout_prob=0.0
    )
    assert model.encoder.config.hidden_dropout_prob == 0.3
    assert model.encoder.config.attention_probs_dropout_prob == 0.0


def test_a_dropout_of_the_head_that_is_not_followed_is_said(classifier_folder: Path) -> None:
    reconfigure(classifier_folder, classifier_dropout=0.5)
    _, report = load_classifier(classifier_folder, labels=None)
    assert "classifier_dropout 0.5 is not followed" in str(report)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_other_float_types_are_read_into_float32(
    masked_lm_folder: Path, dtype: torch.dtype
) -> None:
    before, _ = load_masked_lm(masked_lm_folder, seed=0)
    rewrite(masked_lm_folder, lambda t: {name: v.to(dtype) for name, v in t.items()})
    after, _ = load_masked_lm(masked_lm_folder, seed=0)
    for ours, original in zip(after.parameters(), before.parameters(), strict=True):
        assert ours.dtype == torch.float32
        assert torch.equal(ours, original.to(dtype).float())


def old_style(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """As the first conversions from TensorFlow stored them, next-sentence head and all."""
    renamed = {
        name.replace("LayerNorm.weight", "LayerNorm.gamma").replace(
            "LayerNorm.bias", "LayerNorm.beta"
        ): values
        for name, values in tensors.items()
    }
    return renamed | {
        "bert.embeddings.position_ids": torch.arange(16)[None],
        "cls.predictions.decoder.weight": tensors["bert.embeddings.word_embeddings.weight"].clone(),
        "cls.seq_relationship.weight": torch.zeros(2, 12),
        "cls.seq_relationship.bias": torch.zeros(2),
    }


def test_old_checkpoints_load_and_their_second_head_is_dropped(
    masked_lm: MaskedLM, masked_lm_folder: Path
) -> None:
    rewrite(masked_lm_folder, old_style)
    model, report = load_masked_lm(masked_lm_folder, seed=0)
    assert report.new == ()
    assert report.dropped == ("cls.seq_relationship.bias", "cls.seq_relationship.weight")
    for ours, original in zip(model.parameters(), masked_lm.parameters(), strict=True):
        assert torch.equal(ours, original)


def test_a_pretraining_checkpoint_of_transformers_loads(
    tiny_config: EncoderConfig, tmp_path: Path
) -> None:
    theirs = transformers.BertForPreTraining(
        transformers.BertConfig(**dataclasses.asdict(tiny_config))
    )
    theirs.save_pretrained(tmp_path / "theirs")
    model, report = load_masked_lm(tmp_path / "theirs", seed=0)
    assert report.new == ()
    assert set(report.dropped) == {
        "bert.pooler.dense.weight",
        "bert.pooler.dense.bias",
        "cls.seq_relationship.weight",
        "cls.seq_relationship.bias",
    }
    assert torch.equal(
        model.encoder.embeddings.token.weight, theirs.bert.embeddings.word_embeddings.weight
    )
    paired, report = load_paired_lm(tmp_path / "theirs", seed=0)
    assert report.new == report.dropped == ()
    assert torch.equal(paired.pooler.weight, theirs.bert.pooler.dense.weight)
    assert torch.equal(paired.relation.weight, theirs.cls.seq_relationship.weight)


def test_the_head_for_pairs_is_new_where_a_checkpoint_has_none(masked_lm_folder: Path) -> None:
    model, report = load_paired_lm(masked_lm_folder, seed=3)
    assert report.new == ("pooler", "relation")
    again, _ = load_paired_lm(masked_lm_folder, seed=3)
    assert torch.equal(model.relation.weight, again.relation.weight)
    assert not torch.equal(
        model.relation.weight, load_paired_lm(masked_lm_folder, seed=4)[0].relation.weight
    )


def test_a_bias_stored_only_as_the_decoders_is_found(
    masked_lm: MaskedLM, masked_lm_folder: Path
) -> None:
    rewrite(
        masked_lm_folder,
        lambda t: {k.replace("predictions.bias", "predictions.decoder.bias"): t[k] for k in t},
    )
    model, report = load_masked_lm(masked_lm_folder, seed=0)
    assert report.new == ()
    assert torch.equal(model.bias, masked_lm.bias)


WORD = "bert.embeddings.word_embeddings.weight"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda t: {k: v for k, v in t.items() if "layer.1.output.dense" not in k},
            "2 of 37 tensors are missing: bert.encoder.layer.1.output.dense.weight",
        ),
        (
            lambda t: {k: v for k, v in t.items() if "layer.1." not in k},
            "config.json says num_hidden_layers 2 but the weights have 1",
        ),
        (
            lambda t: t | {WORD: torch.zeros(7, 12)},
            f"{WORD} is [7, 12], expected [11, 12]",
        ),
        (
            lambda t: t | {"cls.predictions.bias": torch.zeros(7)},
            "cls.predictions.bias is [7], expected [11]",
        ),
        (lambda t: t | {WORD: t[WORD].long()}, "is not stored as fp16, bf16, fp32 or fp64"),
        (lambda t: t | {WORD: t[WORD] / 0}, f"{WORD} holds NaN or infinite values"),
        (
            lambda t: t | {"embeddings.word_embeddings.weight": t[WORD].clone()},
            f"holds {WORD} twice, as {WORD} and embeddings.word_embeddings.weight",
        ),
        (
            lambda t: t | {"cls.predictions.decoder.weight": t[WORD] + 1},
            "cls.predictions.decoder.weight differs from the token embedding",
        ),
    ],
)
def test_what_does_not_fit_is_refused_by_name(
    change: Change, message: str, masked_lm_folder: Path
) -> None:
    rewrite(masked_lm_folder, change)
    with pytest.raises(UserError) as raised:
        load_masked_lm(masked_lm_folder, seed=0)
    assert message in str(raised.value)
    assert str(masked_lm_folder) in str(raised.value)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    "changes",
    [
        {"num_hidden_layers": 10**12},
        {"vocab_size": 10**15},
        {"hidden_size": 3 * 10**9},
        {"max_position_embeddings": 2**62, "hidden_size": 2**40, "num_attention_heads": 1},
    ],
)
def test_a_config_that_asks_for_more_than_is_stored_is_refused_before_memory_is_given(
    changes: dict[str, object], masked_lm_folder: Path
) -> None:
    reconfigure(masked_lm_folder, **changes)
    with pytest.raises(UserError, match="do not belong together"):
        load_encoder(masked_lm_folder)


def test_a_tokenizer_larger_than_the_vocabulary_is_refused(tiny_config: EncoderConfig) -> None:
    check_vocabulary(tiny_config, num_tokens=11, where="tok")
    check_vocabulary(tiny_config, num_tokens=9, where="tok")
    with pytest.raises(UserError, match="tok: the tokenizer has 12 tokens but the model embeds 11"):
        check_vocabulary(tiny_config, num_tokens=12, where="tok")
