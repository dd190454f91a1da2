"""The table of names loses nothing in either direction."""

import pytest
import transformers
from hypothesis import given
from hypothesis import strategies as st

from bertsmith.hf.keys import POSITION_IDS, TIED_BIAS, TIED_WEIGHT, Slot, canonical, from_hf, to_hf
from bertsmith.model.config import EncoderConfig
from bertsmith.model.heads import PairedLM, SequenceClassifier

TINY = EncoderConfig(
    vocab_size=5,
    hidden_size=4,
    num_hidden_layers=3,
    num_attention_heads=1,
    intermediate_size=4,
    max_position_embeddings=4,
)
OURS = sorted(
    {name for name, _ in PairedLM(TINY).named_parameters()}
    | {name for name, _ in SequenceClassifier(TINY, num_labels=2).named_parameters()}
)
THEIRS = sorted(
    {
        name
        for kind in (transformers.BertForPreTraining, transformers.BertForSequenceClassification)
        for name in kind(
            transformers.BertConfig(
                vocab_size=5,
                hidden_size=4,
                num_hidden_layers=3,
                num_attention_heads=1,
                intermediate_size=4,
                max_position_embeddings=4,
            )
        ).state_dict()
    }
    - {TIED_WEIGHT, TIED_BIAS, POSITION_IDS}
)


@given(name=st.sampled_from(OURS))
def test_our_names_come_back_from_theirs(name: str) -> None:
    assert [from_hf(theirs) for theirs in to_hf(name)] == [
        Slot(name=name, part=part) for part in range(len(to_hf(name)))
    ]


@given(theirs=st.sampled_from(THEIRS))
def test_their_names_come_back_from_ours(theirs: str) -> None:
    slot = from_hf(theirs)
    assert slot is not None
    assert to_hf(slot.name)[slot.part] == theirs


def test_the_table_covers_every_tensor_of_both_sides_once() -> None:
    assert sorted(theirs for name in OURS for theirs in to_hf(name)) == THEIRS


@given(layer=st.integers(0, 10**6), kind=st.sampled_from(["weight", "bias"]))
def test_query_key_and_value_of_any_layer_stack_in_this_order(layer: int, kind: str) -> None:
    assert to_hf(f"encoder.blocks.{layer}.qkv.{kind}") == tuple(
        f"bert.encoder.layer.{layer}.attention.self.{part}.{kind}"
        for part in ("query", "key", "value")
    )


@given(theirs=st.sampled_from([name for name in THEIRS if name.startswith("bert.")]))
def test_the_prefix_may_be_missing(theirs: str) -> None:
    assert from_hf(theirs.removeprefix("bert.")) == from_hf(theirs)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("bert.embeddings.LayerNorm.gamma", "bert.embeddings.LayerNorm.weight"),
        (
            "encoder.layer.11.output.LayerNorm.beta",
            "bert.encoder.layer.11.output.LayerNorm.bias",
        ),
        (
            "cls.predictions.transform.LayerNorm.gamma",
            "cls.predictions.transform.LayerNorm.weight",
        ),
        ("module.classifier.weight", "classifier.weight"),
    ],
)
def test_old_spellings_are_understood(old: str, new: str) -> None:
    assert canonical(old) == new
    assert from_hf(old) == from_hf(new) is not None


@pytest.mark.parametrize(
    "name",
    [
        "cls.seq_relationship.extra",
        TIED_WEIGHT,
        POSITION_IDS,
        "bert.encoder.layer.0.attention.self.distance_embedding.weight",
        "bert.encoder.layer.x.output.dense.weight",
        "classifier.out_proj.weight",
        "classifier.extra",
        "",
    ],
)
def test_what_has_no_place_is_said_to_have_none(name: str) -> None:
    assert from_hf(name) is None


@given(name=st.text(max_size=60))
def test_any_name_is_answered(name: str) -> None:
    from_hf(name)
