"""Losses of sentence embeddings: what the texts of a row are to be to each other.

Unlike other objectives these see all texts of a step at once: in a contrastive loss every text is
a negative of all the others. `train.whole_step` gathers them, whatever packs they lie in.

Texts come in columns: first the first text of every row, then the second of every row, and so on;
so a step of B rows with K texts each has S = K * B. Shape legend: S texts, B rows, D width.
"""

from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from bertsmith.model.objectives import ProblemType


class PairObjective(Protocol):
    """A loss of rows of texts; an `Objective` as well, whose sequences are all those of a step."""

    @property
    def problem_type(self) -> ProblemType:
        """As `bertsmith.json` calls it."""
        ...

    @property
    def texts_per_row(self) -> int:
        """2, or 3 with a hard negative."""
        ...

    def losses_B(self, embeddings_SD: Tensor, targets_S2: Tensor) -> Tensor:
        """Each row's loss.

        Args:
            embeddings_SD: Of length 1, fp32.
            targets_S2: Each text's number, the same for equal texts, and its row's score.
        """
        ...

    def nats(self, logits_NC: Tensor, labels_N: Tensor) -> Tensor:
        """Summed over the texts, each with its row's loss."""
        ...

    def weights(self, labels_N: Tensor) -> Tensor | None:
        """All alike."""
        ...


@dataclass(frozen=True, kw_only=True)
class Contrastive:
    """Cross-entropy of finding a row's second text among those of all rows.

    The scores are cosines times `scale`. A candidate that is the same text as the anchor, or as its
    positive, or that belongs to another row with the same anchor, is no negative and is left out.

    Source: Henderson et al. 2017 (multiple negatives ranking); van den Oord et al. 2018 (InfoNCE).
    """

    scale: float = 20.0
    """One over the temperature."""

    texts_per_row: int = 2
    """3: the third text of a row is a negative of all rows."""

    @property
    def problem_type(self) -> ProblemType:
        """Ours: `transformers` has no such head."""
        return "sentence_embedding"

    def losses_B(self, embeddings_SD: Tensor, targets_S2: Tensor) -> Tensor:
        """Minus the log-probability of each row's second text, in nats."""
        num_rows = len(embeddings_SD) // self.texts_per_row
        scores_BC = self.scale * embeddings_SD[:num_rows] @ embeddings_SD[num_rows:].T
        scores_BC = scores_BC.masked_fill(self.false_negatives_BC(targets_S2), -torch.inf)
        return F.cross_entropy(
            scores_BC, torch.arange(num_rows, device=scores_BC.device), reduction="none"
        )

    def false_negatives_BC(self, targets_S2: Tensor) -> Tensor:
        """Which candidates are as right for a row as its own second text, that one left out."""
        ids_S = targets_S2[:, 0]
        num_rows = len(ids_S) // self.texts_per_row
        anchors_B, candidates_C = ids_S[:num_rows], ids_S[num_rows:]
        positives_B = candidates_C[:num_rows]
        is_false_BC = anchors_B[:, None] == candidates_C
        is_false_BC |= positives_B[:, None] == candidates_C
        is_false_BC[:, :num_rows] |= anchors_B[:, None] == anchors_B
        is_false_BC[:, :num_rows].fill_diagonal_(False)
        return is_false_BC

    def nats(self, logits_NC: Tensor, labels_N: Tensor) -> Tensor:
        """Summed over the texts."""
        return self.losses_B(logits_NC, labels_N).sum() * self.texts_per_row

    def weights(self, labels_N: Tensor) -> Tensor | None:
        """All alike."""
        return None


@dataclass(frozen=True, kw_only=True)
class CosineError:
    """Squared difference of a row's cosine and its score."""

    @property
    def texts_per_row(self) -> int:
        """Two."""
        return 2

    @property
    def problem_type(self) -> ProblemType:
        """As of `Contrastive`."""
        return "sentence_embedding"

    def losses_B(self, embeddings_SD: Tensor, targets_S2: Tensor) -> Tensor:
        """Squared errors."""
        num_rows = len(embeddings_SD) // 2
        cosines_B = (embeddings_SD[:num_rows] * embeddings_SD[num_rows:]).sum(1)
        return (cosines_B - targets_S2[:num_rows, 1].to(cosines_B.dtype)).square()

    def nats(self, logits_NC: Tensor, labels_N: Tensor) -> Tensor:
        """Summed over the texts."""
        return self.losses_B(logits_NC, labels_N).sum() * 2

    def weights(self, labels_N: Tensor) -> Tensor | None:
        """All alike."""
        return None
