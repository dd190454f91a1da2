"""What stands on the encoder is computed in fp32, whatever the precision of the encoder."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from bertsmith.batch import pack
from bertsmith.model.config import EncoderConfig
from bertsmith.model.heads import SequenceClassifier, initialize
from bertsmith.model.span_model import SpanModel
from bertsmith.model.token_classifier import TokenClassifier

CONFIG = EncoderConfig(
    vocab_size=30,
    hidden_size=16,
    num_hidden_layers=1,
    num_attention_heads=2,
    intermediate_size=16,
    max_position_embeddings=16,
)
INPUTS = pack([torch.arange(1 + i, 9 + i) for i in range(12)])


def of_texts(model: nn.Module) -> Tensor:
    assert isinstance(model, SequenceClassifier)
    return model.logits_NC(INPUTS, dropout_seed=None)


def of_words(model: nn.Module) -> Tensor:
    assert isinstance(model, TokenClassifier)
    return model.logits_MC(INPUTS, torch.arange(INPUTS.num_tokens), dropout_seed=None)


def of_ends(model: nn.Module) -> Tensor:
    assert isinstance(model, SpanModel)
    return model.logits_T2(INPUTS, dropout_seed=None)


@pytest.mark.parametrize(
    ("model", "scores"),
    [
        (SequenceClassifier(CONFIG, num_labels=3), of_texts),
        (TokenClassifier(CONFIG, num_labels=3), of_words),
        (SpanModel(CONFIG), of_ends),
    ],
)
@torch.no_grad()
def test_scores_are_no_numbers_of_bf16(
    model: nn.Module, scores: Callable[[nn.Module], Tensor]
) -> None:
    """Near 100 bf16 has steps of a half, by which nearly all of these scores would tie."""
    initialize(model, config=CONFIG, seed=0)
    head = list(model.children())[-1]
    assert isinstance(head, nn.Linear)
    head.bias.fill_(100.0)
    with torch.autocast("cpu", torch.bfloat16):
        found = scores(model)
    assert found.dtype == torch.float32
    assert len(set(found.flatten().tolist())) > found.numel() // 2
    assert len(set(found.bfloat16().flatten().tolist())) < 4
