"""`bertsmith predict` of a model that tags words: a JSON object a sentence.

A text is parted into words by the model's tokenizer, and what is found in it is told as
characters; words that are given stay as they are.
"""

import contextlib
import itertools
import json
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TextIO

from bertsmith.data.checkup.tagged import TOKENS, read_conll
from bertsmith.data.compressed import ending_of
from bertsmith.data.table_files import open_records
from bertsmith.data.tables import LONE_SURROGATE
from bertsmith.data.tagging.schemes import to_iob2
from bertsmith.data.tagging.sentences import CONLL_ENDINGS, TEXT, Sentence
from bertsmith.errors import UserError
from bertsmith.recipes.classifier import sole_adapter
from bertsmith.recipes.config import PredictConfig
from bertsmith.recipes.predictions import PredictSummary, check_output, whole_file
from bertsmith.recipes.tagging.task import Tagger, open_tagger
from bertsmith.tasks.tagging import entities_of

SENTENCES_AT_ONCE = 2048


def predict_tags(config: PredictConfig) -> PredictSummary:
    """Tag every sentence and write the tags.

    Raises:
        UserError: The model, the file or the output cannot be used.
    """
    source, output = Path(config.data), Path(config.output)
    check_output(output, overwrite=config.overwrite, source=source, endings=(".jsonl",))
    tagger = open_tagger(
        config.model,
        adapter=sole_adapter(config.adapter),
        max_sequence_tokens=config.max_sequence_tokens,
        precision=config.precision,
        device=config.device,
    )
    num_sentences, started_at_seconds = 0, time.perf_counter()
    sentences = _sentences(source, tagger)
    is_standard = str(output) == "-"
    with (
        contextlib.nullcontext(sys.stdout)
        if is_standard
        else whole_file(output, option="output") as file
    ):
        while some := list(itertools.islice(sentences, SENTENCES_AT_ONCE)):
            _write(file, tagger, some, tokens_per_pack=config.tokens_per_pack)
            num_sentences += len(some)
        file.flush()
    return PredictSummary(
        num_rows=num_sentences,
        num_cut=0,
        skipped_rows=0,
        seconds=time.perf_counter() - started_at_seconds,
    )


def _write(
    file: TextIO, tagger: Tagger, sentences: Sequence[Sentence], *, tokens_per_pack: int
) -> None:
    """A line for each sentence; one without words has no tags."""
    tagged: list[tuple[list[str], list[float]]] = [([], []) for _ in sentences]
    full = [i for i, sentence in enumerate(sentences) if sentence.words]
    if full:
        windows = tagger.tokenizer.encode([sentences[i].words for i in full])
        chances_WC = tagger.logits_WC(windows, tokens_per_pack=tokens_per_pack).softmax(1)
        best_W = chances_WC.max(1)
        names = [tagger.labels[i] for i in best_W.indices.tolist()]
        chances = best_W.values.tolist()
        for i, (a, b) in zip(full, itertools.pairwise(windows.words_S1.tolist()), strict=True):
            tags = list(to_iob2(names[a:b])) if tagger.kind.has_spans else names[a:b]
            tagged[i] = tags, chances[a:b]
    for sentence, (tags, shares) in zip(sentences, tagged, strict=True):
        row = _row(sentence, tags, shares, has_spans=tagger.kind.has_spans)
        file.write(json.dumps(row, ensure_ascii=False) + "\n")


def _row(
    sentence: Sentence, tags: Sequence[str], chances: Sequence[float], *, has_spans: bool
) -> dict[str, object]:
    """What is said of a sentence. `start` and `end` count characters of a text, or words."""
    row: dict[str, object] = {} if sentence.text is None else {"text": sentence.text}
    row |= {"tokens": list(sentence.words), "tags": list(tags)}
    if not has_spans:
        return row | {"scores": [float(f"{chance:.6g}") for chance in chances]}
    entities = []
    for entity in entities_of(tags, chances):
        first, end = entity.span.first, entity.span.end
        text = " ".join(sentence.words[first:end])
        if sentence.text is not None:
            first, end = sentence.bounds[first][0], sentence.bounds[end - 1][1]
            text = sentence.text[first:end]
        entities.append(
            {
                "text": text,
                "start": first,
                "end": end,
                "label": entity.span.kind,
                "score": float(f"{entity.score:.6g}"),
            }
        )
    return row | {"entities": entities}


def _sentences(path: Path, tagger: Tagger) -> Iterator[Sentence]:
    """What is to be tagged, in the file's order.

    Raises:
        UserError: The file or a row of it cannot be used.
    """
    if ending_of(path) in CONLL_ENDINGS:
        for one in read_conll(path):
            yield Sentence(words=one.tokens)
        return
    records = open_records(path, takes_lines=True)
    with contextlib.closing(records):
        names = [name.lower() for name in records.columns]
        words_at = next((names.index(name) for name in TOKENS if name in names), None)
        text_at = names.index(TEXT) if TEXT in names else None
        if words_at is None and text_at is None:
            raise UserError(f"{path}: has neither `tokens` nor `text`; name one of its keys so")
        for record in records.rows:
            place = f"{path}:{record.line or record.row}"
            if record.fault is not None:
                raise UserError(f"{place}: {record.fault}")
            words = None if words_at is None else record.values[words_at]
            text = None if text_at is None else record.values[text_at]
            if isinstance(words, list) and all(isinstance(word, str) for word in words):
                given = [word for word in words if not word.strip() or LONE_SURROGATE.search(word)]
                if given:
                    raise UserError(f"{place}: a token is empty or holds half a surrogate pair")
                yield Sentence(words=tuple(words))
            elif isinstance(text, str) and not LONE_SURROGATE.search(text):
                bounds = tuple(tagger.tokenizer.split(text))
                yield Sentence(words=tuple(text[a:b] for a, b in bounds), text=text, bounds=bounds)
            else:
                raise UserError(f"{place}: holds neither a list of tokens nor a text")
