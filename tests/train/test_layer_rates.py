"""Rates by part are those of torch's AdamW with groups made by hand; parts thaw in their turn."""

from collections.abc import Mapping

import pytest
import torch
from torch import Tensor

from bertsmith.batch import LabelledBatch, MaskedBatch, pack
from bertsmith.model.config import EncoderConfig
from bertsmith.model.heads import MaskedLM, SequenceClassifier, initialize
from bertsmith.model.kernels import build
from bertsmith.model.parts import parts_of
from bertsmith.train.config import OptimConfig
from bertsmith.train.layer_rates import plan_parts
from bertsmith.train.optim import AdamW, group_parameters

SHAPE = EncoderConfig(
    vocab_size=31,
    hidden_size=8,
    num_hidden_layers=3,
    num_attention_heads=2,
    intermediate_size=16,
    max_position_embeddings=16,
)
PARTS = ["embeddings", "0", "1", "2", "head"]


def batches(step: int) -> tuple[LabelledBatch, MaskedBatch]:
    generator = torch.Generator().manual_seed(step)
    texts = [torch.randint(5, 31, (n,), generator=generator) for n in (7, 5, 3)]
    inputs = pack(texts)
    return (
        LabelledBatch(
            inputs=inputs, labels_N=torch.tensor([0, 1, step % 2]), rows_N=torch.arange(3)
        ),
        MaskedBatch(
            inputs=inputs, positions_M=torch.tensor([1, 8, 13]), targets_M=torch.tensor([9, 7, 5])
        ),
    )


Model = SequenceClassifier | MaskedLM


def new_model(kind: str) -> Model:
    model = MaskedLM(SHAPE) if kind == "mlm" else SequenceClassifier(SHAPE, num_labels=2)
    initialize(model, config=SHAPE, seed=0)
    return model


def learn(model: Model, step: int) -> None:
    """Gradients of a step."""
    for parameter in model.parameters():
        parameter.grad = None
    labelled, masked = batches(step)
    loss = (
        model(masked, dropout_seed=step)
        if isinstance(model, MaskedLM)
        else model(labelled, dropout_seed=step)
    )
    loss.nats.backward()


def optimizer_of(model: Model, config: OptimConfig) -> AdamW:
    plans = plan_parts(config, parts_of(n for n, _ in model.named_parameters()))
    return AdamW(group_parameters(model, config, plans), config)


def by_hand(model: Model, rates: dict[str, float]) -> torch.optim.AdamW:
    """Groups as people write them: by beginnings of names, from the top of a rate table."""
    prefixes = {
        "embeddings": "encoder.embeddings.",
        **{str(i): f"encoder.blocks.{i}." for i in range(3)},
    }
    groups = []
    left = dict(model.named_parameters())
    for part, prefix in prefixes.items():
        names = [name for name in left if name.startswith(prefix)]
        groups += _two_groups({name: left.pop(name) for name in names}, rates[part])
    return torch.optim.AdamW(
        [*groups, *_two_groups(left, rates["head"])], betas=(0.9, 0.98), eps=1e-6
    )


def _two_groups(named: Mapping[str, Tensor], rate: float) -> list[dict[str, object]]:
    matrices = [p for p in named.values() if p.ndim == 2]
    others = [p for p in named.values() if p.ndim < 2]
    return [
        {"params": matrices, "lr": rate, "weight_decay": 0.1},
        {"params": others, "lr": rate, "weight_decay": 0.0},
    ]


DECAYED = {"head": 1e-2, "2": 5e-3, "1": 2.5e-3, "0": 1.25e-3, "embeddings": 6.25e-4}
NAMED = {"head": 1e-2, "2": 3e-3, "1": 4e-3, "0": 4e-3, "embeddings": 5e-4}


