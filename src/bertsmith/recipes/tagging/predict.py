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

from bertsmith.data.checkup.tagged import TOKENS, read_conll
from bertsmith.data.columns import find_columns
from bertsmith.data.compressed import ending_of
from bertsmith.data.config import TableConfig
from bertsmith.data.table_files import Record, open_records
from bertsmith.data.tables import LONE_SURROGATE, SKIP_HINT
from bertsmith.data.tagging.schemes import to_iob2
from bertsmith.data.tagging.sentences import CONLL_ENDINGS, TEXT, Sentence, Split
from bertsmith.errors import UserError
from bertsmith.recipes.config import PredictConfig
from bertsmith.recipes.model_folder import sole_adapter
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
    reader = _Source(source, config.table, split=tagger.tokenizer.split)
    sentences = iter(reader)
    is_standard = str(output) == "-"
    with (
        contextlib.nullcontext(sys.stdout)
        if is_standard
        else whole_file(output, option="output") as file
    ):
        while some := list(itertools.islice(sentences, SENTENCES_AT_ONCE)):
            found = tagged(tagger, some, tokens_per_pack=config.tokens_per_pack)
            for sentence, (tags, chances) in zip(some, found, strict=True):
                row = _row(sentence, tags, chances, has_spans=tagger.kind.has_spans)
                file.write(json.dumps(row, ensure_ascii=False) + "\n")
            num_sentences += len(some)
        file.flush()
    return PredictSummary(
        num_rows=num_sentences,
        num_cut=0,
        skipped_rows=reader.num_skipped,
        seconds=time.perf_counter() - started_at_seconds,
    )


def tagged(
    tagger: Tagger, sentences: Sequence[Sentence], *, tokens_per_pack: int
) -> list[tuple[list[str], list[float]]]:
    """Tags of each sentence's words and their probabilities; of one without words there are none.

    Raises:
        UserError: The model's weights are broken.
    """
    found: list[tuple[list[str], list[float]]] = [([], []) for _ in sentences]
    full = [i for i, sentence in enumerate(sentences) if sentence.words]
    if full:
        windows = tagger.tokenizer.encode([sentences[i].words for i in full])
        chances_WC = tagger.logits_WC(windows, tokens_per_pack=tokens_per_pack).softmax(1)
        best_W = chances_WC.max(1)
        names = [tagger.labels[i] for i in best_W.indices.tolist()]
        chances = best_W.values.tolist()
        for i, (a, b) in zip(full, itertools.pairwise(windows.words_S1.tolist()), strict=True):
            tags = list(to_iob2(names[a:b])) if tagger.kind.has_spans else names[a:b]
            found[i] = tags, chances[a:b]
    return found


def told_entities(
    sentence: Sentence, tags: Sequence[str], chances: Sequence[float]
) -> list[dict[str, object]]:
    """What was found in a sentence. `start` and `end` count characters of a text, or words."""
    told: list[dict[str, object]] = []
    for entity in entities_of(tags, chances):
        first, end = entity.span.first, entity.span.end
        text = " ".join(sentence.words[first:end])
        if sentence.text is not None:
            first, end = sentence.bounds[first][0], sentence.bounds[end - 1][1]
            text = sentence.text[first:end]
        score = float(f"{entity.score:.6g}")
        told.append(
            {"text": text, "start": first, "end": end, "label": entity.span.kind, "score": score}
        )
    return told


def sentence_of(text: str, *, split: Split) -> Sentence:
    """A text as its words."""
    bounds = tuple(split(text))
    return Sentence(words=tuple(text[a:b] for a, b in bounds), text=text, bounds=bounds)


def _row(
    sentence: Sentence, tags: Sequence[str], chances: Sequence[float], *, has_spans: bool
) -> dict[str, object]:
    """What is said of a sentence."""
    row: dict[str, object] = {} if sentence.text is None else {"text": sentence.text}
    row |= {"tokens": list(sentence.words), "tags": list(tags)}
    if has_spans:
        return row | {"entities": told_entities(sentence, tags, chances)}
    return row | {"scores": [float(f"{chance:.6g}") for chance in chances]}


class _Source:
    """What is to be tagged, in the file's order; counts what could not be used."""

    def __init__(self, path: Path, table: TableConfig, *, split: Split) -> None:
        """Set up.

        Args:
            path: The file.
            table: Names the column of texts, and says what becomes of rows that cannot be used.
            split: Parts a text into words.
        """
        self._path, self._table, self._split = path, table, split
        self.num_skipped = 0

    def __iter__(self) -> Iterator[Sentence]:
        """Read on.

        Raises:
            UserError: The file cannot be used, or a row that is not to be skipped.
        """
        for place, made in self._rows():
            if isinstance(made, Sentence):
                yield made
                continue
            if self._table.bad_rows == "error":
                raise UserError(f"{self._path}:{place}: {made}; {SKIP_HINT}")
            self.num_skipped += 1

    def _rows(self) -> Iterator[tuple[int, Sentence | str]]:
        """Line or row of each sentence, and its words, or why there are none."""
        if ending_of(self._path) in CONLL_ENDINGS:
            for one in read_conll(self._path, has_tags=False):
                yield one.line, one.fault or Sentence(words=one.tokens)
            return
        table = self._table
        records = open_records(
            self._path,
            quoting=table.quoting,
            columns=None if table.columns is None else tuple(table.columns),
            takes_lines=True,
        )
        with contextlib.closing(records):
            words_at, text_at = self._columns(records.columns)
            for record in records.rows:
                yield record.line or record.row, self._sentence(record, words_at, text_at)

    def _columns(self, names: tuple[str, ...]) -> tuple[int | None, int | None]:
        """Where lists of words stand, and where texts do; at least one is there."""
        words_at = None
        if self._table.text_column is None:
            lowered = [name.lower() for name in names]
            words_at = next((lowered.index(name) for name in TOKENS if name in lowered), None)
            if words_at is not None:
                return words_at, lowered.index(TEXT) if TEXT in lowered else None
        found = find_columns(
            names, path=self._path, config=self._table, is_labelled=False, is_pair=False
        )
        return None, found.text

    def _sentence(
        self, record: Record, words_at: int | None, text_at: int | None
    ) -> Sentence | str:
        """A row's words, or why there are none."""
        if record.fault is not None:
            return record.fault
        words = None if words_at is None else record.values[words_at]
        text = None if text_at is None else record.values[text_at]
        if isinstance(words, list) and all(isinstance(word, str) for word in words):
            if any(not word.strip() or LONE_SURROGATE.search(word) for word in words):
                return "a token is empty or holds half a surrogate pair"
            return Sentence(words=tuple(words))
        if isinstance(text, str) and not LONE_SURROGATE.search(text):
            return sentence_of(text, split=self._split)
        return "holds neither a list of tokens nor a text"
