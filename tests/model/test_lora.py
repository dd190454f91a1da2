"""Adapters against peft, forward and backward; merged and taken out again; what they keep."""

from pathlib import Path

import peft
import pytest
import torch
from torch import Tensor
from transformers import AutoModelForSequenceClassification

from bertsmith.batch import LabelledBatch, pack
from bertsmith.hf import save_model
from bertsmith.hf.adapter import AboutAdapter, write_adapter
from bertsmith.model.checkpointing import BlockMode
from bertsmith.model.config import LORA_TARGETS, EncoderConfig, LoraConfig
from bertsmith.model.heads import MaskedLM, SequenceClassifier, initialize
from bertsmith.model.kernels import build
from bertsmith.model.lora import adapters_of, attach, freeze_encoder, merge, merged, unmerge
from bertsmith.model.parts import part_of
from bertsmith.train.config import OptimConfig
from bertsmith.train.layer_rates import plan_parts
from bertsmith.train.optim import group_parameters

pytestmark = pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing:FutureWarning")

SHAPE = EncoderConfig(
    vocab_size=50,
    hidden_size=32,
    num_hidden_layers=3,
    num_attention_heads=2,
    intermediate_size=64,
    max_position_embeddings=64,
    hidden_dropout_prob=0.0,
    attention_probs_dropout_prob=0.0,
    initializer_range=0.2,
)
LENGTHS = (48, 32, 16)
TOKENS, WIDTH = sum(LENGTHS), 32
HEADS = ("pooler", "classifier")


def texts() -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(5, 50, (n,), generator=generator) for n in LENGTHS]


def batch() -> LabelledBatch:
    labels_N = torch.tensor([0, 2, 1])
    return LabelledBatch(inputs=pack(texts()), labels_N=labels_N, rows_N=torch.arange(3))


def adapted(
    *targets: str, dropout: float = 0.0, is_new: bool = False, heads: tuple[str, ...] = HEADS
) -> SequenceClassifier:
    model = SequenceClassifier(SHAPE, num_labels=3)
    initialize(model, config=SHAPE, seed=0)
    config = LoraConfig(rank=4, alpha=6, dropout=dropout, targets=list(targets))
    attach(model, config, seed=0)
    freeze_encoder(model, trained=heads)
    if not is_new:
        generator = torch.Generator().manual_seed(1)
        for _, adapter in adapters_of(model):
            torch.nn.init.normal_(adapter.up, std=0.3, generator=generator)
    return model


def test_new_adapters_change_nothing_and_begin_as_the_seed_says() -> None:
    model, bare = adapted(*LORA_TARGETS, is_new=True), SequenceClassifier(SHAPE, num_labels=3)
    initialize(bare, config=SHAPE, seed=0)
    one, two = (m.logits_NC(batch().inputs, dropout_seed=None) for m in (model, bare))
    torch.testing.assert_close(one, two, rtol=1e-5, atol=1e-6)
    # kaiming_uniform_(a=sqrt(5)): uniform within 1 / sqrt(I)
    down = dict(adapters_of(model))["encoder.blocks.1.adapters.inner_out"].down.detach()
    assert down.shape == (4, 64)
    assert float(down.abs().max()) <= 1 / 8
    assert float(down.std()) == pytest.approx(1 / 8 / 3**0.5, rel=0.15)
    again = adapted("inner_out", is_new=True)
    assert torch.equal(
        dict(adapters_of(again))["encoder.blocks.1.adapters.inner_out"].down.detach(), down
    )
    attach(bare, LoraConfig(rank=4, targets=["inner_out"]), seed=1)
    other = dict(adapters_of(bare))["encoder.blocks.1.adapters.inner_out"].down.detach()
    assert not torch.equal(other, down)


