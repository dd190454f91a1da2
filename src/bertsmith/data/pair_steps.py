"""The steps of a training on rows of texts that are read one by one and judged together.

Shape legend: N sequences, S texts of a step.
"""

from dataclasses import replace

import torch
from torch import Tensor

from bertsmith.batch import LabelledBatch, SentenceBatch, StepShare
from bertsmith.data.examples import Examples, TrainingSteps


class PairSteps(TrainingSteps):
    """`TrainingSteps` over rows, each of which is `texts_per_row` of the examples.

    The examples are all first texts in the table's order, then all second ones, and so on. No step
    has a row alone, which would have nothing to be told apart from.
    """

    def __init__(
        self,
        examples: Examples,
        labels_N: Tensor,
        *,
        texts_per_row: int,
        examples_per_step: int,
        tokens_per_pack: int,
        seed: int,
        at_once: int = 1,
    ) -> None:
        """As of `TrainingSteps`; `examples_per_step` counts rows."""
        super().__init__(
            examples,
            labels_N,
            examples_per_step=examples_per_step,
            tokens_per_pack=tokens_per_pack,
            seed=seed,
            at_once=at_once,
        )
        self._texts_per_row = texts_per_row
        self._num_rows = len(examples) // texts_per_row
        wanted = -(-self._num_rows // examples_per_step)
        self.steps_per_epoch = max(1, min(wanted, self._num_rows // 2))

    def rows(self, step: int) -> list[int]:
        """Sequences of one step: the rows' first texts, their second ones, and so on."""
        rows = super().rows(step)
        columns = range(self._texts_per_row)
        return [row + column * self._num_rows for column in columns for row in rows]

    def share(self, step: int, *, rank: int, num_ranks: int) -> StepShare[LabelledBatch]:
        """A rank's packs, each with what its texts have to know of the whole step."""
        share = super().share(step, rank=rank, num_ranks=num_ranks)
        sequences_S = torch.tensor(self.rows(step))
        targets_S2 = self._labels_N[sequences_S]
        sorted_S, places_S = sequences_S.sort()

        def placed(batch: LabelledBatch) -> SentenceBatch:
            places_N = torch.zeros(batch.inputs.num_sequences, dtype=torch.int64)
            places_N[: batch.num_targets] = places_S[torch.searchsorted(sorted_S, batch.rows_N)]
            return SentenceBatch(
                inputs=batch.inputs,
                labels_N=places_N,
                rows_N=batch.rows_N,
                step_targets_S2=targets_S2,
            )

        return replace(share, packs=[placed(batch) for batch in share.packs])

    def alone(self, batch: LabelledBatch) -> LabelledBatch:
        """The batch as a step of its own, whose rows say nothing to each other."""
        num_sequences = batch.inputs.num_sequences
        num_texts = -(-num_sequences // self._texts_per_row) * self._texts_per_row
        return SentenceBatch(
            inputs=batch.inputs,
            labels_N=torch.arange(num_sequences),
            rows_N=batch.rows_N,
            step_targets_S2=torch.zeros(num_texts, 2, dtype=torch.float64),
        )
