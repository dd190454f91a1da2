"""Finding answers has the loss and the gradients of transformers' head, however it is cut."""

from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor

from bertsmith.batch import LabelledBatch, pack, to_padded
from bertsmith.hf import load_span_model, save_model
from bertsmith.hf.keys import to_hf
from bertsmith.model.span_model import span_nats

BOUND = 1e-5
LENGTHS = (7, 17, 6, 9, 12)
QUESTION = 3
"""Tokens before a window's context, [CLS] included."""


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
        initializer_range=0.2,
    )
    model = transformers.BertForQuestionAnswering(config).train()
    model.save_pretrained(folder)
    return model


def batch() -> LabelledBatch:
    generator = torch.Generator().manual_seed(2)
    segments = [torch.tensor([0] * QUESTION + [1] * (n - QUESTION)) for n in LENGTHS]
    inputs = pack(
        [torch.randint(1, 61, (n,), generator=generator) for n in LENGTHS], segments=segments
    )
    return LabelledBatch(
        inputs=inputs,
        labels_N=torch.tensor([[3, 5], [0, 0], [4, 4], [8, 8], [5, 10]]),
        rows_N=torch.arange(len(LENGTHS)),
    )


def padded(batch: LabelledBatch) -> dict[str, Tensor]:
    inputs = batch.inputs
    return {
        "input_ids": to_padded(inputs.input_ids_T, inputs.starts_N1),
        "token_type_ids": to_padded(inputs.segment_ids_T, inputs.starts_N1),
        "attention_mask": to_padded(torch.ones_like(inputs.input_ids_T), inputs.starts_N1),
    }


def test_loss_and_gradients_are_those_of_transformers_in_passes_of_any_size(
    tmp_path: Path,
) -> None:
    theirs = reference(tmp_path)
    model, report = load_span_model(tmp_path)
    assert report.new == ()
    ours = batch()
    # One at a time: of a padded batch transformers takes the softmax over the padding, too.
    losses = []
    for part in ours.cut(1):
        first, last = part.labels_N.T
        losses.append(theirs(**padded(part), start_positions=first, end_positions=last).loss)
    loss = torch.stack(losses).mean()
    torch.autograd.backward(loss)
    expected = {name: p.grad for name, p in theirs.named_parameters()}
    for max_tokens in (1000, 17):
        model.zero_grad()
        parts = ours.cut(max_tokens)
        terms = sum(part.target_counts[0] for part in parts)
        total = sum(model(part, dropout_seed=None).nats for part in parts) / terms
        assert isinstance(total, Tensor)
        torch.autograd.backward(total)
        torch.testing.assert_close(total.detach(), loss.detach(), atol=BOUND, rtol=BOUND)
        for name, parameter in model.named_parameters():
            names = to_hf(name)
            assert parameter.grad is not None
            for their_name, grad in zip(names, parameter.grad.chunk(len(names)), strict=True):
                torch.testing.assert_close(grad, expected[their_name], atol=BOUND, rtol=1e-4)


def test_a_filler_has_no_loss_and_gradients_of_nothing(tmp_path: Path) -> None:
    reference(tmp_path)
    model, _ = load_span_model(tmp_path)
    loss = model(batch().filler(), dropout_seed=None)
    assert (float(loss.nats.detach()), loss.num_targets) == (0.0, 0)
    torch.autograd.backward(loss.nats)
    assert all(p.grad is not None and not p.grad.any() for p in model.parameters())


def test_scores_so_large_that_their_exponentials_are_infinite_have_a_loss() -> None:
    logits_T2 = torch.tensor([[500.0, -500.0], [0.0, 0.0], [500.0, 1.0]])
    nats_N2 = span_nats(logits_T2, torch.tensor([0, 2, 3]), torch.tensor([[1, 0], [0, 0]]))
    assert nats_N2.tolist() == [[500.0, 500.0], [0.0, 0.0]]


def test_a_saved_folder_gives_transformers_the_same_scores(tmp_path: Path) -> None:
    reference(tmp_path / "theirs")
    model, _ = load_span_model(tmp_path / "theirs", is_ready=True)
    save_model(tmp_path / "ours", model)
    loaded = transformers.AutoModelForQuestionAnswering.from_pretrained(tmp_path / "ours").eval()
    assert loaded.config.architectures == ["BertForQuestionAnswering"]
    ours = batch()
    with torch.no_grad():
        found = loaded(**padded(ours))
        logits_T2 = model.logits_T2(ours.inputs, dropout_seed=None)
    for column, logits in enumerate((found.start_logits, found.end_logits)):
        packed = torch.cat([row[:n] for row, n in zip(logits, LENGTHS, strict=True)])
        torch.testing.assert_close(logits_T2[:, column], packed, atol=BOUND, rtol=BOUND)