@pytest.mark.parametrize("targets", [("query", "value"), LORA_TARGETS])
def test_scores_and_gradients_are_those_of_peft(tmp_path: Path, targets: tuple[str, ...]) -> None:
    model = adapted(*targets)
    bare = SequenceClassifier(SHAPE, num_labels=3)
    initialize(bare, config=SHAPE, seed=0)
    save_model(tmp_path / "base", bare, labels=["a", "b", "c"])
    (tmp_path / "adapter").mkdir()
    write_adapter(
        tmp_path / "adapter",
        model,
        LoraConfig(rank=4, alpha=6, targets=list(targets)),
        trained=HEADS,
        about=AboutAdapter(base="base", base_sha256="", labels=("a", "b", "c")),
    )
    base = AutoModelForSequenceClassification.from_pretrained(tmp_path / "base")
    theirs = peft.PeftModel.from_pretrained(base, tmp_path / "adapter", is_trainable=True).eval()
    padded = torch.nn.utils.rnn.pad_sequence(texts(), batch_first=True)
    mask = torch.nn.utils.rnn.pad_sequence([torch.ones_like(t) for t in texts()], batch_first=True)
    logits = theirs(input_ids=padded, attention_mask=mask).logits
    torch.testing.assert_close(
        model.logits_NC(batch().inputs, dropout_seed=None), logits, rtol=1e-5, atol=1e-5
    )
    nats: Tensor = torch.nn.functional.cross_entropy(logits, batch().labels_N, reduction="sum")
    torch.autograd.backward([nats])
    model(batch(), dropout_seed=None).nats.backward()
    wanted = {
        name.removeprefix("base_model.model.").replace(".default", ""): p.grad
        for name, p in theirs.named_parameters()
        if p.grad is not None
    }
    parts = {
        "query": "attention.self.query", "key": "attention.self.key",
        "value": "attention.self.value", "attention_out": "attention.output.dense",
        "inner": "intermediate.dense", "inner_out": "output.dense",
    }  # fmt: skip
    pairs = {
        "classifier.weight": wanted["classifier.modules_to_save.weight"],
        "pooler.weight": wanted["bert.pooler.modules_to_save.dense.weight"],
    }
    for i in range(SHAPE.num_hidden_layers):
        for target in targets:
            ours = f"encoder.blocks.{i}.adapters.{target}"
            module = f"bert.encoder.layer.{i}.{parts[target]}"
            pairs[f"{ours}.down"] = wanted[f"{module}.lora_A.weight"]
            pairs[f"{ours}.up"] = wanted[f"{module}.lora_B.weight"]
    parameters = dict(model.named_parameters())
    for name, gradient in pairs.items():
        found = parameters[name].grad
        assert found is not None, name
        torch.testing.assert_close(found, gradient, rtol=1e-5, atol=1e-5, msg=name)
    assert {n for n, p in parameters.items() if p.grad is not None} == {
        *pairs, "classifier.bias", "pooler.bias",
    }  # fmt: skip


def test_merging_gives_the_same_scores_and_unmerging_the_weights_back() -> None:
    model = adapted(*LORA_TARGETS)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    wanted_NC = model.logits_NC(batch().inputs, dropout_seed=None)
    whole = merged(model)
    assert next(adapters_of(whole), None) is None
    found_NC = whole.logits_NC(batch().inputs, dropout_seed=None)
    torch.testing.assert_close(found_NC, wanted_NC, rtol=1e-5, atol=1e-5)
    assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())
    own = dict(model.named_parameters())
    products = ("qkv", "attention_out", "inner", "inner_out")
    for name, parameter in whole.named_parameters():
        is_copied = name.endswith(tuple(f"{product}.weight" for product in products))
        assert (parameter is own[name]) != is_copied, name
    merge(model)
    changed = {n for n, p in model.named_parameters() if not torch.equal(p, before[n])}
    assert changed == {f"encoder.blocks.{i}.{p}.weight" for i in range(3) for p in products}
    unmerge(model)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter, before[name], rtol=0, atol=1e-5, msg=name)


def test_a_tied_table_stays_tied_and_as_it_was() -> None:
    model = MaskedLM(SHAPE)
    initialize(model, config=SHAPE, seed=0)
    attach(model, LoraConfig(rank=4), seed=0)
    whole = merged(model)
    assert whole.encoder.embeddings.token.weight is model.encoder.embeddings.token.weight
    positions_M = torch.arange(0, TOKENS, 5)
    one, two = (m.logits_MV(batch().inputs, positions_M, dropout_seed=None) for m in (model, whole))
    torch.testing.assert_close(one, two, rtol=1e-5, atol=1e-5)


