"""config.json is read by an allow-list and written as transformers wants it."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import transformers

from bertsmith.errors import UserError
from bertsmith.hf import parse_config, read_config, read_labels
from bertsmith.hf.config_json import config_json
from bertsmith.model.config import PRESETS, EncoderConfig


def test_a_config_survives_being_written_and_read(tmp_path: Path) -> None:
    config = EncoderConfig(
        vocab_size=7,
        hidden_size=6,
        num_attention_heads=2,
        hidden_act="gelu_new",
        hidden_dropout_prob=0.25,
        attention_probs_dropout_prob=0.0,
        layer_norm_eps=1e-5,
        pad_token_id=3,
    )
    (tmp_path / "config.json").write_text(config_json(config, task="masked_lm", labels=None))
    assert read_config(tmp_path) == config
    assert read_config(tmp_path / "config.json") == config


def test_their_defaults_are_our_defaults() -> None:
    theirs = transformers.BertConfig().to_dict()
    ours = dataclasses.asdict(EncoderConfig())
    assert {key: theirs[key] for key in ours} == ours
    assert parse_config({"model_type": "bert"}, where="x") == EncoderConfig()


def test_transformers_reads_what_we_write(tmp_path: Path) -> None:
    text = config_json(PRESETS["bert-mini"], task="classifier", labels=["no", "ja \u00e4"])
    (tmp_path / "config.json").write_text(text, encoding="utf-8")
    theirs = transformers.AutoConfig.from_pretrained(tmp_path)
    assert type(theirs) is transformers.BertConfig
    assert (theirs.hidden_size, theirs.num_attention_heads) == (256, 4)
    assert theirs.id2label == {0: "no", 1: "ja \u00e4"}
    assert theirs.label2id == {"no": 0, "ja \u00e4": 1}
    assert theirs.problem_type == "single_label_classification"
    assert theirs.architectures == ["BertForSequenceClassification"]
    assert read_labels(tmp_path, num_labels=2) == ("no", "ja \u00e4")


def test_keys_that_ask_for_code_are_left_behind(tmp_path: Path) -> None:
    raw = {
        "model_type": "bert",
        "auto_map": {"AutoModel": "evil--x.Model"},
        "trust_remote_code": True,
        "_attn_implementation_internal": "evil/kernel",
        "quantization_config": {},
        "vocab_size": 9,
    }
    config = parse_config(raw, where="x")
    written = json.loads(config_json(config, task="encoder", labels=None))
    assert written["vocab_size"] == 9
    assert not {"auto_map", "trust_remote_code", "_attn_implementation_internal"} & set(written)
    assert "quantization_config" not in written


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "roberta"}, "model_type is 'roberta'; bertsmith reads BERT"),
        ({"model_type": None}, "model_type is None"),
        ({"is_decoder": True}, "is_decoder is set; bertsmith reads encoders only"),
        ({"position_embedding_type": "relative_key"}, "is 'relative_key'; bertsmith has"),
        ({"hidden_act": "swish"}, "hidden_act is 'swish'; bertsmith has gelu"),
        ({"hidden_act": ["gelu"]}, "hidden_act is"),
        ({"hidden_size": "768"}, "hidden_size is '768'; it must be a whole number"),
        ({"hidden_size": True}, "hidden_size is True; it must be a whole number"),
        ({"hidden_size": 770}, "hidden_size 770 is not divisible by num_attention_heads 12"),
        ({"num_hidden_layers": 0}, "num_hidden_layers is 0; it must be at least 1"),
        ({"hidden_dropout_prob": 1.5}, "hidden_dropout_prob is 1.5"),
        ({"layer_norm_eps": float("nan")}, "layer_norm_eps is nan; it must be a number"),
        ({"pad_token_id": "x"}, "pad_token_id is 'x'; it must be a whole number"),
    ],
)
def test_what_cannot_be_is_refused_by_key_and_value(change: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError) as raised:
        parse_config({"model_type": "bert", **change}, where="some/config.json")
    assert str(raised.value).startswith("some/config.json: ")
    assert message in str(raised.value)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"{", "is no JSON"),
        (b"\xff\xfe", "is no JSON"),
        (b"[" * 100_000, "is no JSON"),
        (b"[1]", "holds [1]; it must be a JSON object"),
    ],
)
def test_a_file_that_is_no_json_object_is_named(
    content: bytes, message: str, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(UserError, match=r"config\.json: ") as raised:
        read_config(tmp_path)
    assert message in str(raised.value)


def test_a_folder_without_config_says_what_belongs_there(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="not found; a model folder holds"):
        read_config(tmp_path)


@pytest.mark.parametrize("table", [{"1": "a", "2": "b"}, {"x": "a"}, ["a"], {"0": "a", "1": "a"}])
def test_labels_must_be_numbered_without_gap_and_distinct(table: object, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "bert", "id2label": table}))
    with pytest.raises(UserError, match="id2label"):
        read_labels(tmp_path, num_labels=1)
