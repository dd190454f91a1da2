"""A model that tags words: tags of lists of words, or the spans of texts."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bertsmith.api.estimator import Estimator, Rows
from bertsmith.api.inputs import as_list, check_whole, column_names, plain_tree
from bertsmith.data.checkup.tagged import TAGS, TOKENS, is_tag
from bertsmith.data.config import TableConfig
from bertsmith.data.tagging.sentences import SPANS, TEXT, Sentence
from bertsmith.errors import UserError
from bertsmith.recipes.tagging.predict import sentence_of, tagged, told_entities
from bertsmith.recipes.tagging.task import Tagger, open_tagger

TOKENS_PER_PACK = 8192


class WordTagger(Estimator[Tagger]):
    """Tags of words: `WordTagger(model).fit(sentences, tags)`.

    A sentence is a list of words with a list of tags, or a text with a list of its spans, mappings
    of `start`, `end` (characters) and `label`. A table has them in columns: `tokens` and `tags`, or
    `text` and `entities`. `predict` answers in the form of what it is given.
    """

    _task = "tokens"

    classes_: list[str]
    """The tags, those of spans as IOB2."""

    def _learned(self, X: Any, y: Any) -> Rows:
        return Rows(rows=self._rows(X, y), table=TableConfig())

    def _judged(self, X: Any, y: Any, *, learned: Rows) -> Rows:
        return Rows(rows=self._rows(X, y), table=learned.table)

    def _rows(self, X: Any, y: Any) -> list[dict[str, object]]:
        """Sentences with their tags or spans, as a table has them."""
        if y is None:
            X, y = self._columns(X)
        sentences, answers = as_list(X, what="sentences"), as_list(y, what="tags")
        if len(sentences) != len(answers):
            raise UserError(
                f"there are {len(sentences):,} sentences and {len(answers):,} lists of tags; give "
                "each sentence its own"
            )
        rows: list[dict[str, object]] = []
        for number, (sentence, answer) in enumerate(zip(sentences, answers, strict=True)):
            found = as_list(answer, what=f"tags, row {number}")
            if isinstance(sentence, str):
                rows.append({TEXT: sentence, SPANS[0]: plain_tree(found)})
                continue
            words = _words(sentence, number)
            if len(found) != len(words):
                raise UserError(
                    f"tags, row {number}: there are {len(words)} words and {len(found)} tags"
                )
            odd = next((tag for tag in found if not is_tag(tag)), None)
            if odd is not None or None in found:
                raise UserError(f"tags, row {number}: {odd!r:.40} is no word and no whole number")
            rows.append({TOKENS[0]: words, TAGS[0]: [str(tag) for tag in found]})
        if not rows:
            raise UserError("there are no sentences")
        return rows

    def _columns(self, X: Any) -> tuple[Any, Any]:
        """The columns of a table that hold sentences and their tags."""
        names = column_names(X)
        if names is None:
            raise UserError("tags are missing; give sentences and tags, or a table")
        return (
            self._column(X, names, self.text_column, (*TOKENS, TEXT)),
            self._column(X, names, self.label_column, (*TAGS, *SPANS)),
        )

    def _column(self, X: Any, names: Sequence[str], asked: str | None, usual: Sequence[str]) -> Any:
        wanted = usual if asked is None else (asked,)
        name = next((n for w in wanted for n in names if n.lower() == w.lower()), None)
        if name is None:
            raise UserError(
                f"the table has no column {' or '.join(map(repr, wanted))}; it has "
                f"{', '.join(map(repr, names))}"
            )
        return X[name]

    def _open(self, folder: str) -> Tagger:
        return open_tagger(
            folder, max_sequence_tokens=None, precision=self.precision, device=self.device
        )

    def _adopt(self, folder: Path) -> None:
        super()._adopt(folder)
        self.classes_ = list(self._fitted().labels)

    def predict(self, X: Any) -> list[list[Any]]:
        """Tags of each list of words; of each text the spans that were found.

        A span is a mapping of `text`, `start` and `end` in characters, `label` and `score`.

        Raises:
            UserError: Nothing is fitted, or a row is neither a list of words nor a text.
        """
        tagger = self._fitted()
        sentences = self._sentences(X, tagger)
        found = tagged(tagger, sentences, tokens_per_pack=TOKENS_PER_PACK)
        said: list[list[Any]] = []
        for sentence, (tags, chances) in zip(sentences, found, strict=True):
            if sentence.text is None:
                said.append(tags)
            elif tagger.kind.has_spans:
                said.append(list(told_entities(sentence, tags, chances)))
            else:
                said.append(list(zip(sentence.words, tags, strict=True)))
        return said

    def score(self, X: Any, y: Any = None) -> float:
        """F1 of the spans, as `bertsmith evaluate` has it; of plain tags their accuracy."""
        metric = "span_f1" if self._fitted().kind.has_spans else "accuracy"
        return self._evaluated(Rows(rows=self._rows(X, y), table=TableConfig()))[metric]

    def _sentences(self, X: Any, tagger: Tagger) -> list[Sentence]:
        names = column_names(X)
        if names is not None:
            X = self._column(X, names, self.text_column, (*TOKENS, TEXT))
        found = []
        for number, one in enumerate(as_list(X, what="sentences")):
            if isinstance(one, str):
                check_whole(one, where=f"sentences, row {number}")
                found.append(sentence_of(one, split=tagger.tokenizer.split))
            else:
                found.append(Sentence(words=tuple(_words(one, number))))
        return found


def _words(sentence: Any, row: int) -> list[str]:
    """The words of a sentence that is given as such."""
    words = as_list(sentence, what=f"sentences, row {row}")
    for word in words:
        if not isinstance(word, str) or not word.strip():
            raise UserError(f"sentences, row {row}: {word!r:.40} is no word")
        check_whole(word, where=f"sentences, row {row}")
    return words
