"""`bertsmith fill`: what a pretrained model takes a hidden word for.

Shape legend: T packed tokens, M masked positions, K most likely tokens.
"""

import json
from dataclasses import asdict, dataclass

import torch
from rich.console import Console
from rich.markup import escape
from rich.table import Table as Grid

from bertsmith.batch import pack
from bertsmith.data.examples import packs_by_length
from bertsmith.errors import UserError
from bertsmith.recipes.config import FillConfig
from bertsmith.recipes.masked_model import MaskedModel, open_masked_model, texts_of
from bertsmith.report.console import table_console

MASK = "[MASK]"
"""How a hidden word is written, whatever the tokenizer's own mask token is called."""


@dataclass(frozen=True, kw_only=True)
class Guess:
    """A token in the place of a hidden one."""

    token: str
    token_id: int
    probability: float
    text: str
    """The whole text with it; other hidden words stay hidden."""


@dataclass(frozen=True, kw_only=True)
class Filled:
    """A text and what its hidden words may be."""

    text: str
    masks: list[list[Guess]]
    """For each hidden word, in their order, the most likely tokens first."""


def main(config: FillConfig) -> int:
    """Fill, and print tables or one JSON object."""
    found = fill(config)
    if config.json:
        content = {"model": config.model, "texts": [asdict(filled) for filled in found]}
        print(json.dumps(content, ensure_ascii=False, allow_nan=False))
    else:
        _print_tables(found, table_console())
    return 0


def fill(config: FillConfig) -> list[Filled]:
    """Name the hidden words of each text, each as if the others stayed hidden.

    Raises:
        UserError: The model cannot be used, a text hides no word, or is too long.
    """
    texts = texts_of(config.texts, config.data)
    opened = open_masked_model(config.model, precision=config.precision, device=config.device)
    mask, mask_id = opened.tokenizer.roles["mask_token"], opened.tokenizer.vocab.mask_id
    written = [text if mask in text else text.replace(MASK, mask) for text in texts]
    encoded = opened.encode(written)
    for number, (text, ids) in enumerate(zip(texts, encoded, strict=True), start=1):
        if not bool((ids == mask_id).any()):
            raise UserError(
                f"text {number}: {text[:60]!r} hides no word; write {MASK} where one is to be named"
            )
    found: list[Filled | None] = [None] * len(texts)
    lengths_N = torch.tensor([len(ids) for ids in encoded])
    for rows in packs_by_length(
        lengths_N, range(len(texts)), tokens_per_pack=config.tokens_per_pack
    ):
        batch = pack([encoded[row] for row in rows])
        positions_M = (batch.input_ids_T == mask_id).nonzero()[:, 0]
        chances_MV = opened.logits_MV(batch, positions_M).softmax(-1)
        chances_MK, tokens_MK = chances_MV.topk(min(config.top_k, chances_MV.shape[1]))
        first = 0
        for row in rows:
            end = first + int((encoded[row] == mask_id).sum())
            masks = [
                _guesses(opened, encoded[row].tolist(), place, tokens, chances)
                for place, tokens, chances in zip(
                    (encoded[row] == mask_id).nonzero()[:, 0].tolist(),
                    tokens_MK[first:end].tolist(),
                    chances_MK[first:end].tolist(),
                    strict=True,
                )
            ]
            found[row] = Filled(text=texts[row], masks=masks)
            first = end
    return [filled for filled in found if filled is not None]


def _guesses(
    opened: MaskedModel, ids: list[int], place: int, tokens: list[int], chances: list[float]
) -> list[Guess]:
    tokenizer, vocab = opened.tokenizer.tokenizer, opened.tokenizer.vocab
    framing = {vocab.cls_id, vocab.sep_id, vocab.pad_id}
    guesses = []
    for token_id, chance in zip(tokens, chances, strict=True):
        filled = [*ids[:place], token_id, *ids[place + 1 :]]
        shown = [i for n, i in enumerate(filled) if n == place or i not in framing]
        guesses.append(
            Guess(
                token=tokenizer.id_to_token(token_id) or "",
                token_id=token_id,
                probability=chance,
                text=tokenizer.decode(shown, skip_special_tokens=False),
            )
        )
    return guesses


def _print_tables(found: list[Filled], console: Console) -> None:
    for filled in found:
        console.print(filled.text, markup=False)
        for number, guesses in enumerate(filled.masks, start=1):
            is_one = len(filled.masks) == 1
            grid = Grid("token", title=None if is_one else f"hidden word {number}")
            grid.add_column("probability", justify="right")
            grid.add_column("text")
            for guess in guesses:
                grid.add_row(escape(guess.token), f"{guess.probability:.4f}", escape(guess.text))
            console.print(grid)
