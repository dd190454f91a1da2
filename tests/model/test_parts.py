"""Parts of a model, by name."""

import pytest

from bertsmith.model.config import EncoderConfig
from bertsmith.model.heads import MaskedLM
from bertsmith.model.parts import part_of, parts_of, read_parts, read_rates, spread


def test_every_parameter_belongs_to_a_part_and_the_tied_table_to_the_embeddings() -> None:
    model = MaskedLM(
        EncoderConfig(
            vocab_size=11,
            hidden_size=8,
            num_hidden_layers=12,
            num_attention_heads=2,
            intermediate_size=16,
            max_position_embeddings=8,
        )
    )
    names = [name for name, _ in model.named_parameters()]
    assert parts_of(names) == ["embeddings", *map(str, range(12)), "head"]
    assert part_of("encoder.embeddings.token.weight") == "embeddings"
    assert part_of("encoder.blocks.10.qkv.weight") == "10"
    assert {n for n in names if part_of(n) == "head"} == {
        "bias", "transform.weight", "transform.bias", "norm.weight", "norm.bias",
    }  # fmt: skip


def test_lists_of_parts_are_read() -> None:
    assert spread(read_parts("embeddings, 0-2,5"), num_layers=6) == ["embeddings", *"0125"]
    rates = read_rates("embeddings=5e-5,0-5=3e-5, head=1e-4")
    assert rates == [("embeddings", 5e-5), (range(6), 3e-5), ("head", 1e-4)]


@pytest.mark.parametrize("text", ["", "layers", "0-", "3-1", "-1", "1.5", "embeddings,", "0-5=3"])
def test_what_is_no_list_of_parts_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="give"):
        read_parts(text)


@pytest.mark.parametrize("text", ["0-5", "0-5=", "0-5=x", "0-5=-1", "0-5=inf", "0-5=nan", "x=1"])
def test_what_is_no_list_of_rates_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="give"):
        read_rates(text)


def test_layers_that_are_not_there_or_there_twice_are_refused() -> None:
    with pytest.raises(ValueError, match="there is no layer 12; the model's layers are 0-11"):
        spread(read_parts("0-12"), num_layers=12)
    with pytest.raises(ValueError, match="layer 3 is named twice"):
        spread(read_parts("0-5,3"), num_layers=12)
