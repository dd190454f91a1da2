"""Equal loss: 100 steps of ours are 100 steps of `transformers` in a plain PyTorch loop.

The same text, masks, starting weights and rates. On our side everything that `bertsmith pretrain`
runs (stream, packs, loop, step, optimizer, schedule); on theirs a padded grid, one loss over every
masked token, `torch.optim.AdamW`, `clip_grad_norm_`, and the schedule by its formula.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import transformers
from numpy.typing import NDArray
from torch import Tensor

from bertsmith.batch import MaskedBatch, to_padded
from bertsmith.checkpoint.state import RunState
from bertsmith.data.config import MaskingConfig, PackingConfig
from bertsmith.data.stream import PretrainStream, prefetch
from bertsmith.data.tokenizer import Vocab
from bertsmith.hf import save_model
from bertsmith.model.config import EncoderConfig
from bertsmith.model.heads import MaskedLM, initialize
from bertsmith.model.kernels import build
from bertsmith.parallel.strategies import Strategy
from bertsmith.parallel.world import World
from bertsmith.train.config import GuardConfig, OptimConfig
from bertsmith.train.interruption import Interruption
from bertsmith.train.loop import Budget, Cadence, LoopConfig, train
from bertsmith.train.optim import AdamW, group_parameters
from bertsmith.train.precision import choose_compute
from bertsmith.train.step import StepReport
from quiet_hooks import QuietHooks

STEPS, WARMUP, PEAK, DECAY, CLIP = 100, 10, 5e-3, 0.05, 0.5
BOUND_NATS = 1e-5

SHAPE = EncoderConfig(
    vocab_size=60,
    hidden_size=32,
    num_hidden_layers=2,
    num_attention_heads=2,
    intermediate_size=64,
    max_position_embeddings=32,
    hidden_dropout_prob=0.0,
    attention_probs_dropout_prob=0.0,
)


class Texts:
    """Documents of 1 to 60 tokens, some of them longer than the model reads; each of one topic."""

    def __init__(self) -> None:
        rng = np.random.default_rng(0)
        self._documents: list[NDArray[np.int64]] = [
            5 + 11 * rng.integers(5) + rng.integers(11, size=n) for n in rng.integers(1, 61, 90)
        ]
        self.num_tokens = sum(len(d) for d in self._documents)
        self.fingerprint = ""
        self.folder: Path | None = None
        self.vocab = Vocab(
            size=60,
            pad_id=0,
            unk_id=1,
            cls_id=2,
            sep_id=3,
            mask_id=4,
            special_ids=(0, 1, 2, 3, 4),
            fingerprint="",
        )

    @property
    def num_documents(self) -> int:
        return len(self._documents)

    def lengths(self, first: int, stop: int, /) -> NDArray[np.int64]:
        return np.array([len(d) for d in self._documents[first:stop]], np.int64)

    def document(self, index: int, /) -> NDArray[np.int64]:
        return self._documents[index]

    def word_starts(self, index: int, /) -> NDArray[np.bool_]:
        raise NotImplementedError


@dataclass
class Curve(QuietHooks):
    """Hooks that keep each step's loss and gradient norm."""

    losses: list[float]
    norms: list[float]

    def on_report(self, report: StepReport, state: RunState, progress: float) -> None:
        self.losses.append(report.loss)
        self.norms.append(report.grad_norm)


def their_curve(folder: Path, steps: Sequence[Sequence[MaskedBatch]]) -> Curve:
    """A plain loop."""
    torch.manual_seed(0)
    model = transformers.BertForMaskedLM.from_pretrained(folder).train()
    decayed = [p for p in model.parameters() if p.ndim == 2]
    others = [p for p in model.parameters() if p.ndim != 2]
    optimizer = torch.optim.AdamW(
        [{"params": decayed, "weight_decay": DECAY}, {"params": others, "weight_decay": 0.0}],
        betas=(0.9, 0.98),
        eps=1e-6,
    )
    curve = Curve([], [])
    for number, packs in enumerate(steps):
        rise, fall = (number + 1) / (WARMUP + 1), (STEPS - number) / (STEPS - WARMUP)
        for group in optimizer.param_groups:
            group["lr"] = PEAK * (rise if number < WARMUP else fall)
        logits, targets = zip(*(their_logits(model, one) for one in packs), strict=True)
        loss = F.cross_entropy(torch.cat(logits), torch.cat(targets))
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        curve.losses.append(float(loss.detach()))
        curve.norms.append(float(norm))
    return curve


def their_logits(model: transformers.BertForMaskedLM, batch: MaskedBatch) -> tuple[Tensor, Tensor]:
    """Scores at the masked tokens of a padded grid, and what stood there."""
    inputs = batch.inputs
    mask_BS = to_padded(torch.ones_like(inputs.input_ids_T), inputs.starts_N1)
    ids_BS = to_padded(inputs.input_ids_T, inputs.starts_N1)
    logits_TV = model(input_ids=ids_BS, attention_mask=mask_BS).logits[mask_BS.bool()]
    return logits_TV[batch.positions_M], batch.targets_M


@pytest.mark.parametrize("kernels", [True, False], ids=["kernels", "torch"])
def test_a_hundred_steps_have_the_losses_of_transformers(
    kernels: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not kernels:
        monkeypatch.setattr(build, "load", lambda storage: None)
    stream = PretrainStream(
        Texts(),
        packing=PackingConfig(tokens_per_pack=128, max_sequence_tokens=32),
        masking=MaskingConfig(),
        tokens_per_step=256,
        seed=5,
    )
    model = MaskedLM(SHAPE)
    initialize(model, config=SHAPE, seed=1)
    save_model(tmp_path / "start", model)
    config = OptimConfig(
        learning_rate=PEAK, warmup_steps=WARMUP, weight_decay=DECAY, max_grad_norm=CLIP
    )
    ours = Curve([], [])
    train(
        Strategy(model, World()),
        AdamW(group_parameters(model, config), config),
        steps=lambda start: prefetch(lambda step: stream.share(step, rank=0, num_ranks=1), start),
        config=LoopConfig(
            budget=Budget(steps=STEPS),
            optim=config,
            guard=GuardConfig(),
            seed=0,
            largest_pass_tokens=1 << 20,
            smallest_pass_tokens=512,
            evaluate=Cadence(),
            save=Cadence(),
        ),
        compute=choose_compute("fp32", "cpu"),
        state=RunState(),
        hooks=ours,
        interruption=Interruption(),
    )
    theirs = their_curve(tmp_path / "start", [stream.step(n) for n in range(STEPS)])
    worst = max(abs(a - b) for a, b in zip(ours.losses, theirs.losses, strict=True))
    assert worst < BOUND_NATS, f"losses differ by up to {worst:.1e} nats"
    assert ours.norms == pytest.approx(theirs.norms, rel=1e-3)
    assert sum(norm > CLIP for norm in theirs.norms) > 10  # clipping was at work
    assert theirs.losses[-1] < theirs.losses[0] - 0.5  # and something was learned
