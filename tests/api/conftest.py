"""A tiny checkpoint for the estimators: it knows few words, and one of them decides."""

import random
from pathlib import Path

import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordPiece
from tokenizers.pre_tokenizers import BertPreTokenizer
from tokenizers.processors import TemplateProcessing

from bertsmith.hf import save_model
from bertsmith.model.config import EncoderConfig
from bertsmith.model.encoder import Encoder
from bertsmith.model.heads import initialize

WORDS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "good", "bad", "film", "the", "ox", "zebra")


@pytest.fixture(scope="session")
def encoder_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    tokenizer_folder = tmp_path_factory.mktemp("tokenizer")
    made = Tokenizer(WordPiece({word: i for i, word in enumerate(WORDS)}, unk_token="[UNK]"))
    made.pre_tokenizer = BertPreTokenizer()
    made.post_processor = TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[("[CLS]", 2), ("[SEP]", 3)],
    )
    made.add_special_tokens(list(WORDS[:5]))
    made.save(str(tokenizer_folder / "tokenizer.json"))
    (tokenizer_folder / "tokenizer_config.json").write_text(
        '{"tokenizer_class": "BertTokenizer", "model_max_length": 32, "unk_token": "[UNK]", '
        '"sep_token": "[SEP]", "pad_token": "[PAD]", "cls_token": "[CLS]", "mask_token": "[MASK]"}'
    )
    shape = EncoderConfig(
        vocab_size=len(WORDS),
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=32,
        max_position_embeddings=32,
        initializer_range=0.5,
    )
    encoder = Encoder(shape)
    initialize(encoder, config=shape, seed=1)
    folder = tmp_path_factory.mktemp("made") / "encoder"
    save_model(folder, encoder, tokenizer_folder=tokenizer_folder)
    return folder


def reviews(num: int, *, seed: int = 0) -> tuple[list[str], list[str]]:
    """Texts that are pos where "good" stands in them and neg where "bad" does."""
    draw = random.Random(seed)
    texts, labels = [], []
    for i in range(num):
        word, label = ("good", "pos") if i % 2 else ("bad", "neg")
        words = [*draw.choices(WORDS[7:], k=draw.randint(1, 5)), word]
        draw.shuffle(words)
        texts.append(" ".join(words))
        labels.append(label)
    return texts, labels
