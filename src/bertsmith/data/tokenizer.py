"""A tokenizer's folder as Hugging Face lays it out: read, written, and what its ids mean."""

import hashlib
import json
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from bertsmith.errors import UserError

TOKENIZER_FILE, CONFIG_FILE, MAP_FILE = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
)
SPECIAL_TOKENS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
"""Of a trained tokenizer, with ids 0 to 4."""

_ROLES = ("pad_token", "unk_token", "cls_token", "sep_token", "mask_token")


@dataclass(frozen=True, kw_only=True)
class Vocab:
    """What the ids of a tokenizer mean, as far as masking and packing must know."""

    size: int
    """One more than the largest id."""

    pad_id: int
    unk_id: int
    cls_id: int
    sep_id: int
    mask_id: int

    special_ids: tuple[int, ...]
    """Ids that no ordinary text has, ascending: the five above and other added special tokens."""

    fingerprint: str
    """sha256 of the tokenizer's content; equal fingerprints give equal ids."""

    unused_ids: tuple[int, ...] = ()
    """Ids below `size` that stand for no token, ascending."""

    @cached_property
    def ordinary_ids(self) -> NDArray[np.int64]:
        """Ids of real tokens that are not special, ascending: where noise is drawn from."""
        left_out = np.array(self.special_ids + self.unused_ids, dtype=np.int64)
        return np.setdiff1d(np.arange(self.size, dtype=np.int64), left_out)


@dataclass(frozen=True, kw_only=True)
class TextTokenizer:
    """A tokenizer and what belongs to it."""

    tokenizer: Tokenizer
    """Without padding and cutting."""

    vocab: Vocab
    config: dict[str, Any]
    """Content of its tokenizer_config.json."""

    roles: dict[str, str]
    """Token of each role, such as pad_token: [PAD]."""


def bert_tokenizer(
    vocab: dict[str, int],
    *,
    lowercase: bool,
    strip_accents: bool | None = None,
    splits_chinese: bool = True,
) -> TextTokenizer:
    """A WordPiece tokenizer as BERT's, from its tokens and their ids.

    Args:
        vocab: Tokens to ids; holds `SPECIAL_TOKENS`.
        lowercase: Lower case and no accents (uncased), or the text as it is (cased).
        strip_accents: Whether accents are taken off; None: as `lowercase` says.
        splits_chinese: Whether each Chinese character is a word.
    """
    tokenizer = Tokenizer(models.WordPiece(vocab=vocab, unk_token="[UNK]"))
    tokenizer.normalizer = bert_normalizer(
        lowercase=lowercase, strip_accents=strip_accents, splits_chinese=splits_chinese
    )
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece(prefix="##")
    tokenizer.post_processor = processors.BertProcessing(
        ("[SEP]", vocab["[SEP]"]), ("[CLS]", vocab["[CLS]"])
    )
    tokenizer.add_special_tokens(list(SPECIAL_TOKENS))
    roles = dict(zip(_ROLES, SPECIAL_TOKENS, strict=True))
    config = {
        "tokenizer_class": "BertTokenizer",
        "do_lower_case": lowercase,
        "do_basic_tokenize": True,
        "tokenize_chinese_chars": splits_chinese,
        "strip_accents": strip_accents,
        "clean_up_tokenization_spaces": False,
        "model_max_length": 512,
        **roles,
    }
    return _described(tokenizer, config, roles)


def bert_normalizer(
    *, lowercase: bool, strip_accents: bool | None = None, splits_chinese: bool = True
) -> normalizers.Normalizer:
    """BERT's: control characters out, white space to spaces, Chinese characters set apart."""
    return normalizers.BertNormalizer(
        clean_text=True,
        handle_chinese_chars=splits_chinese,
        strip_accents=strip_accents,
        lowercase=lowercase,
    )


def load_tokenizer(folder: Path) -> TextTokenizer:
    """Read a Hugging Face tokenizer folder: tokenizer.json, or a BERT vocab.txt.

    Raises:
        UserError: It holds neither, a file is damaged, or a special token is missing.
    """
    config = _read_json(folder / CONFIG_FILE)
    file, vocab_file = folder / TOKENIZER_FILE, folder / "vocab.txt"
    if file.exists():
        try:
            tokenizer = Tokenizer.from_file(str(file))
        except Exception as error:  # the library raises plain Exception
            raise UserError(f"{file}: not a readable tokenizer ({error})") from error
    elif vocab_file.exists():
        return _from_vocab_file(vocab_file, config)
    else:
        raise UserError(f"{folder}: holds no {TOKENIZER_FILE} and no vocab.txt")
    tokenizer.no_padding()
    tokenizer.no_truncation()
    stored = {**_read_json(folder / MAP_FILE), **config}
    roles = {
        role: _text_of(stored.get(role)) or usual
        for role, usual in zip(_ROLES, SPECIAL_TOKENS, strict=True)
    }
    for role, token in roles.items():
        if tokenizer.token_to_id(token) is None:
            raise UserError(
                f"{file}: has no {role} (looked for {token!r}); masked-language modelling needs "
                f"one: name it in {CONFIG_FILE}, or add it: tokenizer.add_special_tokens("
                f"{{'{role}': '{token}'}}) of transformers, then save_pretrained"
            )
    return _described(tokenizer, config, roles)


