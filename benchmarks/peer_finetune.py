"""The peer: text classification with the Hugging Face Trainer, set up as well as it goes.

A worker for `interleave.py`: the same rows as ours, tokenised beforehand, SDPA, fused AdamW.
"""

import argparse
import json
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from queue import Queue
from typing import Any

import torch
import transformers

from bertsmith.hf import read_config
from bertsmith.model.flops import training_flop
from interleave import Step, serve

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--rows", required=True, help="JSONL with text and label (a number)")
parser.add_argument("--model", required=True)
parser.add_argument("--mode", choices=["dynamic", "by_length"], required=True)
parser.add_argument("--precision", choices=["fp32", "bf16"], required=True)
parser.add_argument("--batch", type=int, default=32)
parser.add_argument("--max-length", type=int, required=True)
parser.add_argument("--seed", type=int, default=0)
args = parser.parse_args()

tokenizer = transformers.AutoTokenizer.from_pretrained(args.model)
rows = [json.loads(line) for line in Path(args.rows).read_text(encoding="utf-8").splitlines()]
encoded = tokenizer([r["text"] for r in rows], truncation=True, max_length=args.max_length)
train = [
    {key: encoded[key][i] for key in encoded} | {"labels": row["label"]}
    for i, row in enumerate(rows)
]
transformers.set_seed(args.seed)
model = transformers.AutoModelForSequenceClassification.from_pretrained(
    args.model,
    num_labels=1 + max(r["label"] for r in rows),
    attn_implementation="sdpa",
    problem_type="single_label_classification",
    dtype=torch.float32,
)
shape = read_config(Path(args.model))
tickets: Queue[None] = Queue()
done: Queue[Step] = Queue()


class Meter(transformers.Trainer):  # type: ignore[misc]
    """Counts real tokens of each step and times it, collation and optimizer included."""

    counted: tuple[int, int, float] = (0, 0, 0.0)
    last_loss = 0.0
    started_at_seconds = 0.0

    def training_step(self, model: Any, inputs: Any, *rest: Any, **more: Any) -> Any:
        """Count, then train as always."""
        lengths = inputs["attention_mask"].sum(1).tolist()
        flop = training_flop(shape, lengths, num_read=len(lengths), scores_vocabulary=False)
        self.counted = (sum(lengths), len(lengths), flop)
        loss = super().training_step(model, inputs, *rest, **more)
        self.last_loss = float(loss)
        return loss


class Gate(transformers.TrainerCallback):  # type: ignore[misc]
    """Lets the Trainer take a step only when the driver has asked for one."""

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        """Wait for the first ticket."""
        self._wait()

    def on_step_end(self, *_: Any, **__: Any) -> None:
        """Report the step, then wait for the next ticket."""
        tokens, examples, flop = trainer.counted
        done.put(
            Step(
                seconds=time.perf_counter() - trainer.started_at_seconds,
                tokens=tokens,
                examples=examples,
                useful_flop=flop,
                loss=trainer.last_loss,
            )
        )
        self._wait()

    def _wait(self) -> None:
        tickets.get()
        trainer.started_at_seconds = time.perf_counter()


settings = transformers.TrainingArguments(
    output_dir=tempfile.mkdtemp(),
    per_device_train_batch_size=args.batch,
    max_steps=1_000_000,
    learning_rate=5e-5,
    weight_decay=0.01,
    optim="adamw_torch_fused",
    bf16=args.precision == "bf16",
    use_cpu=True,
    seed=args.seed,
    save_strategy="no",
    logging_strategy="no",
    report_to="none",
    disable_tqdm=True,
    dataloader_pin_memory=False,
    dataloader_drop_last=True,
    train_sampling_strategy="group_by_length" if args.mode == "by_length" else "random",
)
trainer = Meter(
    model=model,
    args=settings,
    train_dataset=train,
    callbacks=[Gate()],
    data_collator=transformers.DataCollatorWithPadding(tokenizer),
)
dtypes: set[str] = set()
model.base_model.encoder.layer[-1].intermediate.dense.register_forward_hook(
    lambda module, inputs, output: dtypes.add(str(output.dtype))
)


def steps() -> Iterator[Step]:
    """One finished step for each ticket."""
    while True:
        tickets.put(None)
        yield done.get()
        assert dtypes == {"torch.bfloat16" if args.precision == "bf16" else "torch.float32"}


facts = {
    "threads": torch.get_num_threads(),
    "samples": len(train),
    "torch": torch.__version__,
    "transformers": transformers.__version__,
}
threading.Thread(target=serve, args=(facts, steps()), daemon=True).start()
trainer.train()
