"""Our side: text classification with bertsmith's own examples, step and optimizer.

A worker for `interleave.py`, on the same rows as the peer: what `bertsmith finetune` runs, without
its evaluation and files.
"""

import argparse
import itertools
import json
import time
from collections.abc import Iterator
from pathlib import Path

import torch

from bertsmith.batch import StepShare
from bertsmith.data.examples import ExampleTokenizer, TrainingSteps
from bertsmith.data.tokenizer import load_tokenizer
from bertsmith.hf import load_classifier
from bertsmith.model.compact import CompactVocabulary
from bertsmith.model.flops import training_flop
from bertsmith.model.kernels import build
from bertsmith.parallel.strategies import Strategy
from bertsmith.parallel.world import World
from bertsmith.train.config import OptimConfig
from bertsmith.train.memory_reuse import reuse_freed_memory
from bertsmith.train.optim import AdamW, group_parameters
from bertsmith.train.precision import choose_compute
from bertsmith.train.schedule import learning_rate
from bertsmith.train.step import train_step
from interleave import Step, serve

TOTAL_STEPS = 1_000_000
"""As the peer is told, so that both schedules stand at the same place."""


def main() -> None:
    """Serve steps."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", required=True, help="JSONL with text and label (a number)")
    parser.add_argument("--model", required=True)
    parser.add_argument("--precision", choices=["fp32", "bf16"], default="bf16")
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--max-length", type=int, required=True)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()

    reuse_freed_memory()
    compute = choose_compute(args.precision, "cpu")
    rows = [json.loads(line) for line in Path(args.rows).read_text("utf-8").splitlines()]
    labels = tuple(str(i) for i in range(1 + max(r["label"] for r in rows)))
    model, _ = load_classifier(Path(args.model), labels=labels, seed=args.seed)
    tokenizer = load_tokenizer(Path(args.model)).tokenizer
    encoder = ExampleTokenizer(tokenizer, max_sequence_tokens=args.max_length)
    examples = encoder.encode([r["text"] for r in rows], None)
    vocabulary = CompactVocabulary(model.encoder, examples.input_ids_T)
    data = TrainingSteps(
        examples,
        torch.tensor([r["label"] for r in rows]),
        examples_per_step=args.batch,
        tokens_per_pack=4096,
        seed=args.seed,
    )
    optim = OptimConfig(learning_rate=5e-5, warmup_share=0.0, beta2=0.999, eps=1e-8)
    optimizer = AdamW(group_parameters(model, optim), optim)

    strategy = Strategy(model, World())

    def steps() -> Iterator[Step]:
        for step in itertools.count():
            started = time.perf_counter()
            packs = [vocabulary.narrowed(pack) for pack in data.batches(step)]
            report = train_step(
                strategy,
                StepShare.of_all(packs),
                optimizer,
                compute=compute,
                scaler=None,
                step=step,
                seed=args.seed,
                learning_rate=learning_rate(optim, progress=step / TOTAL_STEPS, step=step),
                max_grad_norm=1.0,
            )
            seconds = time.perf_counter() - started
            lengths = [n for p in packs for n in p.inputs.starts_N1.diff().tolist()]
            yield Step(
                seconds=seconds,
                tokens=report.num_tokens,
                examples=len(lengths),
                useful_flop=training_flop(
                    model.encoder.config,
                    lengths,
                    num_read=len(lengths),
                    scores_vocabulary=False,
                ),
                loss=report.loss,
            )

    facts = {
        "threads": torch.get_num_threads(),
        "samples": len(rows),
        "torch": torch.__version__,
        "token_rows": vocabulary.num_rows,
        "kernels": build.status(),
    }
    serve(facts, steps())


if __name__ == "__main__":
    main()
