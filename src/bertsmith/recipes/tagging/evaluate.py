"""`bertsmith evaluate` of a model that tags words."""

import csv
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from torch import Tensor

from bertsmith.metrics.bootstrap import intervals
from bertsmith.metrics.spans import SentenceCounts, tag_metrics
from bertsmith.recipes.config import EvaluateConfig
from bertsmith.recipes.evaluation import Evaluation
from bertsmith.recipes.predictions import check_output, whole_file
from bertsmith.recipes.tagging.data import TaggedPart, describe_file, encode_part, read_found
from bertsmith.recipes.tagging.task import Tagger, open_tagger
from bertsmith.report.csv_cells import csv_cell


def evaluate_tagger(config: EvaluateConfig) -> Evaluation:
    """Score every word of a file.

    Raises:
        UserError: The model or the file cannot be used, or the mistakes cannot be written.
    """
    path = Path(config.data)
    if config.errors is not None:
        check_output(
            Path(config.errors),
            overwrite=config.overwrite,
            source=path,
            option="errors",
            endings=(".csv",),
        )
    tagger = open_tagger(
        config.model,
        adapter=config.adapter,
        max_sequence_tokens=config.max_sequence_tokens,
        precision=config.precision,
        device=config.device,
    )
    file, found = read_found(path, config.table, tagger.tokenizer)
    for line in describe_file(file, found):
        print(line, file=sys.stderr)
    started_at_seconds = time.perf_counter()
    part = encode_part(
        found.sentences,
        tagger.labels,
        tagger.tokenizer,
        path=path,
        known_from=f"the model {config.model}"
        if config.adapter is None
        else f"the adapter {config.adapter}",
    )
    logits_WC = tagger.logits_WC(part.windows, tokens_per_pack=config.tokens_per_pack)
    has_spans = tagger.kind.has_spans
    counts = tagger.kind.count(logits_WC, part.tags_W, part.windows.words_S1, tagger.labels)
    if config.errors is not None:
        _write_errors(config, tagger, part, counts, logits_WC)

    def scores_of(rows_N: Tensor) -> dict[str, float]:
        return tag_metrics([counts[i] for i in rows_N.tolist()], has_spans=has_spans).by_name()

    return Evaluation(
        model=config.model,
        adapter=config.adapter,
        data=config.data,
        metrics=tag_metrics(counts, has_spans=has_spans),
        intervals=intervals(
            scores_of, num_rows=len(counts), num_samples=config.bootstrap, seed=config.seed
        )
        if config.bootstrap
        else {},
        num_cut=0,
        skipped_rows=file.skipped_rows,
        precision=tagger.compute.name,
        seconds=time.perf_counter() - started_at_seconds,
    )


def _write_errors(
    config: EvaluateConfig,
    tagger: Tagger,
    part: TaggedPart,
    counts: Sequence[SentenceCounts],
    logits_WC: Tensor,
) -> None:
    """Sentences with a wrong tag, by their loss summed, the worst first."""
    assert config.errors is not None
    said = [tagger.labels[i] for i in logits_WC.argmax(1).tolist()]
    bounds = part.windows.words_S1.tolist()
    wrong = [i for i, one in enumerate(counts) if one.right_words < one.words]
    wrong.sort(key=lambda i: (-counts[i].nats, i))
    with whole_file(Path(config.errors), option="errors") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(["line", "words", "tags", "prediction", "loss"])
        for i in wrong[: config.errors_rows]:
            sentence = part.table[i]
            cells = (
                sentence.lines[0],
                " ".join(sentence.words),
                " ".join(sentence.tags),
                " ".join(said[bounds[i] : bounds[i + 1]]),
                f"{counts[i].nats:.6g}",
            )
            writer.writerow([csv_cell(c, escape_formulas=config.escape_formulas) for c in cells])
