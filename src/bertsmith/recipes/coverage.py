"""`bertsmith coverage`: what a masking will have predicted after some epochs, without training."""

import json
import math
from pathlib import Path
from typing import Any

from bertsmith.data.coverage import Coverage, CoverageCounter
from bertsmith.data.frequency import corpus_frequencies
from bertsmith.data.shards import open_shards
from bertsmith.data.stream import PretrainStream
from bertsmith.data.tokenizer import load_tokenizer
from bertsmith.recipes.config import CoverageConfig
from bertsmith.report.coverage_report import (
    coverage_json,
    coverage_markdown,
    write_coverage_plot,
)


def main(config: CoverageConfig) -> int:
    """Count, and print tables or one JSON object."""
    counted = coverage(config)
    report = named(counted, Path(config.data))
    if config.plot is not None:
        write_coverage_plot(Path(config.plot), counted)
    print(json.dumps(report, ensure_ascii=False) if config.json else coverage_markdown(report))
    return 0


def coverage(config: CoverageConfig) -> Coverage:
    """Count what the epochs predict.

    Raises:
        UserError: The folder was not prepared wholly, or holds no tokens.
    """
    corpus = open_shards(Path(config.data), "train", verify=False)
    frequencies = corpus_frequencies(corpus)
    stream = PretrainStream(
        corpus,
        packing=config.packing,
        masking=config.masking,
        tokens_per_step=config.tokens_per_step,
        seed=config.seed,
        objective=config.objective,
        type_counts_V=frequencies.counts_V,
    )
    counter = CoverageCounter(
        stream,
        corpus,
        frequencies,
        packing=config.packing,
        is_estimate=config.masking.is_classic,
        sample_tokens=config.sample_tokens,
    )
    return counter.after(math.ceil(config.epochs * stream.steps_in_epoch(0)))


def named(counted: Coverage, data: Path) -> dict[str, Any]:
    """The report, its tokens by name.

    Args:
        counted: What to report.
        data: The prepared folder.
    """
    tokenizer = load_tokenizer(data / "tokenizer").tokenizer
    return coverage_json(counted, lambda token: tokenizer.id_to_token(token) or str(token))
