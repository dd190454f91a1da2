"""Tiny models in folders of their own, for recipes to work on."""

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, decoders
from tokenizers.models import WordPiece
from tokenizers.normalizers import BertNormalizer
from tokenizers.pre_tokenizers import BertPreTokenizer
from tokenizers.processors import TemplateProcessing

from bertsmith.data.columns import UsualColumns
from bertsmith.hf import save_model
from bertsmith.model.config import EncoderConfig
from bertsmith.model.encoder import Encoder
from bertsmith.model.heads import SequenceClassifier, initialize
from bertsmith.recipes.texts.task import Task

SPECIALS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
LETTERS = "abcdefghijklmnopqrstuvwxyz"
VOCABULARY = [*SPECIALS, *LETTERS, *(f"##{c}" for c in LETTERS), "good", "bad", "film", "the"]


MakeClassifier = Callable[..., Path]


@pytest.fixture(scope="session")
def tiny_tokenizer_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a BERT tokenizer of a few dozen pieces."""
    folder = tmp_path_factory.mktemp("tokenizer")
    made = Tokenizer(WordPiece({w: i for i, w in enumerate(VOCABULARY)}, unk_token="[UNK]"))
    made.normalizer = BertNormalizer(lowercase=True)
    made.pre_tokenizer = BertPreTokenizer()
    made.decoder = decoders.WordPiece()
    made.post_processor = TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[("[CLS]", 2), ("[SEP]", 3)],
    )
    made.add_special_tokens(SPECIALS)
    made.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(
        '{"tokenizer_class": "BertTokenizer", "do_lower_case": true, "model_max_length": 32, '
        '"unk_token": "[UNK]", "sep_token": "[SEP]", "pad_token": "[PAD]", "cls_token": "[CLS]", '
        '"mask_token": "[MASK]"}'
    )
    return folder


def tiny_config() -> EncoderConfig:
    """Two small blocks; weights large enough that scores differ from text to text."""
    return EncoderConfig(
        vocab_size=len(VOCABULARY),
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=32,
        max_position_embeddings=32,
        initializer_range=0.5,
    )


@pytest.fixture
def tiny_encoder_folder(tmp_path: Path, tiny_tokenizer_folder: Path) -> Path:
    """A pretrained encoder, as it were."""
    encoder = Encoder(tiny_config())
    initialize(encoder, config=tiny_config(), seed=1)
    save_model(tmp_path / "encoder", encoder, tokenizer_folder=tiny_tokenizer_folder)
    return tmp_path / "encoder"


@pytest.fixture
def make_classifier(tmp_path: Path, tiny_tokenizer_folder: Path) -> MakeClassifier:
    """Makes folders of classifiers with random weights."""

    def make(
        *, labels: Sequence[str], pair: bool = False, task: bool = True, seed: int = 0
    ) -> Path:
        torch.manual_seed(0)
        model = SequenceClassifier(tiny_config(), num_labels=len(labels))
        initialize(model, config=tiny_config(), seed=seed)
        folder = tmp_path / f"classifier-{seed}"
        save_model(folder, model, tokenizer_folder=tiny_tokenizer_folder, labels=labels)
        if task:
            columns = UsualColumns(text="text", pair="text_b" if pair else None, label="label")
            Task(columns=columns, max_sequence_tokens=32, step=0, scores={}).write(folder)
        return folder

    return make
