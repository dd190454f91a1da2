"""Each kind of task has the loss and the gradients of transformers' head, and a folder it loads."""

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

from bertsmith.batch import LabelledBatch, pack, to_padded
from bertsmith.hf import load_classifier, read_labels, save_model
from bertsmith.hf.keys import to_hf
from bertsmith.model.objectives import ProblemType

BOUND = 1e-5
LENGTHS = (5, 17, 3, 9, 12)
KINDS: tuple[tuple[ProblemType, int], ...] = (
    ("single_label_classification", 3),
    ("multi_label_classification", 4),
    ("regression", 1),
)


def reference(folder: Path, problem_type: str, num_labels: int) -> Any:
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
        num_labels=num_labels,
        initializer_range=0.2,
        problem_type=problem_type,
    )
    model = transformers.BertForSequenceClassification(config).train()
    model.save_pretrained(folder)
    return model


def targets_of(problem_type: str, num_labels: int) -> Tensor:
    generator = torch.Generator().manual_seed(5)
    count = len(LENGTHS)
    match problem_type:
        case "regression":
            return torch.randn(count, generator=generator) * 3
        case "multi_label_classification":
            return torch.randint(0, 2, (count, num_labels), generator=generator).float()
        case _:
            return torch.randint(0, num_labels, (count,), generator=generator)


def batch_of(targets: Tensor) -> tuple[LabelledBatch, dict[str, Tensor]]:
    """The same sequences packed, and padded as transformers takes them."""
    generator = torch.Generator().manual_seed(2)
    inputs = pack([torch.randint(1, 61, (n,), generator=generator) for n in LENGTHS])
    padded = {
        "input_ids": to_padded(inputs.input_ids_T, inputs.starts_N1),
        "attention_mask": to_padded(torch.ones_like(inputs.input_ids_T), inputs.starts_N1),
    }
    return LabelledBatch(inputs=inputs, labels_N=targets, rows_N=torch.arange(len(LENGTHS))), padded


def assert_near(actual: Tensor, expected: Tensor) -> None:
    actual, expected = actual.detach(), expected.detach()
    assert float((actual - expected).abs().max()) <= BOUND * float(expected.abs().max())


@pytest.mark.parametrize(("problem_type", "num_labels"), KINDS)
def test_loss_and_gradients_equal_those_of_their_head(
    tmp_path: Path, problem_type: ProblemType, num_labels: int
) -> None:
    theirs = reference(tmp_path, problem_type, num_labels)
    ours, report = load_classifier(tmp_path, labels=None)
    assert (report.new, report.dropped) == ((), ())
    assert ours.objective.problem_type == problem_type
    batch, padded = batch_of(targets_of(problem_type, num_labels))
    loss = ours(batch, dropout_seed=1)
    mean = loss.nats / batch.target_counts[0]
    expected = theirs(**padded, labels=batch.labels_N)
    assert_near(mean, expected.loss)
    mean.backward()
    expected.loss.backward()
    grads = {name: p.grad for name, p in theirs.named_parameters() if p.grad is not None}
    for name, parameter in ours.named_parameters():
        assert isinstance(parameter, nn.Parameter)
        assert parameter.grad is not None
        assert_near(parameter.grad, torch.cat([grads[their_name] for their_name in to_hf(name)]))


@pytest.mark.parametrize(("problem_type", "num_labels"), KINDS)
def test_a_saved_folder_gives_the_same_outputs_and_loss_there(
    tmp_path: Path, problem_type: ProblemType, num_labels: int
) -> None:
    reference(tmp_path / "theirs", problem_type, num_labels)
    ours, _ = load_classifier(tmp_path / "theirs", labels=None)
    names = [f"name {i}" for i in range(num_labels)]
    save_model(tmp_path / "ours", ours, labels=names)
    loaded = transformers.AutoModelForSequenceClassification.from_pretrained(tmp_path / "ours")
    assert loaded.config.problem_type == problem_type
    assert loaded.config.id2label == dict(enumerate(names))
    batch, padded = batch_of(targets_of(problem_type, num_labels))
    with torch.no_grad():
        found = loaded.eval()(**padded, labels=batch.labels_N)
        assert_near(found.logits, ours.logits_NC(batch.inputs, dropout_seed=None))
        assert_near(found.loss, ours(batch, dropout_seed=None).nats / batch.target_counts[0])
    again, _ = load_classifier(tmp_path / "ours", labels=None)
    assert again.objective == ours.objective
    assert read_labels(tmp_path / "ours", num_labels=num_labels) == tuple(names)
