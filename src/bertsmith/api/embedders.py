"""A model that makes vectors of texts, trained on pairs of them.

Shape legend: N texts, D width.
"""

from dataclasses import replace
from typing import Any

import numpy as np

from bertsmith.api.estimator import Estimator, Rows
from bertsmith.api.inputs import Given, column_names, read_given
from bertsmith.data.config import TableConfig
from bertsmith.data.pair_tables import NEGATIVES, SCORES
from bertsmith.recipes.texts.embed import Embedder, open_embedder

TOKENS_PER_PACK = 8192


class SentenceEmbedder(Estimator[Embedder]):
    """Vectors of texts, learned from pairs: `SentenceEmbedder(model).fit(pairs)`.

    Pairs are tuples of two texts that belong together, or with scores of how near they are; a table
    has them in columns, as `bertsmith finetune --task embedding` takes it.
    """

    _task = "embedding"

    def _learned(self, X: Any, y: Any) -> Rows:
        return _as_rows(self._pairs(X, y))

    def _judged(self, X: Any, y: Any, *, learned: Rows) -> Rows:
        found = self._pairs(X, y)
        assert learned.given is not None, "rows of text"
        return _as_rows(replace(found, columns=learned.given.columns))

    def _pairs(self, X: Any, y: Any) -> Given:
        label = self.label_column
        for name in column_names(X) or ():
            if y is None and label is None and name.lower() in (*SCORES, *NEGATIVES):
                label = name
        table = replace(self._table(), label_column=label)
        is_labelled = y is not None or label is not None
        return read_given(X, y, table=table, is_labelled=is_labelled, is_pair=True)

    def _open(self, folder: str) -> Embedder:
        return open_embedder(
            folder, max_sequence_tokens=None, precision=self.precision, device=self.device
        )

    def transform(self, X: Any) -> np.ndarray[Any, np.dtype[np.float32]]:
        """The vector of each text, of length 1, shape (N, D).

        Raises:
            UserError: Nothing is fitted, or a row is no text.
        """
        embedder = self._fitted()
        given = read_given(
            X, table=TableConfig(text_column=self.text_column), is_labelled=False, is_pair=False
        )
        if not given.texts:
            return np.zeros((0, embedder.model.num_outputs), dtype=np.float32)
        examples = embedder.tokenizer.encode(given.texts, None)
        return embedder.embed(examples, tokens_per_pack=TOKENS_PER_PACK).numpy()

    def predict(self, X: Any) -> np.ndarray[Any, np.dtype[np.float32]]:
        """As `transform`."""
        return self.transform(X)

    def score(self, X: Any, y: Any = None) -> float:
        """How well vectors order texts.

        Of scored pairs Spearman's correlation of score and cosine; of others the mean reciprocal
        rank of each first text's own second text among all of them.
        """
        scores = self._evaluated(_as_rows(self._pairs(X, y)))
        return scores.get("spearman", scores.get("mean_reciprocal_rank", float("nan")))


def _as_rows(given: Given) -> Rows:
    """Pairs as a table takes them."""
    columns = given.columns
    table = TableConfig(
        text_column=columns.text,
        pair_column=columns.pair,
        label_column=None if given.labels is None else columns.label,
    )
    return Rows(rows=list(given.rows()), table=table, given=given)
