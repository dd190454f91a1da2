"""What lies below the lowest trained part keeps nothing; frozen products keep no inputs.

Bytes are counted as they are saved, and expected by the table of what a block keeps.
"""

import pytest
import torch
from torch import Tensor

from bertsmith.batch import LabelledBatch, MaskedBatch, pack
from bertsmith.model.checkpointing import BlockMode
from bertsmith.model.config import EncoderConfig
from bertsmith.model.heads import MaskedLM, SequenceClassifier, initialize
from bertsmith.model.kernels import build
from bertsmith.model.parts import part_of

SHAPE = EncoderConfig(
    vocab_size=50,
    hidden_size=32,
    num_hidden_layers=3,
    num_attention_heads=2,
    intermediate_size=64,
    max_position_embeddings=64,
    hidden_dropout_prob=0.1,
    attention_probs_dropout_prob=0.1,
)
TOKENS, WIDTH, INNER = 96, 32, 64
needs_kernels = pytest.mark.skipif(build.load("fp32") is None, reason="no C compiler")
BODIES = [pytest.param("fused", marks=needs_kernels), "plain"]


def masked() -> MaskedBatch:
    generator = torch.Generator().manual_seed(0)
    texts = [torch.randint(5, 50, (n,), generator=generator) for n in (48, 32, 16)]
    return MaskedBatch(
        inputs=pack(texts), positions_M=torch.arange(TOKENS), targets_M=torch.arange(TOKENS) % 50
    )


def masked_lm(*frozen: str, mode: BlockMode = "none") -> MaskedLM:
    model = MaskedLM(SHAPE)
    initialize(model, config=SHAPE, seed=0)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(part_of(name) not in frozen)
    model.encoder.checkpoint_blocks([mode] * 3)
    return model


def saved_bytes(model: MaskedLM) -> int:
    """Of activations: whatever is saved that is no parameter, each storage once."""
    parameters = {p.untyped_storage().data_ptr() for p in model.parameters()}
    held: dict[int, Tensor] = {}

    def keep(tensor: Tensor) -> Tensor:
        if tensor.untyped_storage().data_ptr() not in parameters:
            held[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        hidden_TD = model.encoder(masked().inputs, dropout_seed=1)
    total = sum(tensor.untyped_storage().nbytes() for tensor in held.values())
    del hidden_TD
    return total


@pytest.mark.parametrize("body", BODIES)
def test_a_frozen_bottom_keeps_nothing(body: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if body == "plain":
        monkeypatch.setattr(build, "load_for", lambda dtype: None)
    assert saved_bytes(masked_lm("embeddings", "0", "1", "2")) == 0
    none, bottom, all_but_top = (
        saved_bytes(masked_lm(*frozen))
        for frozen in ((), ("embeddings", "0"), ("embeddings", "0", "1"))
    )
    block = bottom - all_but_top
    assert block > 10 * TOKENS * WIDTH * 4
    # A block less each time; what embeddings keep, and their output that the first block takes in.
    assert all_but_top == pytest.approx(block, abs=4 * TOKENS * WIDTH * 4)
    assert none > bottom + block


@needs_kernels
def test_products_with_frozen_weights_keep_no_input() -> None:
    trained, frozen = saved_bytes(masked_lm()), saved_bytes(masked_lm("0", "1", "2"))
    # Inputs of blocks 0, 1, 2, and in each the input of the inner layer.
    assert trained - frozen == 6 * TOKENS * WIDTH * 4


@pytest.mark.parametrize("body", BODIES)
@pytest.mark.parametrize("mode", ["none", "selective", "full"])
@pytest.mark.parametrize(
    "frozen", [("embeddings", "0"), ("1",), ("2", "1"), ("embeddings",), ("head", "0", "1", "2")]
)
def test_what_is_trained_gets_the_gradient_it_always_gets(
    frozen: tuple[str, ...], mode: BlockMode, body: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if body == "plain":
        monkeypatch.setattr(build, "load_for", lambda dtype: None)
    whole, part = masked_lm(mode=mode), masked_lm(*frozen, mode=mode)
    for model in (whole, part):
        model(masked(), dropout_seed=3).nats.backward()
    wanted = dict(whole.named_parameters())
    for name, parameter in part.named_parameters():
        if part_of(name) in frozen:
            assert parameter.grad is None, name
        else:
            found, expected = parameter.grad, wanted[name].grad
            assert found is not None
            assert expected is not None
            assert torch.equal(found, expected), name


@pytest.mark.parametrize("body", BODIES)
def test_a_classifier_on_a_frozen_encoder_learns(
    body: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if body == "plain":
        monkeypatch.setattr(build, "load_for", lambda dtype: None)
    model = SequenceClassifier(SHAPE, num_labels=3)
    initialize(model, config=SHAPE, seed=0)
    model.encoder.requires_grad_(False)
    batch = LabelledBatch(
        inputs=masked().inputs, labels_N=torch.tensor([0, 2, 1]), rows_N=torch.arange(3)
    )
    model(batch, dropout_seed=1).nats.backward()
    assert {n for n, p in model.named_parameters() if p.grad is not None} == {
        "pooler.weight", "pooler.bias", "classifier.weight", "classifier.bias",
    }  # fmt: skip
