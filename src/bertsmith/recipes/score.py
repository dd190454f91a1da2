"""`bertsmith score`: how likely a pretrained model finds sentences, by pseudo-perplexity.

Shape legend: T packed tokens, M masked positions, V vocabulary.
"""

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from rich.markup import escape
from rich.table import Table as Grid
from torch import Tensor

from bertsmith.batch import pack
from bertsmith.errors import UserError
from bertsmith.recipes.config import ScoreConfig
from bertsmith.recipes.masked_model import open_masked_model, texts_of
from bertsmith.report.console import table_console


@dataclass(frozen=True, kw_only=True)
class Scored:
    """A text, or all of them together."""

    tokens: int
    """Special ones left out."""

    log_likelihood: float
    """Pseudo-log-likelihood: the sum over the tokens of the log chance of each, in nats, when it
    alone is hidden."""

    @property
    def pseudo_perplexity(self) -> float:
        """exp(-log_likelihood / tokens)."""
        nats = -self.log_likelihood / self.tokens
        return math.exp(nats) if nats < 700.0 else math.inf

    def as_json(self) -> dict[str, float]:
        """All three numbers."""
        return {
            "tokens": self.tokens,
            "log_likelihood": self.log_likelihood,
            "pseudo_perplexity": self.pseudo_perplexity,
        }


def main(config: ScoreConfig) -> int:
    """Score, and print a table or one JSON object."""
    texts = texts_of(config.texts, config.data)
    scores = score(config, texts)
    whole = Scored(
        tokens=sum(s.tokens for s in scores),
        log_likelihood=math.fsum(s.log_likelihood for s in scores),
    )
    if config.json:
        by_text = [
            {"text": text} | scored.as_json() for text, scored in zip(texts, scores, strict=True)
        ]
        content = {"model": config.model, **whole.as_json(), "texts": by_text}
        print(json.dumps(content, ensure_ascii=False))
        return 0
    grid = Grid("text")
    for heading in ("tokens", "log likelihood", "pseudo-perplexity"):
        grid.add_column(heading, justify="right")
    for text, scored in [*zip(texts, scores, strict=True), ("all", whole)]:
        grid.add_row(
            escape(text),
            f"{scored.tokens:,}",
            f"{scored.log_likelihood:,.3f}",
            f"{scored.pseudo_perplexity:,.3f}",
        )
    table_console().print(grid)
    return 0


def score(config: ScoreConfig, texts: Sequence[str]) -> list[Scored]:
    """Hide each token of each text in turn, and add up what the model gives the right one.

    Raises:
        UserError: The model cannot be used, or a text is too long or has no token.

    Source:
        Salazar et al. 2020, Masked Language Model Scoring, equation 2.
    """
    opened = open_masked_model(config.model, precision=config.precision, device=config.device)
    encoded = opened.encode(texts)
    for number, ids in enumerate(encoded, start=1):
        if len(ids) <= 2:
            raise UserError(f"text {number}: {texts[number - 1]!r} has no tokens to score")
    sums = [0.0] * len(texts)
    for jobs in _packs_of_jobs(encoded, config.tokens_per_pack):
        batch = pack(
            [_with(encoded[text], place, opened.tokenizer.vocab.mask_id) for text, place in jobs]
        )
        places_N = torch.tensor([place for _, place in jobs])
        positions_M = batch.starts_N1[:-1].long() + places_N
        targets_M = torch.stack([encoded[text][place] for text, place in jobs]).long()
        chances_MV = opened.logits_MV(batch, positions_M).log_softmax(-1)
        found_M = chances_MV.gather(1, targets_M[:, None])[:, 0].tolist()
        for (text, _), nats in zip(jobs, found_M, strict=True):
            sums[text] += nats
    return [
        Scored(tokens=len(ids) - 2, log_likelihood=nats)
        for ids, nats in zip(encoded, sums, strict=True)
    ]


def _with(ids_T: Tensor, place: int, token_id: int) -> Tensor:
    changed_T = ids_T.clone()
    changed_T[place] = token_id
    return changed_T


def _packs_of_jobs(
    encoded: Sequence[Tensor], tokens_per_pack: int
) -> Iterator[list[tuple[int, int]]]:
    """(text, place to hide), as many together as fit, texts of like lengths beside each other."""
    jobs: list[tuple[int, int]] = []
    num_tokens = 0
    for text in sorted(range(len(encoded)), key=lambda text: -len(encoded[text])):
        length = len(encoded[text])
        for place in range(1, length - 1):
            if jobs and num_tokens + length > tokens_per_pack:
                yield jobs
                jobs, num_tokens = [], 0
            jobs.append((text, place))
            num_tokens += length
    if jobs:
        yield jobs