def write_tokenizer(folder: Path, text_tokenizer: TextTokenizer) -> None:
    """Write the files that `load_tokenizer` and Hugging Face read, into an existing folder."""
    content = json.loads(text_tokenizer.tokenizer.to_str())
    (folder / TOKENIZER_FILE).write_text(
        json.dumps(content, ensure_ascii=False, indent=1), encoding="utf-8"
    )
    for name, values in (
        (CONFIG_FILE, text_tokenizer.config),
        (MAP_FILE, text_tokenizer.roles),
    ):
        text = json.dumps(values, ensure_ascii=False, indent=2) + "\n"
        (folder / name).write_text(text, encoding="utf-8")


def continues_word(tokenizer: Tokenizer) -> NDArray[np.bool_] | None:
    """For each id, whether it continues a word; None if ids alone do not tell.

    WordPiece marks such tokens by a prefix that no first piece of a word can have, as BERT's
    pre-tokenizer splits at every "#".
    """
    content = json.loads(tokenizer.to_str())
    model, splitter = content["model"], content["pre_tokenizer"]
    if model["type"] != "WordPiece" or (splitter or {}).get("type") != "BertPreTokenizer":
        return None
    prefix = model["continuing_subword_prefix"]
    if prefix != "##":
        return None
    tokens = tokenizer.get_vocab()
    table = np.zeros(max(tokens.values()) + 1, dtype=np.bool_)
    table[[i for token, i in tokens.items() if token.startswith(prefix) and token != prefix]] = True
    return table


def _from_vocab_file(file: Path, config: dict[str, Any]) -> TextTokenizer:
    try:
        lines = file.read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{file}: cannot be read ({error})") from error
    if lines and not lines[-1]:
        lines.pop()
    vocab = {token.rstrip("\r"): number for number, token in enumerate(lines)}
    missing = [token for token in SPECIAL_TOKENS if token not in vocab]
    if missing:
        raise UserError(f"{file}: has no {', '.join(missing)}; a BERT vocabulary does")
    strip_accents = config.get("strip_accents")
    return bert_tokenizer(
        vocab,
        lowercase=bool(config.get("do_lower_case", True)),
        strip_accents=None if strip_accents is None else bool(strip_accents),
        splits_chinese=bool(config.get("tokenize_chinese_chars", True)),
    )


def _described(
    tokenizer: Tokenizer, config: dict[str, Any], roles: dict[str, str]
) -> TextTokenizer:
    added = tokenizer.get_added_tokens_decoder()
    special = {i for i, token in added.items() if token.special}
    by_token = tokenizer.get_vocab(with_added_tokens=True)
    pad, unk, cls, sep, mask = (by_token[roles[role]] for role in _ROLES)
    special |= {pad, unk, cls, sep, mask}
    canonical = json.dumps(json.loads(tokenizer.to_str()), sort_keys=True, ensure_ascii=True)
    size = max(by_token.values()) + 1
    vocab = Vocab(
        size=size,
        pad_id=pad,
        unk_id=unk,
        cls_id=cls,
        sep_id=sep,
        mask_id=mask,
        special_ids=tuple(sorted(special)),
        fingerprint=hashlib.sha256(canonical.encode()).hexdigest(),
        unused_ids=tuple(sorted(set(range(size)) - set(by_token.values()))),
    )
    return TextTokenizer(tokenizer=tokenizer, vocab=vocab, config=config, roles=roles)


def _text_of(token: Any) -> str | None:
    """A token as stored: plain, or an object with its content."""
    content = token.get("content") if isinstance(token, dict) else token
    return content if isinstance(content, str) else None


def _read_json(file: Path) -> dict[str, Any]:
    """A JSON object; empty if there is no such file."""
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise UserError(f"{file}: not readable JSON ({error})") from error
    if not isinstance(content, dict):
        raise UserError(f"{file}: not a JSON object")
    return content


def word_bounds(tokenizer: Tokenizer, text: str) -> list[tuple[int, int]]:
    """Where the words of a text stand, from and to, as the tokenizer parts it."""
    encoding = tokenizer.encode(text, add_special_tokens=False)
    bounds: dict[int, tuple[int, int]] = {}
    for word, (start, end) in zip(encoding.word_ids, encoding.offsets, strict=True):
        if word is not None and end > start:
            first, last = bounds.get(word, (start, end))
            bounds[word] = (min(first, start), max(last, end))
    return list(bounds.values())