@pytest.mark.parametrize("kernels", [True, False], ids=["kernels", "torch"])
@pytest.mark.parametrize("kind", ["classifier", "mlm"])
@pytest.mark.parametrize(
    ("config", "rates"),
    [
        (OptimConfig(learning_rate=1e-2, weight_decay=0.1, layer_decay=0.5), DECAYED),
        (
            OptimConfig(
                learning_rate=1e-2, weight_decay=0.1, rates="embeddings=5e-4,0-1=4e-3,2=3e-3"
            ),
            NAMED,
        ),
    ],
    ids=["layer decay", "rates"],
)
def test_updates_are_those_of_torch_with_groups_made_by_hand(
    config: OptimConfig,
    rates: dict[str, float],
    kind: str,
    kernels: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if not kernels:
        monkeypatch.setattr(build, "load", lambda storage: None)
    ours, theirs = new_model(kind), new_model(kind)
    optimizer, reference = optimizer_of(ours, config), by_hand(theirs, rates)
    for step in range(5):
        for model in (ours, theirs):
            learn(model, step)
        share = 1.0 - step / 5
        optimizer.set_learning_rate(config.learning_rate * share)
        optimizer.step()
        for group in reference.param_groups:
            group.setdefault("peak", group["lr"])
            group["lr"] = group["peak"] * share
        reference.step()
    for (name, mine), other in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(mine, other, rtol=2e-5, atol=2e-6, msg=name)
    start = new_model(kind).encoder.embeddings.token.weight
    assert float((ours.encoder.embeddings.token.weight - start).detach().abs().max()) > 1e-4


def test_a_tied_table_is_in_one_group() -> None:
    model = new_model("mlm")
    names = [
        name
        for group in group_parameters(
            model, OptimConfig(), plan_parts(OptimConfig(layer_decay=0.9), PARTS)
        )
        for name in group.parameters
    ]
    assert sorted(names) == sorted(name for name, _ in model.named_parameters())


def test_parts_thaw_one_by_one_from_the_head_and_like_an_optimizer_that_begins_then() -> None:
    config = OptimConfig(learning_rate=1e-2, weight_decay=0.1, unfreeze="steps:2")
    model, reference = new_model("classifier"), new_model("classifier")
    optimizer = optimizer_of(model, config)
    theirs = torch.optim.AdamW([torch.zeros(1)], betas=(0.9, 0.98), eps=1e-6)
    begun: list[str] = []
    for step in range(10):
        has_changed = optimizer.thaw()
        assert has_changed == (step % 2 == 0)
        if has_changed:
            part = list(reversed(PARTS))[step // 2]
            begun.append(part)
            for group in by_hand(reference, dict.fromkeys(PARTS, 1e-2)).param_groups:
                names = {id(p): n for n, p in reference.named_parameters()}
                group["params"] = [p for p in group["params"] if parts_of([names[id(p)]]) == [part]]
                if group["params"]:
                    theirs.add_param_group(group)
        learn(model, step)
        learn(reference, step)
        trained = {n for n, p in model.named_parameters() if p.grad is not None}
        assert parts_of(trained) == [part for part in PARTS if part in begun]
        optimizer.set_learning_rate(1e-2)
        optimizer.step()
        theirs.step()
        for (name, mine), other in zip(
            model.named_parameters(), reference.named_parameters(), strict=True
        ):
            # A first update is g / (|g| + eps): rounding shows where g is next to nothing. Moments
            # corrected for the wrong number of updates would be off by three times the rate.
            torch.testing.assert_close(mine, other[1], rtol=2e-5, atol=2e-4, msg=f"{step} {name}")
    assert begun == list(reversed(PARTS))


def test_going_back_freezes_again() -> None:
    model = new_model("classifier")
    optimizer = optimizer_of(model, OptimConfig(unfreeze="steps:2"))
    optimizer.updates = 100
    assert not optimizer.thaw()
    optimizer.updates = 3
    assert optimizer.thaw()
    trained = [n for n, p in model.named_parameters() if p.requires_grad]
    assert parts_of(trained) == ["2", "head"]


def test_epochs_are_counted_in_updates() -> None:
    plans = plan_parts(OptimConfig(unfreeze="epochs:0.5"), PARTS, updates_per_epoch=7)
    assert {part: plan.begins for part, plan in plans.items()} == {
        "head": 0, "2": 4, "1": 8, "0": 12, "embeddings": 16,
    }  # fmt: skip
    with pytest.raises(ValueError, match="give steps:N"):
        plan_parts(OptimConfig(unfreeze="epochs:1"), PARTS)


@pytest.mark.parametrize(
    "values",
    [
        {"layer_decay": 0.0},
        {"layer_decay": 1.1},
        {"layer_decay": 0.9, "rates": "head=1e-3"},
        {"rates": "top=1e-3"},
        {"unfreeze": "1"},
        {"unfreeze": "steps:0"},
        {"unfreeze": "steps:1.5"},
        {"unfreeze": "epochs:nan"},
    ],
)
def test_values_out_of_range_are_refused(values: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=next(iter(values))):
        OptimConfig(**values)  # type: ignore[arg-type]
