"""Training with only those rows of the token table that the data can reach.

For short texts the table is most of a model's memory traffic: gradient, norm and update touch all
30,522 rows though a step reads some hundred. Rows whose token never occurs in the training data get
no gradient at all, so they are set aside and stay as they are.

Shape legend: V vocabulary, R rows in use, D width, T packed tokens.
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from typing import Protocol, TypeVar

import torch
from torch import Tensor

from bertsmith.batch import LabelledBatch, MaskedBatch
from bertsmith.model.encoder import Encoder

BatchT = TypeVar("BatchT", LabelledBatch, MaskedBatch)


class CompactVocabulary:
    """Narrows an encoder's token table for training, and shows it whole where that matters.

    Rows set aside are not decayed either: pulling a token towards zero that no gradient ever
    pushes back would only make it worse for the texts to come. That is the one difference to
    training with the whole table.
    """

    def __init__(self, encoder: Encoder, used_ids: Tensor) -> None:
        """Narrow the table at once; do so before an optimizer sees the parameters.

        Args:
            encoder: Its token table is replaced in place, the parameter object stays the same.
            used_ids: Every token id that training will ask for, in any order.
        """
        self._weight = encoder.embeddings.token.weight
        self._whole_VD = self._weight.data
        self._rows_R = torch.unique(used_ids).to(torch.int64)
        self._compact_V = torch.full((len(self._whole_VD),), -1, dtype=torch.int64)
        self._compact_V[self._rows_R] = torch.arange(len(self._rows_R))
        self._rows_R = self._rows_R.to(self._weight.device)
        self._weight.data = self._whole_VD[self._rows_R]

    @property
    def num_rows(self) -> int:
        """Rows that are trained."""
        return len(self._rows_R)

    @property
    def num_parameters_aside(self) -> int:
        """Elements of the rows that are set aside."""
        return self._whole_VD.numel() - self.num_rows * self._whole_VD.shape[1]

    def narrowed(self, batch: BatchT) -> BatchT:
        """The batch with the narrow table's row numbers for its token ids."""
        ids_T = self.compact_ids(batch.inputs.input_ids_T)
        return replace(batch, inputs=replace(batch.inputs, input_ids_T=ids_T))

    def compact_ids(self, input_ids_T: Tensor) -> Tensor:
        """The rows of the narrow table that stand for token ids, of the same dtype."""
        ids_T = self._compact_V[input_ids_T.long()]
        assert bool((ids_T >= 0).all()), "every id of the training data is in use"
        return ids_T.to(input_ids_T.dtype)

    @contextmanager
    def whole(self) -> Iterator[None]:
        """Within the block the encoder has its whole table and takes ordinary token ids.

        What the block writes into rows that are trained (an older checkpoint's) stays.
        """
        narrow_RD = self._weight.data
        self._whole_VD[self._rows_R] = narrow_RD
        self._weight.data = self._whole_VD
        try:
            yield
        finally:
            narrow_RD.copy_(self._whole_VD[self._rows_R])
            self._weight.data = narrow_RD


class Vocabulary(Protocol):
    """Which rows of the token table are trained, and which ids ask for them."""

    @property
    def num_rows(self) -> int:
        """Rows that are trained."""

    @property
    def num_parameters_aside(self) -> int:
        """Elements of the rows that are set aside."""

    def narrowed(self, batch: BatchT) -> BatchT:
        """The batch with the numbers of the table's rows for its token ids."""

    def whole(self) -> AbstractContextManager[None]:
        """Within the block the encoder has its whole table and takes ordinary token ids."""


class WholeVocabulary:
    """Stands in for `CompactVocabulary` where the whole token table is trained: under fsdp."""

    def __init__(self, used_ids: Tensor) -> None:
        """Change nothing.

        Args:
            used_ids: Every token id that training will ask for, in any order.
        """
        self.num_rows, self.num_parameters_aside = len(torch.unique(used_ids)), 0

    def narrowed(self, batch: BatchT) -> BatchT:
        """The batch as it is."""
        return batch

    @contextmanager
    def whole(self) -> Iterator[None]:
        """The table always is."""
        yield
