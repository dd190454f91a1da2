"""The forms of data that fine-tuning knows: rows of text, tagged words, questions on a text.

Everything that a verb does differently for one of them stands behind `Form`; the verbs ask once
which form a file or a model is of (`forms`).
"""

from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any, ClassVar, Generic, TypeVar

from bertsmith.checkpoint.state import RunState
from bertsmith.hf import LoadReport
from bertsmith.recipes.config import EvaluateConfig, FinetuneConfig, PredictConfig
from bertsmith.recipes.evaluation import Evaluation
from bertsmith.recipes.finetune_data import FinetuneData
from bertsmith.recipes.finetune_run import Aside, FinetunedModel, FinetuneRun
from bertsmith.recipes.predictions import PredictSummary
from bertsmith.recipes.training import Rig

ModelT = TypeVar("ModelT", bound=FinetunedModel)
DataT = TypeVar("DataT", bound=FinetuneData)


class Form(ABC, Generic[ModelT, DataT]):
    """What fine-tuning, evaluation and prediction do by the form of the data."""

    row: ClassVar[str] = "text"
    """What `predict` reads, in a word."""

    done: ClassVar[str] = "labelled"
    """What `predict` has done to its rows, in a word."""

    adapter_task: ClassVar[str] = ""
    """What its adapters are for, in peft's words; empty: what no other form takes."""

    @abstractmethod
    def is_asked(self, config: FinetuneConfig) -> bool:
        """Whether this is the form to learn: by what is asked for, or by what the data shows.

        Raises:
            UserError: The data cannot be read, or is of another form than is asked for.
        """

    @abstractmethod
    def open(self, config: FinetuneConfig, source: Path, *, at_once: int) -> DataT:
        """Read, check and tokenise the data.

        Args:
            config: Names it.
            source: Folder of the checkpoint, whose tokenizer is used.
            at_once: Devices that share a step.

        Raises:
            UserError: A file, the tokenizer or a setting does not fit.
        """

    @abstractmethod
    def found_in(self, config: FinetuneConfig, data: DataT, source: Path) -> FinetuneConfig:
        """The config with what `auto` came to, for a model that comes from `source`.

        Raises:
            UserError: The task has not what is asked for.
        """

    @abstractmethod
    def load(self, config: FinetuneConfig, data: DataT, folder: Path) -> tuple[ModelT, LoadReport]:
        """The model of a folder, with the head that the data asks for.

        Raises:
            UserError: It cannot be read.
        """

    @abstractmethod
    def run(
        self,
        config: FinetuneConfig,
        rig: Rig,
        model: ModelT,
        data: DataT,
        state: RunState,
        *,
        aside: Aside,
    ) -> FinetuneRun[ModelT, DataT]:
        """What happens around the steps."""

    @abstractmethod
    def largest(self, data: DataT, *, tokens: int) -> Any:
        """A batch of so many tokens that needs as much memory as any of the data's steps."""

    def reads_all(self, data: DataT) -> bool:
        """Whether the head reads every token, instead of one a sequence."""
        return True

    def num_outputs(self, data: DataT) -> int:
        """Numbers that the head gives for what it reads."""
        return max(len(data.tables.labels), 1)

    @abstractmethod
    def is_of(self, folder: Path) -> bool:
        """Whether a model's folder holds a model of this form.

        Raises:
            UserError: The folder cannot be read.
        """

    @abstractmethod
    def evaluate(self, config: EvaluateConfig) -> Evaluation:
        """Score a model of this form.

        Raises:
            UserError: The model or the data cannot be used, or the mistakes cannot be written.
        """

    @abstractmethod
    def predict(self, config: PredictConfig) -> PredictSummary:
        """Have a model of this form answer, and write what it says.

        Raises:
            UserError: The model, the data or the output cannot be used. The output then does not
                exist, or is what it was.
        """
