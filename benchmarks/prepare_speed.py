"""How fast `prepare` turns text into parts, against the tokenizers library alone.

Usage: python benchmarks/prepare_speed.py TEXT... [--rounds 3]

A: `encode_batch` with the library's own threads over texts that lie in memory, results thrown
away. B: what `prepare` does between the tokenizer and the shards: reading, decompressing, hashing,
tokenising, writing, processes started and stopped. Both use the same tokenizer and all CPUs, in
turn, the best round of each counts. Bytes are those of the text.
"""

import argparse
import json
import tempfile
import time
from pathlib import Path

from bertsmith.data.corpus import ReadOptions, find_files, read_documents
from bertsmith.data.part_workers import make_parts, usable_cpus
from bertsmith.data.plan import TokenizerOptions, make_plan
from bertsmith.data.tokenizer import write_tokenizer
from bertsmith.data.wordpiece import train_wordpiece

BATCH_TEXTS = 1000


def main() -> None:
    """Measure and print one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("text", nargs="+")
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    cpus = usable_cpus()
    read = ReadOptions(documents="paragraph", text_field="text", bad_bytes="error")
    plan = make_plan(
        find_files(arguments.text),
        read=read,
        valid_share=0.0,
        tokenizer=TokenizerOptions(
            fingerprint=None, vocab_size=8192, lowercase=True, min_frequency=2, sample_mb=10
        ),
        known=None,
        advance=lambda done, total: None,
    )
    units = plan.units()
    texts = [d.text for unit in units for span in unit.spans for d in read_documents(span, read)]
    size = sum(len(text.encode()) for text in texts)
    trained = train_wordpiece(texts[::10], vocab_size=8192, lowercase=True, min_frequency=2)
    library, ours = [], []
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) / "tokenizer"
        folder.mkdir()
        write_tokenizer(folder, trained)
        for number in range(arguments.rounds):
            began = time.perf_counter()
            for start in range(0, len(texts), BATCH_TEXTS):
                trained.tokenizer.encode_batch(
                    texts[start : start + BATCH_TEXTS], add_special_tokens=False
                )
            library.append(time.perf_counter() - began)
            began = time.perf_counter()
            make_parts(
                units,
                work=Path(scratch) / f"parts-{number}",
                tokenizer_folder=folder,
                read=read,
                workers=cpus,
                advance=lambda done, total: None,
            )
            ours.append(time.perf_counter() - began)
    print(
        json.dumps(
            {
                "text_mb": size / 1e6,
                "cpus": cpus,
                "library_mb_per_second": size / 1e6 / min(library),
                "prepare_mb_per_second": size / 1e6 / min(ours),
                "library_seconds": library,
                "prepare_seconds": ours,
            },
            indent=2,
        )
    )


if __name__ == "__main__":
    main()