def kept(model: SequenceClassifier, *, dropout_seed: int | None = 1) -> list[tuple[int, ...]]:
    """Shapes of what the encoder saves for the backward pass and is no parameter."""
    parameters = {p.untyped_storage().data_ptr() for p in model.parameters()}
    held: dict[int, Tensor] = {}

    def keep(tensor: Tensor) -> Tensor:
        if tensor.untyped_storage().data_ptr() not in parameters and tensor.numel() >= TOKENS:
            held[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        hidden_TD = model.encoder(batch().inputs, dropout_seed=dropout_seed)
    shapes = sorted(tuple(tensor.shape) for tensor in held.values())
    del hidden_TD
    return shapes


@pytest.mark.skipif(build.load("fp32") is None, reason="no C compiler: attention keeps more")
def test_a_frozen_product_keeps_no_input_and_nothing_is_kept_below_the_lowest_adapter() -> None:
    model = adapted("query", "value")
    per_block = [
        (TOKENS, 3 * WIDTH),  # queries, keys and values, for attention
        (TOKENS, WIDTH),  # the input, for both A
        (TOKENS, WIDTH),  # what attention gave, for attention itself
        (TOKENS, WIDTH),  # sum before the norm
        (TOKENS, 2 * WIDTH),  # inner layer before its activation, whose derivative it is
        (TOKENS, WIDTH),  # sum before the last norm
    ]
    found = [shape for shape in kept(model) if shape[0] == TOKENS and shape[1] >= WIDTH]
    # The first block's input needs no gradient, but its A do.
    assert found == sorted(3 * per_block)
    for name, parameter in model.named_parameters():
        if name.startswith(("encoder.blocks.0.", "encoder.blocks.1.")):
            parameter.requires_grad_(False)
    found = [shape for shape in kept(model) if shape[0] == TOKENS and shape[1] >= WIDTH]
    assert found == sorted(per_block)


@pytest.mark.parametrize("mode", ["full", "selective"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows", [False, True])
def test_blocks_that_compute_again_give_the_same_gradients(
    mode: BlockMode, dtype: torch.dtype, rows: bool
) -> None:
    found = []
    for one in ("none", mode):
        model = adapted(*LORA_TARGETS, dropout=0.2)
        model.encoder.checkpoint_blocks([one] * 3)
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=dtype == torch.bfloat16):
            if rows:
                model(batch(), dropout_seed=3).nats.backward()
            else:
                model.encoder(batch().inputs, dropout_seed=3).float().square().sum().backward()
        found.append({n: p.grad for n, p in model.named_parameters() if p.grad is not None})
    assert found[0].keys() == found[1].keys()
    assert all(torch.equal(found[0][name], found[1][name]) for name in found[0])


def test_dropout_is_another_one_for_each_adapter_and_goes_by_the_seed() -> None:
    model = adapted(*LORA_TARGETS, dropout=0.5)
    sites = [adapter.dropout_site for _, adapter in adapters_of(model)]
    assert sites == [2_000_003 + 8 * i + j for i in range(3) for j in range(6)]
    one, same, other, none = (
        model.encoder(batch().inputs, dropout_seed=seed) for seed in (1, 1, 2, None)
    )
    assert torch.equal(one, same)
    assert not torch.equal(one, other)
    assert not torch.equal(one, none)


def test_blocks_with_and_without_adapters_stand_in_one_model() -> None:
    """On a CPU the ones without are on the C kernels, and hand on what those alone can take."""
    found = []
    for mode in ("none", "full"):
        model = adapted("query", "value")
        for block in (model.encoder.blocks[1],):
            block.adapters = torch.nn.ModuleDict()
        model.encoder.checkpoint_blocks([mode] * 3)
        model(batch(), dropout_seed=1).nats.backward()
        found.append({n: p.grad for n, p in model.named_parameters() if p.grad is not None})
        assert len(found[-1]) == 2 * 2 * 2 + 4
    for name, gradient in found[0].items():
        torch.testing.assert_close(found[1][name], gradient, rtol=1e-5, atol=1e-6, msg=name)


def test_adapters_belong_to_their_layers_part_and_have_its_rate() -> None:
    model = adapted("query", "inner")
    names = [name for name, _ in adapters_of(model)]
    assert [part_of(f"{name}.up") for name in names] == ["0", "0", "1", "1", "2", "2"]
    config = OptimConfig(learning_rate=1e-3, layer_decay=0.5)
    plans = plan_parts(config, ["embeddings", "0", "1", "2", "head"])
    shares = {
        part_of(name): group.share
        for group in group_parameters(model, config, plans)
        for name in group.parameters
    }
    assert shares == {"0": 0.125, "1": 0.25, "2": 0.5, "head": 1.0}
