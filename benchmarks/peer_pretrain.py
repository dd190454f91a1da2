"""The peer: masked-language modelling with the Hugging Face Trainer, set up as well as it goes.

A worker for `interleave.py`. Reads documents that `documents.py` wrote (token ids without special
tokens) and trains BertForMaskedLM with SDPA attention, fused AdamW and bf16 autocast.
"""

import argparse

import numpy as np
import transformers

from bertsmith.model.config import EncoderConfig
from bertsmith.model.flops import training_flop
from documents import read_documents
from paced_trainer import PacedTrainer, training_arguments

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
PacedTrainer(
    model=model,
    args=training_arguments(
        batch=args.batch,
        learning_rate=5e-4,
        by_length=args.mode == "by_length",
        is_bf16=True,
        seed=args.seed,
    ),
    samples=[{"input_ids": s} for s in samples],
    collator=transformers.DataCollatorForLanguageModeling(tokenizer, mlm_probability=0.15),
    flop_of=lambda lengths, inputs: training_flop(
        shape,
        lengths,
        num_read=int((inputs["labels"] != -100).sum()),
        scores_vocabulary=True,
    ),
).serve_steps()
