"""The peer: masked-language modelling with the Hugging Face Trainer, set up as well as it goes.

A worker for `interleave.py`. Reads documents that `documents.py` wrote (token ids without special
tokens) and trains BertForMaskedLM with SDPA attention, fused AdamW and bf16 autocast.
"""

import argparse
import tempfile
import threading
import time
from collections.abc import Iterator
from queue import Queue
from typing import Any

import numpy as np
import torch
import transformers

from bertsmith.model.config import EncoderConfig
from bertsmith.model.flops import training_flop
from documents import read_documents
from interleave import Step, serve

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--documents", required=True)
parser.add_argument("--tokenizer", required=True)
parser.add_argument("--mode", choices=["dynamic", "by_length", "blocks"], required=True)
parser.add_argument("--layers", type=int, required=True)
parser.add_argument("--hidden", type=int, required=True)
parser.add_argument("--heads", type=int, required=True)
parser.add_argument("--batch", type=int, required=True)
parser.add_argument("--attention-dropout", type=float, required=True)
parser.add_argument("--max-length", type=int, default=512)
parser.add_argument("--seed", type=int, default=0)
args = parser.parse_args()

tokenizer = transformers.AutoTokenizer.from_pretrained(args.tokenizer)
cls_id, sep_id, room = tokenizer.cls_token_id, tokenizer.sep_token_id, args.max_length - 2
samples = [
    [cls_id, *document[i : i + room].tolist(), sep_id]
    for document in read_documents(args.documents)
    for i in range(0, len(document), room)
]
if args.mode == "blocks":
    flat = np.concatenate([np.array(s) for s in samples])
    flat = flat[: len(flat) // args.max_length * args.max_length]
    samples = flat.reshape(-1, args.max_length).tolist()

transformers.set_seed(args.seed)
config = transformers.BertConfig(
    vocab_size=len(tokenizer),
    hidden_size=args.hidden,
    num_hidden_layers=args.layers,
    num_attention_heads=args.heads,
    intermediate_size=4 * args.hidden,
    max_position_embeddings=max(512, args.max_length),
    attention_probs_dropout_prob=args.attention_dropout,
)
config._attn_implementation = "sdpa"
shape = EncoderConfig(
    vocab_size=config.vocab_size,
    hidden_size=args.hidden,
    num_hidden_layers=args.layers,
    num_attention_heads=args.heads,
    intermediate_size=4 * args.hidden,
)
model = transformers.BertForMaskedLM(config)
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
        predicted = int((inputs["labels"] != -100).sum())
        flop = training_flop(shape, lengths, num_read=predicted, scores_vocabulary=True)
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
    learning_rate=5e-4,
    weight_decay=0.01,
    optim="adamw_torch_fused",
    bf16=True,
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
    train_dataset=[{"input_ids": s} for s in samples],
    callbacks=[Gate()],
    data_collator=transformers.DataCollatorForLanguageModeling(tokenizer, mlm_probability=0.15),
)
dtypes: set[str] = set()
model.bert.encoder.layer[-1].intermediate.dense.register_forward_hook(
    lambda module, inputs, output: dtypes.add(str(output.dtype))
)


def steps() -> Iterator[Step]:
    """One finished step for each ticket."""
    while True:
        tickets.put(None)
        yield done.get()
        assert dtypes == {"torch.bfloat16"}, dtypes  # the peer really computes in bf16


facts = {
    "threads": torch.get_num_threads(),
    "samples": len(samples),
    "torch": torch.__version__,
    "transformers": transformers.__version__,
}
# The Trainer keeps the main thread: memory settings of the C library differ in others.
threading.Thread(target=serve, args=(facts, steps()), daemon=True).start()
trainer.train()
