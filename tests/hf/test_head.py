"""Heads with a norm: trained on from where they were, and never silently wrong in transformers."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import transformers
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers.utils import logging as transformers_logging

from bertsmith.batch import pack
from bertsmith.errors import UserError
from bertsmith.hf import load_classifier, load_encoder, load_masked_lm, save_model
from bertsmith.model.config import EncoderConfig, HeadNorm
from bertsmith.model.head_norm import BatchNorm
from bertsmith.model.heads import SequenceClassifier

LABELS = ["bad", "good", "so-so"]
IDS = torch.tensor([2, 5, 6, 7, 10, 4, 3])
NORMS: tuple[HeadNorm, ...] = ("none", "batch", "layer")

MakeFolder = Callable[[HeadNorm], tuple[SequenceClassifier, Path]]


@pytest.fixture(autouse=True, scope="module")
def no_progress_bars() -> None:
    transformers_logging.disable_progress_bar()


@pytest.fixture
def make_folder(
    tiny_config: EncoderConfig,
    fill: Callable[[nn.Module], None],
    tokenizer_folder: Path,
    tmp_path: Path,
) -> MakeFolder:
    """Makes a classifier of random weights and statistics, and its folder."""

    def make(norm: HeadNorm) -> tuple[SequenceClassifier, Path]:
        model = SequenceClassifier(tiny_config, num_labels=len(LABELS), norm=norm)
        fill(model)
        if isinstance(model.head_norm, BatchNorm):
            model.head_norm.running_mean.copy_(torch.linspace(-0.8, 0.8, 12))
            model.head_norm.running_var.copy_(torch.logspace(-4, 0, 12))
        save_model(tmp_path / norm, model, tokenizer_folder=tokenizer_folder, labels=LABELS)
        return model, tmp_path / norm

    return make


def scores(model: SequenceClassifier) -> Tensor:
    return model.logits_NC(pack([IDS]), dropout_seed=None).detach()


@pytest.mark.parametrize("norm", NORMS)
def test_every_number_of_a_head_comes_back(make_folder: MakeFolder, norm: HeadNorm) -> None:
    model, folder = make_folder(norm)
    for loaded, report in (
        load_classifier(folder, labels=None),
        load_classifier(folder, labels=LABELS, norm=norm),
    ):
        assert (loaded.norm_kind, report.new, report.remarks) == (norm, (), ())
        ours, theirs = model.state_dict(), loaded.state_dict()
        assert list(ours) == list(theirs)
        assert all(values.equal(theirs[name]) for name, values in ours.items())
    assert (folder / "head.safetensors").exists() == (norm != "none")


@pytest.mark.parametrize("norm", ["none", "batch"])
def test_transformers_computes_the_same_scores(make_folder: MakeFolder, norm: HeadNorm) -> None:
    model, folder = make_folder(norm)
    theirs, info = transformers.AutoModelForSequenceClassification.from_pretrained(
        folder, output_loading_info=True
    )
    assert not any(info.values())
    torch.testing.assert_close(scores(model), theirs(IDS[None]).logits, rtol=1e-5, atol=1e-5)
    shown = transformers.pipeline("text-classification", model=str(folder), top_k=None)(["the cat"])
    ids = torch.tensor([2, 5, 6, 3])
    chances = model.logits_NC(pack([ids]), dropout_seed=None).softmax(-1)[0]
    expected = dict(zip(LABELS, chances.tolist(), strict=True))
    assert {e["label"]: e["score"] for e in shown[0]} == pytest.approx(expected, abs=1e-6)


def test_transformers_refuses_a_head_that_it_cannot_compute(make_folder: MakeFolder) -> None:
    _, folder = make_folder("layer")
    for load in (
        transformers.AutoConfig.from_pretrained,
        transformers.AutoModelForSequenceClassification.from_pretrained,
        lambda where: transformers.pipeline("text-classification", model=str(where)),
    ):
        with pytest.raises(ValueError, match="`bertsmith-bert`"):
            load(folder)
    # Who asks for BERT by name is told that the classifier is missing; theirs would be random.
    _, info = transformers.BertForSequenceClassification.from_pretrained(
        folder, output_loading_info=True
    )
    assert info["missing_keys"] == {"classifier.weight", "classifier.bias"}
    config = json.loads((folder / "config.json").read_text())
    assert config["architectures"] == ["BertsmithBertForSequenceClassification"]


def test_training_on_without_the_batch_norm_begins_with_the_same_scores(
    make_folder: MakeFolder,
) -> None:
    model, folder = make_folder("batch")
    plain, report = load_classifier(folder, labels=LABELS, norm="none")
    assert (plain.head_norm, report.new) == (None, ())
    assert report.remarks == ("the head's batch norm is folded into its classifier",)
    torch.testing.assert_close(scores(plain), scores(model), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("stored", "norm", "labels", "new"),
    [
        ("none", "batch", LABELS, ("head_norm", "classifier")),
        ("none", "layer", LABELS, ("head_norm", "classifier")),
        ("batch", "layer", LABELS, ("head_norm", "classifier")),
        ("layer", "batch", LABELS, ("head_norm", "classifier")),
        ("layer", "none", LABELS, ("classifier",)),
        ("batch", "none", ["yes", "no"], ("classifier",)),
        ("batch", "batch", ["yes", "no"], ("head_norm", "classifier")),
        ("layer", "layer", LABELS[::-1], ("head_norm", "classifier")),
    ],
)
def test_norm_and_classifier_are_kept_or_new_together(
    make_folder: MakeFolder, stored: HeadNorm, norm: HeadNorm, labels: list[str], new: object
) -> None:
    model, folder = make_folder(stored)
    other, report = load_classifier(folder, labels=labels, norm=norm, seed=5)
    assert (report.new, report.remarks) == (new, ())
    assert other.pooler.weight.equal(model.pooler.weight)
    if other.head_norm is not None:
        assert torch.equal(other.head_norm.get_parameter("weight"), torch.ones(12))
    if isinstance(other.head_norm, BatchNorm):
        assert torch.equal(other.head_norm.running_var, torch.ones(12))


@pytest.mark.parametrize("norm", ["batch", "layer"])
def test_the_encoder_is_there_for_other_uses(make_folder: MakeFolder, norm: HeadNorm) -> None:
    model, folder = make_folder(norm)
    expected = model.encoder.state_dict()
    for encoder in (load_encoder(folder)[0], load_masked_lm(folder, seed=0)[0].encoder):
        assert all(v.equal(expected[name]) for name, v in encoder.state_dict().items())


def test_the_head_file_says_its_norm_and_may_be_read_by_all(make_folder: MakeFolder) -> None:
    _, folder = make_folder("batch")
    with safe_open(folder / "head.safetensors", "pt") as stored:
        assert stored.metadata() == {"format": "pt", "norm": "batch"}
        assert set(stored.keys()) == {
            *(f"head_norm.{n}" for n in ("weight", "bias", "running_mean", "running_var")),
            *("classifier.weight", "classifier.bias"),
        }
    modes = {(folder / n).stat().st_mode for n in ("head.safetensors", "config.json")}
    assert len(modes) == 1


def trained_elsewhere(folder: Path) -> None:
    """As transformers writes a model over the one that it read."""
    file = folder / "model.safetensors"
    weights = load_file(file)
    weights["classifier.bias"] += 0.01
    save_file(weights, file, metadata={"format": "pt"})


def another_norm(folder: Path) -> None:
    file = folder / "head.safetensors"
    save_file(load_file(file), file, metadata={"norm": "layer"})


def unknown_norm(folder: Path) -> None:
    file = folder / "head.safetensors"
    save_file(load_file(file), file, metadata={"norm": "group"})


def another_tensor(folder: Path) -> None:
    file = folder / "head.safetensors"
    more = {"encoder.embeddings.token.weight": torch.zeros(11, 12)}
    save_file(load_file(file) | more, file, metadata={"norm": "batch"})


def half_a_file(folder: Path) -> None:
    file = folder / "head.safetensors"
    file.write_bytes(file.read_bytes()[:-40])


def another_width(folder: Path) -> None:
    file = folder / "head.safetensors"
    tensors = load_file(file)
    tensors["head_norm.weight"] = torch.ones(13)
    save_file(tensors, file, metadata={"norm": "batch"})


@pytest.mark.parametrize(
    ("harm", "says"),
    [
        (trained_elsewhere, "does not belong to the model.safetensors beside it.*delete it"),
        (another_norm, "does not belong to the config.json beside it.*delete it"),
        (unknown_norm, "is no head that bertsmith wrote; delete it"),
        (another_tensor, "is no head that bertsmith wrote; delete it"),
        (half_a_file, "truncated or damaged"),
        (another_width, r"head_norm.weight is \[13\], expected \[12\]"),
    ],
)
def test_a_head_file_that_does_not_fit_is_refused(
    make_folder: MakeFolder, harm: Callable[[Path], None], says: str
) -> None:
    _, folder = make_folder("batch")
    harm(folder)
    with pytest.raises(UserError, match=says):
        load_classifier(folder, labels=None)
    (folder / "head.safetensors").unlink()
    assert load_classifier(folder, labels=None)[0].norm_kind == "none"


def test_a_head_that_is_missing_is_named(make_folder: MakeFolder) -> None:
    _, folder = make_folder("layer")
    (folder / "head.safetensors").unlink()
    with pytest.raises(UserError, match=r"head.safetensors: missing, though config.json says"):
        load_classifier(folder, labels=None)


def test_a_layer_norm_left_by_another_model_is_refused(make_folder: MakeFolder) -> None:
    _, stale = make_folder("layer")
    _, folder = make_folder("none")
    shutil.copyfile(stale / "head.safetensors", folder / "head.safetensors")
    with pytest.raises(UserError, match=r"does not belong to the config\.json beside it"):
        load_classifier(folder, labels=None)
