"""Our side: masked-language modelling with bertsmith's own stream, step and optimizer.

A worker for `interleave.py`, on the documents that `documents.py` wrote: what `bertsmith pretrain`
runs, without its evaluation and files.
"""

import argparse
import itertools
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from bertsmith.batch import StepShare
from bertsmith.data.config import MaskingConfig, PackingConfig
from bertsmith.data.stream import PretrainStream, prefetch
from bertsmith.data.tokenizer import Vocab, load_tokenizer
from bertsmith.model.config import EncoderConfig
from bertsmith.model.flops import training_flop
from bertsmith.model.heads import MaskedLM, initialize
from bertsmith.model.kernels import build
from bertsmith.parallel.strategies import Strategy
from bertsmith.parallel.world import World
from bertsmith.train.config import OptimConfig
from bertsmith.train.memory_reuse import reuse_freed_memory
from bertsmith.train.optim import AdamW, group_parameters
from bertsmith.train.precision import choose_compute
from bertsmith.train.schedule import learning_rate
from bertsmith.train.step import train_step
from documents import read_documents
from interleave import Step, serve

TOTAL_STEPS = 1_000_000
"""As the peer is told, so that both schedules stand at the same place."""


class InMemoryCorpus:
    """The documents, as the stream wants them."""

    def __init__(self, documents: list[NDArray[np.int32]], vocab: Vocab) -> None:
        self.vocab = vocab
        self.num_documents = len(documents)
        self.num_tokens = sum(len(d) for d in documents)
        self.fingerprint = ""
        self.folder: Path | None = None
        self._documents = documents

    def lengths(self, first: int, stop: int) -> NDArray[np.int64]:
        """Tokens of some documents."""
        return np.array([len(d) for d in self._documents[first:stop]], dtype=np.int64)

    def document(self, number: int) -> NDArray[np.int32]:
        """Token ids without special tokens."""
        return self._documents[number]

    def word_starts(self, number: int) -> NDArray[np.bool_]:
        """Not noted: units are tokens."""
        raise NotImplementedError

    def name_of(self, number: int) -> str:
        """For messages."""
        return f"document {number}"


def main() -> None:
    """Serve steps."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--documents", required=True)
    parser.add_argument("--tokenizer", required=True)
    parser.add_argument("--layers", type=int, required=True)
    parser.add_argument("--hidden", type=int, required=True)
    parser.add_argument("--heads", type=int, required=True)
    parser.add_argument("--tokens-per-step", type=int, required=True)
    parser.add_argument("--tokens-per-pack", type=int, required=True)
    parser.add_argument("--attention-dropout", type=float, required=True)
    parser.add_argument("--precision", choices=["fp32", "bf16"], default="bf16")
    parser.add_argument("--max-length", type=int, default=512)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()

    reuse_freed_memory()
    compute = choose_compute(args.precision, "cpu")
    vocab = load_tokenizer(Path(args.tokenizer)).vocab
    corpus = InMemoryCorpus(read_documents(args.documents), vocab)
    stream = PretrainStream(
        corpus,
        packing=PackingConfig(
            tokens_per_pack=args.tokens_per_pack, max_sequence_tokens=args.max_length
        ),
        masking=MaskingConfig(share=0.15),
        tokens_per_step=args.tokens_per_step,
        seed=args.seed,
    )
    shape = EncoderConfig(
        vocab_size=vocab.size,
        hidden_size=args.hidden,
        num_hidden_layers=args.layers,
        num_attention_heads=args.heads,
        intermediate_size=4 * args.hidden,
        attention_probs_dropout_prob=args.attention_dropout,
    )
    model = MaskedLM(shape)
    initialize(model, config=shape, seed=args.seed)
    optim = OptimConfig(learning_rate=5e-4, warmup_share=0.0)
    optimizer = AdamW(group_parameters(model, optim), optim)

    strategy = Strategy(model, World())

    def steps() -> Iterator[Step]:
        packs_ahead = prefetch(stream.step, 0)
        for step in itertools.count():
            started = time.perf_counter()
            packs = next(packs_ahead)
            rate = learning_rate(optim, progress=step / TOTAL_STEPS, step=step)
            report = train_step(
                strategy,
                StepShare.of_all(packs),
                optimizer,
                compute=compute,
                scaler=None,
                step=step,
                seed=args.seed,
                learning_rate=rate,
                max_grad_norm=1.0,
            )
            seconds = time.perf_counter() - started
            lengths = [n for p in packs for n in p.inputs.starts_N1.diff().tolist()]
            yield Step(
                seconds=seconds,
                tokens=report.num_tokens,
                examples=len(lengths),
                useful_flop=training_flop(
                    shape, lengths, num_read=report.num_targets, scores_vocabulary=True
                ),
                loss=report.loss,
            )

    facts = {
        "threads": torch.get_num_threads(),
        "samples": corpus.num_documents,
        "torch": torch.__version__,
        "packing_efficiency": round(stream.efficiency, 4),
        "kernels": build.status(),
    }
    serve(facts, steps())


if __name__ == "__main__":
    main()
