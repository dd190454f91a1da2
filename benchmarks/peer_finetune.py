"""The peer: text classification with the Hugging Face Trainer, set up as well as it goes.

A worker for `interleave.py`: the same rows as ours, tokenised beforehand, SDPA, fused AdamW.
"""

import argparse
import json
from pathlib import Path

import torch
import transformers

from bertsmith.hf import read_config
from bertsmith.model.flops import training_flop
from paced_trainer import PacedTrainer, training_arguments

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
PacedTrainer(
    model=model,
    args=training_arguments(
        batch=args.batch,
        learning_rate=5e-5,
        by_length=args.mode == "by_length",
        is_bf16=args.precision == "bf16",
        seed=args.seed,
    ),
    samples=train,
    collator=transformers.DataCollatorWithPadding(tokenizer),
    flop_of=lambda lengths, inputs: training_flop(
        shape, lengths, num_read=len(lengths), scores_vocabulary=False
    ),
).serve_steps()
