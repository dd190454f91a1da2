"""A Hugging Face Trainer that takes a step only when the driver asks for one, and measures it."""

import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from queue import Queue
from typing import Any

import torch
import transformers

from interleave import Step, serve


def training_arguments(
    *, batch: int, learning_rate: float, by_length: bool, is_bf16: bool, seed: int
) -> transformers.TrainingArguments:
    """The peer at its best on a CPU: bf16 by autocast, fused AdamW, no saving and no logging."""
    return transformers.TrainingArguments(
        output_dir=tempfile.mkdtemp(),
        per_device_train_batch_size=batch,
        max_steps=1_000_000,
        learning_rate=learning_rate,
        weight_decay=0.01,
        optim="adamw_torch_fused",
        bf16=is_bf16,
        use_cpu=True,
        seed=seed,
        save_strategy="no",
        logging_strategy="no",
        report_to="none",
        disable_tqdm=True,
        dataloader_pin_memory=False,
        dataloader_drop_last=True,
        train_sampling_strategy="group_by_length" if by_length else "random",
    )


class PacedTrainer(transformers.Trainer):  # type: ignore[misc]
    """Counts the real tokens of each step and times it, collation and optimizer included."""

    def __init__(
        self,
        *,
        model: Any,
        args: transformers.TrainingArguments,
        samples: Sequence[Mapping[str, Any]],
        collator: Callable[[Any], Any],
        flop_of: Callable[[list[int], Any], float],
    ) -> None:
        """Wait for `serve_steps`.

        Args:
            model: A BERT of transformers with a head.
            args: From `training_arguments`.
            samples: Tokenised beforehand.
            collator: Makes a padded batch of them.
            flop_of: Useful work of a batch, given its real lengths and its inputs.
        """
        super().__init__(
            model=model,
            args=args,
            train_dataset=samples,
            data_collator=collator,
            callbacks=[_Gate(self)],
        )
        self._flop_of = flop_of
        self._tickets: Queue[None] = Queue()
        self._done: Queue[Step] = Queue()
        self._counted = (0, 0, 0.0)
        self._last_loss = self._started_at_seconds = 0.0
        self._dtypes: set[torch.dtype] = set()
        model.base_model.encoder.layer[-1].intermediate.dense.register_forward_hook(
            lambda module, inputs, output: self._dtypes.add(output.dtype)
        )

    def training_step(self, model: Any, inputs: Any, *rest: Any, **more: Any) -> Any:
        """Count, then train as always."""
        lengths = inputs["attention_mask"].sum(1).tolist()
        self._counted = (sum(lengths), len(lengths), self._flop_of(lengths, inputs))
        loss = super().training_step(model, inputs, *rest, **more)
        self._last_loss = float(loss)
        return loss

    def serve_steps(self) -> None:
        """Train under the driver's orders, until it ends the process."""
        facts = {
            "threads": torch.get_num_threads(),
            "samples": len(self.train_dataset),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
        }
        # The Trainer keeps the main thread: the C library's settings of memory differ in others.
        threading.Thread(target=serve, args=(facts, self._steps()), daemon=True).start()
        self.train()

    def _steps(self) -> Iterator[Step]:
        """One finished step for each ticket."""
        wanted = torch.bfloat16 if self.args.bf16 else torch.float32
        while True:
            self._tickets.put(None)
            yield self._done.get()
            assert self._dtypes == {wanted}, self._dtypes  # the peer computes in what it is said to

    def wait_for_ticket(self) -> None:
        """Let the driver's other programs run."""
        self._tickets.get()
        self._started_at_seconds = time.perf_counter()

    def report_step(self) -> None:
        """Hand the step that has just ended to the driver."""
        tokens, examples, flop = self._counted
        self._done.put(
            Step(
                seconds=time.perf_counter() - self._started_at_seconds,
                tokens=tokens,
                examples=examples,
                useful_flop=flop,
                loss=self._last_loss,
            )
        )


class _Gate(transformers.TrainerCallback):  # type: ignore[misc]
    """Stands between steps."""

    def __init__(self, trainer: PacedTrainer) -> None:
        self._trainer = trainer

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        """Wait for the first ticket."""
        self._trainer.wait_for_ticket()

    def on_step_end(self, *_: Any, **__: Any) -> None:
        """Report the step, then wait for the next ticket."""
        self._trainer.report_step()
        self._trainer.wait_for_ticket()
