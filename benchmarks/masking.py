"""How long it takes to hide the tokens of a pack, against a training step at 4 x 512.

    python benchmarks/masking.py [--epochs 0 9 39]

Needs no data: documents are of made-up lengths and words. Prints one JSON object: seconds a pack of
each way and epoch, of the step, and shares of it.
"""

import argparse
import itertools
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

import made_up_corpus
from bertsmith.batch import MaskedBatch, StepShare
from bertsmith.data.config import MaskingConfig, PackingConfig
from bertsmith.data.stream import PretrainStream
from bertsmith.model.config import EncoderConfig
from bertsmith.model.heads import MaskedLM, initialize
from bertsmith.parallel.strategies import Strategy
from bertsmith.parallel.world import World
from bertsmith.train.config import OptimConfig
from bertsmith.train.memory_reuse import reuse_freed_memory
from bertsmith.train.optim import AdamW, group_parameters
from bertsmith.train.precision import choose_compute
from bertsmith.train.step import train_step

VOCAB = replace(made_up_corpus.VOCAB, size=8192)
PACKING = PackingConfig()
REPEATS = 5


class TextLikeCorpus:
    """Documents of lengths and frequencies like those of a real text."""

    fingerprint = ""
    folder: Path | None = None
    vocab = VOCAB

    def __init__(self, num_documents: int) -> None:
        rng = np.random.default_rng(0)
        self.num_documents = num_documents
        self._lengths = np.clip(rng.lognormal(4.5, 1.1, num_documents), 5, 2000).astype(np.int64)
        self.num_tokens = int(self._lengths.sum())
        self._ids = 5 + np.minimum(rng.zipf(1.3, self.num_tokens), VOCAB.size - 5) - 1
        self._starts = rng.random(self.num_tokens) < 0.75
        self._firsts = np.cumsum(self._lengths) - self._lengths

    def lengths(self, first: int, stop: int) -> NDArray[np.int64]:
        """Tokens of some documents."""
        return self._lengths[first:stop]

    def document(self, index: int) -> NDArray[np.int64]:
        """Ids."""
        return self._ids[self._firsts[index] :][: self._lengths[index]]

    def word_starts(self, index: int) -> NDArray[np.bool_]:
        """About three of four tokens begin a word."""
        return self._starts[self._firsts[index] :][: self._lengths[index]]

    def type_counts(self) -> NDArray[np.int64]:
        """How often each id occurs."""
        return np.bincount(self._ids, minlength=VOCAB.size)


def median_seconds(do: Callable[[], object]) -> float:
    """Of a few runs, after one that does not count."""
    do()
    found = []
    for _ in range(REPEATS):
        started = time.perf_counter()
        do()
        found.append(time.perf_counter() - started)
    return statistics.median(found)


def step_seconds(batch: MaskedBatch) -> float:
    """A training step of one pack at 4 layers of 512, bf16 where the CPU has it."""
    reuse_freed_memory()
    compute = choose_compute("auto", "cpu")
    shape = EncoderConfig(
        vocab_size=VOCAB.size,
        hidden_size=512,
        num_hidden_layers=4,
        num_attention_heads=8,
        intermediate_size=2048,
    )
    model = MaskedLM(shape)
    initialize(model, config=shape, seed=0)
    optim = OptimConfig()
    optimizer = AdamW(group_parameters(model, optim), optim)
    strategy = Strategy(model, World())
    steps = itertools.count()
    return median_seconds(
        lambda: train_step(
            strategy,
            StepShare.of_all([batch]),
            optimizer,
            compute=compute,
            scaler=None,
            step=next(steps),
            seed=0,
            learning_rate=1e-4,
            max_grad_norm=1.0,
        )
    )


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, nargs="+", default=[0, 9, 39])
    args = parser.parse_args()
    corpus = TextLikeCorpus(400)
    ways = {
        "independent, token": MaskingConfig(schedule="independent"),
        "covering, token": MaskingConfig(),
        "covering, word": MaskingConfig(unit="word"),
        "covering, span": MaskingConfig(unit="span"),
        "covering, token, rare_boost 0.3": MaskingConfig(rare_boost=0.3),
    }
    packs: dict[str, dict[str, float]] = {}
    batch = None
    for name, masking in ways.items():
        stream = PretrainStream(
            corpus,
            packing=PACKING,
            masking=masking,
            tokens_per_step=4096,
            seed=0,
            type_counts_V=corpus.type_counts(),
        )
        packs[name] = {}
        for epoch in args.epochs:
            step = epoch * stream.steps_in_epoch(0)
            batch = stream.step(step)[0]
            packs[name][f"epoch {epoch}"] = median_seconds(lambda: stream.step(step))  # noqa: B023
    assert batch is not None
    whole = step_seconds(batch)
    print(
        json.dumps(
            {
                "threads": torch.get_num_threads(),
                "tokens_per_pack": batch.num_tokens,
                "step_seconds": whole,
                "pack_seconds": packs,
                "share_of_step": {
                    name: {epoch: seconds / whole for epoch, seconds in found.items()}
                    for name, found in packs.items()
                },
            },
            indent=1,
        )
    )


if __name__ == "__main__":
    main()
