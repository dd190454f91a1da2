"""What the runs that are broken train on, and how they would have ended."""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

from fault_harness.runs import Zygote
from small_world import sentences, write_model_config, write_table

T = TypeVar("T")

STEPS = 16
"""Of a pretraining run, checkpoints at 4, 8, 12, 16, evaluations at 5, 10, 15, 16."""

PACKS_PER_STEP, EPOCH_STEPS = 2, 8
"""Two packs: two ranks and one process add the same two gradients, and so agree to the bit."""

TUNING_STEPS = 12
"""Of a fine-tuning run, checkpoints at 4, 8, 12, evaluations at 5, 10, 12; an epoch has 8."""

TUNING_EPOCH_STEPS = 8


class World:
    """A prepared corpus, tables, and the words of command lines that use them."""

    def __init__(self, root: Path, zygote: Zygote) -> None:
        """Write it.

        Args:
            root: An empty folder.
            zygote: Runs `bertsmith prepare`, and what tests want.
        """
        self.root, self.zygote = root, zygote
        (root / "text").mkdir()
        for number in range(2):
            documents = [text for text, _ in sentences(64, seed=10 + number)]
            (root / "text" / f"part-{number}.txt").write_text("\n\n".join(documents) + "\n")
        write_table(root / "train.csv", sentences(8 * TUNING_EPOCH_STEPS, seed=1))
        write_table(root / "dev.csv", sentences(24, seed=2))
        write_model_config(root / "shape.json")
        zygote.run(self.prepare(root / "prepared")).must()
        zygote.run(self.pretrain(root / "pretrained")).must()

    def prepare(self, output: Path, *more: str) -> list[str]:
        """Words that prepare the text."""
        return [
            *("prepare", "--input", str(self.root / "text"), "--output", str(output)),
            *("--vocab_size", "150", "--valid_share", "0.1", "--workers", "1", *more),
        ]

    def pretrain(self, output: Path, *more: str) -> list[str]:
        """Words of a run of `STEPS` steps, which take a second; dropout is on."""
        return [
            *("pretrain", "--data", str(self.root / "prepared")),
            *("--model", str(self.root / "shape.json"), "--output", str(output)),
            *("--steps", str(STEPS), "--tokens_per_step", "256"),
            *("--packing.tokens_per_pack", "128", "--packing.max_sequence_tokens", "32"),
            *("--optim.learning_rate", "5e-3", "--log_every_steps", "1"),
            *("--save.every_steps", "4", "--eval.every_steps", "5"),
            *("--precision", "fp32", "--device", "cpu", *more),
        ]

    def finetune(self, output: Path, *more: str) -> list[str]:
        """Words of a run of `TUNING_STEPS` steps from the pretrained model; dropout is on."""
        return [
            *("finetune", "--model", str(self.root / "pretrained" / "model")),
            *("--data", str(self.root / "train.csv"), "--eval", str(self.root / "dev.csv")),
            *("--output", str(output), "--steps", str(TUNING_STEPS)),
            *("--examples_per_step", "8", "--tokens_per_pack", "64"),
            *("--optim.learning_rate", "2e-3", "--log_every_steps", "1"),
            *("--save.every_steps", "4", "--eval_every_steps", "5"),
            *("--precision", "fp32", "--device", "cpu", *more),
        ]

    @property
    def pretrained(self) -> Path:
        """The run of `pretrain` that nothing stopped."""
        return self.root / "pretrained"


def abreast(jobs: Sequence[Callable[[], T]], *, workers: int = 2) -> list[T]:
    """What each job gives, two at a time; the first error is raised."""
    with ThreadPoolExecutor(workers) as pool:
        return [future.result() for future in [pool.submit(job) for job in jobs]]
