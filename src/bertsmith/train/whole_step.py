"""Losses that look at a whole step: a first pass without a graph, and gradients for the second.

A contrastive loss pairs every text of a step with all the others, so that it cannot be summed up
over packs. But its gradient with respect to the embeddings can be had from the embeddings alone:
they are computed pack by pack with nothing kept for a backward, gathered over ranks, and the loss
and its gradient follow. The second pass is the ordinary one: it leads each pack's gradient on into
the parameters. Dropout is a function of the step and of a token's place in it, so that both passes
drop the same. How a step is cut or shared out changes nothing but rounding.

Source: Gao et al. 2021, "Scaling deep contrastive learning batch size under memory limited setup"
(GradCache).

Shape legend: S texts of the step, N of a part, D width.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import cast

import torch
from torch import Tensor

from bertsmith.batch import SentenceBatch
from bertsmith.model.embedder import SentenceEmbedder
from bertsmith.parallel.strategies import Strategy
from bertsmith.train.micro_batch import PackT, Part
from bertsmith.train.precision import Compute


def sees_whole_step(parts: Sequence[Part[PackT]]) -> bool:
    """Whether the loss of these parts is one of the whole step."""
    return isinstance(parts[0].batch, SentenceBatch)


@torch.no_grad()
def first_pass(
    strategy: Strategy, parts: Sequence[Part[PackT]], *, compute: Compute, dropout_seed: int
) -> list[Tensor]:
    """Embeddings of each part's texts, fp32, on the CPU; with the dropout of the second pass."""
    found = []
    model = cast(SentenceEmbedder, strategy.model)
    for part in parts:
        batch = cast(SentenceBatch, part.batch)
        with compute.autocast():
            embeddings_ND = model.logits_NC(
                batch.inputs.to(compute.device), dropout_seed=dropout_seed
            )
        found.append(embeddings_ND[: batch.num_targets].float().cpu())
    return found


def with_gradients(
    strategy: Strategy,
    parts: Sequence[Part[PackT]],
    embeddings: Sequence[Tensor],
    *,
    compute: Compute,
) -> list[Part[PackT]]:
    """The parts with what the whole step's loss says of their texts.

    Args:
        strategy: Holds the model, whose objective it is, and the ranks.
        parts: This rank's.
        embeddings: Of each part, from `first_pass`.
        compute: Where the loss is computed.
    """
    objective = cast(SentenceEmbedder, strategy.model).objective
    assert objective is not None, "a model to train"
    batches = [cast(SentenceBatch, part.batch) for part in parts]
    targets_S2 = batches[0].step_targets_S2
    embeddings_SD = torch.zeros(len(targets_S2), embeddings[0].shape[1])
    for batch, embeddings_ND in zip(batches, embeddings, strict=True):
        embeddings_SD[batch.labels_N[: batch.num_targets]] = embeddings_ND
    embeddings_SD = strategy.world.sum_tensor(embeddings_SD)  # each text is on one rank
    embeddings_SD = embeddings_SD.to(compute.device).requires_grad_()
    with torch.enable_grad():
        losses_B = objective.losses_B(embeddings_SD, targets_S2.to(compute.device))
        (gradients_SD,) = torch.autograd.grad(losses_B.sum(), embeddings_SD)
    # A step divides by its texts: each has its row's loss.
    gradients_SD = gradients_SD.cpu() * objective.texts_per_row
    losses_S = losses_B.detach().cpu().repeat(objective.texts_per_row)
    return [
        replace(
            part,
            batch=replace(
                batch,
                gradients_ND=gradients_SD[batch.labels_N[: batch.num_targets]],
                losses_N=losses_S[batch.labels_N[: batch.num_targets]],
            ),  # type: ignore[arg-type]
        )
        for part, batch in zip(parts, batches, strict=True)
    ]
