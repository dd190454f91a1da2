"""Make the golden checkpoint of the schema that bertsmith writes now; run once for each schema.

    python tests/faults/golden/make.py tests/faults/golden/schema-N

Paths are relative to the folder, which is also where a resumed run has to start.
"""

import json
import random
import shutil
import subprocess
import sys
from pathlib import Path

SHAPE = {
    "model_type": "bert",
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 32,
    "max_position_embeddings": 32,
    "vocab_size": 80,
}
STEPS, SAVED_AT = 12, 8


def main(folder: Path) -> None:
    """Prepare a few sentences, train a few steps, and keep one checkpoint."""
    folder.mkdir(parents=True)
    rng = random.Random(0)
    words = [a + b + c for a in "bdfg" for b in "aeo" for c in "rst"]
    lines = [" ".join(rng.choices(words, k=rng.randint(5, 12))) for _ in range(60)]
    (folder / "text.txt").write_text("\n\n".join(lines) + "\n")
    (folder / "shape.json").write_text(json.dumps(SHAPE))
    program = [sys.executable, "-m", "bertsmith"]
    prepare = ["prepare", "--input", "text.txt", "--output", "prepared", "--vocab_size", "80"]
    subprocess.run([*program, *prepare, "--valid_share", "0.1"], cwd=folder, check=True)
    pretrain = [
        *("pretrain", "--data", "prepared", "--model", "shape.json", "--output", "run"),
        *("--steps", str(STEPS), "--tokens_per_step", "128", "--packing.tokens_per_pack", "64"),
        *("--packing.max_sequence_tokens", "32", "--optim.learning_rate", "5e-3"),
        *("--save.every_steps", str(SAVED_AT), "--eval.every_steps", str(SAVED_AT)),
        *("--precision", "fp32", "--device", "cpu", "--log_every_steps", "1"),
    ]
    subprocess.run([*program, *pretrain], cwd=folder, check=True)
    run = folder / "run"
    shutil.rmtree(run / "checkpoints" / f"step-{STEPS}")
    for path in run.iterdir():
        if path.name not in ("checkpoints", "run.yaml", "metrics.jsonl"):
            shutil.rmtree(path) if path.is_dir() else path.unlink()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
