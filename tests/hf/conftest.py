"""Tiny models and folders of them, made on the spot."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors
from torch import nn

from bertsmith.hf import save_model
from bertsmith.model.config import EncoderConfig
from bertsmith.model.heads import MaskedLM, SequenceClassifier

WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "the", "cat", "sat", "good", "bad", "##s"]


@pytest.fixture
def tiny_config() -> EncoderConfig:
    return EncoderConfig(
        vocab_size=len(WORDS),
        hidden_size=12,
        num_hidden_layers=2,
        num_attention_heads=3,
        intermediate_size=20,
        max_position_embeddings=16,
    )


@pytest.fixture
def fill() -> Callable[[nn.Module], None]:
    """Gives every parameter random values, so that no two are alike."""

    def fill_(model: nn.Module) -> None:
        generator = torch.Generator().manual_seed(4)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.normal_(0.0, 0.5, generator=generator)

    return fill_


@pytest.fixture
def masked_lm(tiny_config: EncoderConfig, fill: Callable[[nn.Module], None]) -> MaskedLM:
    model = MaskedLM(tiny_config)
    fill(model)
    return model


@pytest.fixture
def classifier(tiny_config: EncoderConfig, fill: Callable[[nn.Module], None]) -> SequenceClassifier:
    model = SequenceClassifier(tiny_config, num_labels=3)
    fill(model)
    return model


@pytest.fixture
def masked_lm_folder(masked_lm: MaskedLM, tmp_path: Path) -> Path:
    save_model(tmp_path / "masked_lm", masked_lm)
    return tmp_path / "masked_lm"


@pytest.fixture
def classifier_folder(classifier: SequenceClassifier, tmp_path: Path) -> Path:
    save_model(tmp_path / "classifier", classifier, labels=["bad", "good", "so-so"])
    return tmp_path / "classifier"


@pytest.fixture
def tokenizer_folder(tmp_path: Path) -> Path:
    """A BERT tokenizer of a few words."""
    folder = tmp_path / "tokenizer"
    folder.mkdir()
    tokenizer = Tokenizer(
        models.WordPiece({word: i for i, word in enumerate(WORDS)}, unk_token="[UNK]")
    )
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[("[CLS]", 2), ("[SEP]", 3)],
    )
    tokenizer.add_special_tokens(WORDS[:5])
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(
        '{"tokenizer_class": "BertTokenizer", "do_lower_case": true, "model_max_length": 16, '
        '"unk_token": "[UNK]", "sep_token": "[SEP]", "pad_token": "[PAD]", '
        '"cls_token": "[CLS]", "mask_token": "[MASK]"}'
    )
    return folder
