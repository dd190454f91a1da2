"""A saved folder is what transformers expects, and is there whole or not at all."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import transformers
from safetensors import safe_open
from torch import nn
from transformers.utils import logging as transformers_logging

from bertsmith.batch import pack
from bertsmith.errors import UserError
from bertsmith.hf import (
    load_classifier,
    load_encoder,
    load_masked_lm,
    read_labels,
    recover_model,
    save_model,
)
from bertsmith.hf.weights import write_weights
from bertsmith.model.config import EncoderConfig
from bertsmith.model.encoder import Encoder
from bertsmith.model.heads import MaskedLM, SequenceClassifier

LABELS = ["bad", "good", "so-so"]
IDS = torch.tensor([2, 5, 6, 7, 10, 4, 3])


@pytest.fixture(autouse=True, scope="module")
def no_progress_bars() -> None:
    transformers_logging.disable_progress_bar()


def assert_same_weights(actual: nn.Module, expected: nn.Module) -> None:
    ours, theirs = actual.state_dict(), expected.state_dict()
    assert list(ours) == list(theirs)
    for name, values in ours.items():
        assert torch.equal(values, theirs[name]), name


def test_weights_come_back_bit_for_bit(
    masked_lm: MaskedLM,
    masked_lm_folder: Path,
    classifier: SequenceClassifier,
    classifier_folder: Path,
) -> None:
    assert_same_weights(load_masked_lm(masked_lm_folder, seed=1)[0], masked_lm)
    assert_same_weights(load_classifier(classifier_folder, labels=None)[0], classifier)
    assert read_labels(classifier_folder, num_labels=3) == tuple(LABELS)
    assert_same_weights(load_encoder(masked_lm_folder)[0], masked_lm.encoder)


def test_tied_weights_are_stored_once_and_as_float32(
    masked_lm: MaskedLM, masked_lm_folder: Path
) -> None:
    with safe_open(masked_lm_folder / "model.safetensors", "pt") as stored:
        names = set(stored.keys())
        assert stored.metadata() == {"format": "pt"}
        num_values = sum(stored.get_tensor(name).numel() for name in names)
        assert {stored.get_tensor(name).dtype for name in names} == {torch.float32}
    assert "cls.predictions.decoder.weight" not in names
    assert num_values == sum(p.numel() for p in masked_lm.parameters())


def test_transformers_computes_equal_masked_lm_logits(
    masked_lm: MaskedLM, masked_lm_folder: Path
) -> None:
    theirs, info = transformers.BertForMaskedLM.from_pretrained(
        masked_lm_folder, output_loading_info=True
    )
    assert not any(info.values())
    ours = masked_lm.logits_MV(pack([IDS]), torch.arange(len(IDS)), dropout_seed=None)
    torch.testing.assert_close(ours, theirs(IDS[None]).logits[0], rtol=1e-5, atol=1e-5)


def test_transformers_computes_equal_class_scores(
    classifier: SequenceClassifier, classifier_folder: Path
) -> None:
    theirs, info = transformers.AutoModelForSequenceClassification.from_pretrained(
        classifier_folder, output_loading_info=True
    )
    assert not any(info.values())
    ours = classifier.logits_NC(pack([IDS]), dropout_seed=None)
    torch.testing.assert_close(ours, theirs(IDS[None]).logits, rtol=1e-5, atol=1e-5)


def test_an_encoder_alone_is_a_bert_model(
    tiny_config: EncoderConfig, fill: Callable[[nn.Module], None], tmp_path: Path
) -> None:
    encoder = Encoder(tiny_config)
    fill(encoder)
    save_model(tmp_path / "encoder", encoder)
    theirs = transformers.BertModel.from_pretrained(tmp_path / "encoder", add_pooling_layer=False)
    ours = encoder(pack([IDS]), dropout_seed=None)
    torch.testing.assert_close(ours, theirs(IDS[None])[0][0], rtol=1e-5, atol=1e-5)
    assert_same_weights(load_encoder(tmp_path / "encoder")[0], encoder)


def test_the_text_classification_pipeline_shows_our_labels_and_scores(
    classifier: SequenceClassifier, tokenizer_folder: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "task"
    save_model(folder, classifier, tokenizer_folder=tokenizer_folder, labels=LABELS)
    pipeline = transformers.pipeline("text-classification", model=str(folder), top_k=None)
    shown = {entry["label"]: entry["score"] for entry in pipeline(["The good cats sat"])[0]}
    ids = torch.tensor([2, 5, 8, 6, 10, 7, 3])  # [CLS] the good cat ##s sat [SEP]
    probs = classifier.logits_NC(pack([ids]), dropout_seed=None).softmax(-1)[0]
    assert shown == pytest.approx(dict(zip(LABELS, probs.tolist(), strict=True)), abs=1e-6)


def test_the_fill_mask_pipeline_works(
    masked_lm: MaskedLM, tokenizer_folder: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "lm"
    save_model(folder, masked_lm, tokenizer_folder=tokenizer_folder)
    pipeline = transformers.pipeline("fill-mask", model=str(folder))
    best = pipeline("the [MASK] sat")[0]
    ids = torch.tensor([2, 5, 4, 7, 3])
    logits_MV = masked_lm.logits_MV(pack([ids]), torch.tensor([2]), dropout_seed=None)
    assert best["token"] == int(logits_MV[0].argmax())
    assert best["score"] == pytest.approx(float(logits_MV[0].detach().softmax(-1).max()), abs=1e-6)


def test_saving_again_replaces_the_folder_and_leaves_nothing_beside_it(
    masked_lm: MaskedLM, tmp_path: Path
) -> None:
    folder = tmp_path / "runs" / "model"
    save_model(folder, masked_lm)
    (folder / "stray").write_text("of an older version")
    with torch.no_grad():
        masked_lm.bias.fill_(2.0)
    save_model(folder, masked_lm)
    assert sorted(path.name for path in folder.iterdir()) == ["config.json", "model.safetensors"]
    assert [path.name for path in folder.parent.iterdir()] == ["model"]
    assert bool((load_masked_lm(folder, seed=0)[0].bias == 2.0).all())


def test_a_failed_save_keeps_the_old_folder(
    masked_lm: MaskedLM, masked_lm_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full_disk(*_: object) -> None:
        raise OSError(28, "No space left on device")

    before = load_masked_lm(masked_lm_folder, seed=0)[0]
    monkeypatch.setattr("bertsmith.hf.save.write_weights", full_disk)
    with pytest.raises(
        UserError, match=r"\(No space left on device: it needs [\d,]+ bytes, [\d,]+"
    ):
        save_model(masked_lm_folder, masked_lm)
    assert_same_weights(load_masked_lm(masked_lm_folder, seed=0)[0], before)
    assert [path.name for path in masked_lm_folder.parent.iterdir()] == ["masked_lm"]


def test_weights_that_cannot_be_written_are_an_os_error(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="directory"):
        write_weights(tmp_path / "absent" / "model.safetensors", [("w", torch.zeros(2))])


def test_a_place_that_cannot_be_written_is_named(masked_lm: MaskedLM, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"file/model: cannot be written"):
        save_model(tmp_path / "file" / "model", masked_lm)


def test_nothing_of_this_machine_is_written(masked_lm_folder: Path) -> None:
    config = json.loads((masked_lm_folder / "config.json").read_text())
    assert "_name_or_path" not in config
    assert str(masked_lm_folder) not in (masked_lm_folder / "config.json").read_text()


def test_whoever_may_read_the_folder_may_read_the_weights(masked_lm_folder: Path) -> None:
    modes = {p.name: p.stat().st_mode for p in masked_lm_folder.iterdir()}
    assert modes["model.safetensors"] == modes["config.json"]


def test_a_model_left_beside_its_place_by_a_killed_process_is_put_back(tmp_path: Path) -> None:
    for name, content in ((".model.old-11", "old"), (".model.new-12", "half")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(content)
    recover_model(tmp_path / "model")
    assert [p.name for p in tmp_path.iterdir()] == ["model"]
    assert (tmp_path / "model" / "config.json").read_text() == "old"
    (tmp_path / ".model.old-13").mkdir()
    recover_model(tmp_path / "model")  # the model is there: what is beside it is older
    assert [p.name for p in tmp_path.iterdir()] == ["model"]


def test_a_model_that_cannot_take_its_place_leaves_the_one_before(
    masked_lm: MaskedLM, masked_lm_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = (masked_lm_folder / "model.safetensors").read_bytes()
    rename = Path.rename

    def fail(self: Path, target: Path) -> Path:
        if ".new-" in self.name:
            raise OSError(5, "Input/output error")
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", fail)
    with pytest.raises(UserError, match="Input/output error"):
        save_model(masked_lm_folder, masked_lm)
    assert (masked_lm_folder / "model.safetensors").read_bytes() == before
    assert [p.name for p in masked_lm_folder.parent.glob(".*")] == []


def test_a_tokenizer_that_is_gone_is_an_error_and_not_a_model_without_one(
    masked_lm: MaskedLM, tmp_path: Path
) -> None:
    with pytest.raises(UserError, match="cannot be written"):
        save_model(tmp_path / "model", masked_lm, tokenizer_folder=tmp_path / "gone")
    assert list(tmp_path.iterdir()) == []
