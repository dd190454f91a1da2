"""Tagging words has the loss and the gradients of transformers' head, however it is cut."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor

from bertsmith.batch import MaskedBatch, pack, to_padded
from bertsmith.hf import load_token_classifier, save_model
from bertsmith.hf.keys import to_hf
from bertsmith.model.objectives import CrossEntropy

BOUND = 1e-5
LENGTHS = (5, 17, 3, 9, 12)
NAMES = ("O", "B-A", "I-A")


def reference(folder: Path) -> Any:
    torch.manual_seed(3)
    config = transformers.BertConfig(
        vocab_size=61,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=48,
        max_position_embeddings=37,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        num_labels=len(NAMES),
        id2label=dict(enumerate(NAMES)),
        label2id={name: i for i, name in enumerate(NAMES)},
        initializer_range=0.2,
    )
    model = transformers.BertForTokenClassification(config).train()
    model.save_pretrained(folder)
    return model


def batch() -> tuple[MaskedBatch, Tensor]:
    """Every third token is no first piece; and the labels as transformers takes them, packed."""
    generator = torch.Generator().manual_seed(2)
    inputs = pack([torch.randint(1, 61, (n,), generator=generator) for n in LENGTHS])
    labels_T = torch.randint(0, len(NAMES), (sum(LENGTHS),), generator=generator)
    labels_T[::3] = -100
    positions_M = (labels_T >= 0).nonzero().flatten()
    return MaskedBatch(
        inputs=inputs, positions_M=positions_M, targets_M=labels_T[positions_M]
    ), labels_T


def padded(batch: MaskedBatch) -> dict[str, Tensor]:
    inputs = batch.inputs
    return {
        "input_ids": to_padded(inputs.input_ids_T, inputs.starts_N1),
        "attention_mask": to_padded(torch.ones_like(inputs.input_ids_T), inputs.starts_N1),
    }


def padded_labels(labels_T: Tensor) -> Tensor:
    rows = torch.full((len(LENGTHS), max(LENGTHS)), -100)
    for i, part in enumerate(torch.split(labels_T, list(LENGTHS))):
        rows[i, : len(part)] = part
    return rows


def test_loss_and_gradients_are_those_of_transformers_in_passes_of_any_size(
    tmp_path: Path,
) -> None:
    theirs = reference(tmp_path)
    model, report = load_token_classifier(tmp_path, labels=NAMES)
    assert report.new == ()
    ours, labels_T = batch()
    loss = theirs(**padded(ours), labels=padded_labels(labels_T)).loss
    loss.backward()
    expected = {name: p.grad for name, p in theirs.named_parameters()}
    for max_tokens in (1000, 17):
        model.zero_grad()
        parts = [model(part, dropout_seed=None) for part in ours.cut(max_tokens)]
        total = sum(part.nats for part in parts) / sum(part.num_targets for part in parts)
        assert isinstance(total, Tensor)
        torch.autograd.backward(total)
        torch.testing.assert_close(total.detach(), loss.detach(), atol=BOUND, rtol=BOUND)
        for name, parameter in model.named_parameters():
            names = to_hf(name)
            assert parameter.grad is not None
            for their_name, grad in zip(names, parameter.grad.chunk(len(names)), strict=True):
                torch.testing.assert_close(grad, expected[their_name], atol=BOUND, rtol=1e-4)


def test_weights_of_tags_make_a_weighted_mean_in_passes_of_any_size(tmp_path: Path) -> None:
    """Expected from torch's own loss on transformers' scores."""
    theirs = reference(tmp_path)
    weights_C, smoothing = (0.5, 3.0, 2.0), 0.1
    objective = CrossEntropy(class_weights_C=weights_C, label_smoothing=smoothing)
    model, _ = load_token_classifier(tmp_path, labels=NAMES, objective=objective)
    ours, labels_T = batch()
    ours = replace(ours, weights_M=objective.weights(ours.targets_M))
    loss = torch.nn.functional.cross_entropy(
        theirs(**padded(ours)).logits.flatten(0, 1),
        padded_labels(labels_T).flatten(),
        weight=torch.tensor(weights_C),
        label_smoothing=smoothing,
    )
    torch.autograd.backward(loss)
    for max_tokens in (1000, 17):
        model.zero_grad()
        parts = ours.cut(max_tokens)
        total = sum(model(part, dropout_seed=None).nats for part in parts)
        total = total / sum(part.target_counts[0] for part in parts)
        assert isinstance(total, Tensor)
        torch.autograd.backward(total)
        torch.testing.assert_close(total.detach(), loss.detach(), atol=BOUND, rtol=BOUND)
        torch.testing.assert_close(
            model.classifier.weight.grad, theirs.classifier.weight.grad, atol=BOUND, rtol=1e-4
        )


def test_a_saved_folder_gives_transformers_the_same_scores(tmp_path: Path) -> None:
    reference(tmp_path / "theirs")
    model, _ = load_token_classifier(tmp_path / "theirs", labels=NAMES)
    save_model(tmp_path / "ours", model, labels=NAMES)
    loaded = transformers.AutoModelForTokenClassification.from_pretrained(tmp_path / "ours").eval()
    assert loaded.config.architectures == ["BertForTokenClassification"]
    assert loaded.config.id2label == dict(enumerate(NAMES))
    ours, _ = batch()
    with torch.no_grad():
        logits = loaded(**padded(ours)).logits
    packed = torch.cat([row[:n] for row, n in zip(logits, LENGTHS, strict=True)])
    torch.testing.assert_close(
        model.scores_MC(ours.inputs, ours.positions_M),
        packed[ours.positions_M],
        atol=BOUND,
        rtol=BOUND,
    )
