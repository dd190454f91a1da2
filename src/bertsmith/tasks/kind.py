"""What a kind of task decides, and nothing else does.

A kind reads targets from a table's cells, names the head's outputs, makes the objective, splits a
part off to judge by, scores a whole table and turns scores into answers. The recipes ask it and do
not know which one it is; a new kind is a new file here and a line in `kinds.py`.

Shape legend: N examples, C outputs of the head.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Generic, TypeVar

from torch import Tensor

from bertsmith.data.config import TableConfig
from bertsmith.data.examples import Examples, ExampleTokenizer
from bertsmith.data.tables import LabelledTable
from bertsmith.errors import UserError
from bertsmith.metrics import Metrics
from bertsmith.model.objectives import Objective, ProblemType
from bertsmith.tasks.config import MONITORS, DecideConfig, LossConfig, TaskName
from bertsmith.tasks.decisions import Decisions
from bertsmith.tasks.windows import Merge

LabelT = TypeVar("LabelT")

Said = str | float | list[str]
"""An answer as it is written: a label, a number, or labels."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Answer:
    """What a model says of one text."""

    said: Said
    chances: Sequence[float]
    """Probability of each label; empty where there are none."""


class TaskKind(ABC, Generic[LabelT]):
    """One kind of task; `LabelT` is what a table's cell becomes."""

    name: ClassVar[TaskName]
    """As `--task` says it."""

    problem_type: ClassVar[ProblemType]
    """As `config.json` says it."""

    headline: ClassVar[tuple[str, ...]]
    """Metrics that a line of progress shows."""

    holdout_said: ClassVar[str]
    """How a held-out part is taken, in a few words."""

    has_chances: ClassVar[bool] = True
    """Whether an answer has a probability a label."""

    is_apart: ClassVar[bool] = False
    """Whether each text of a row is a sequence of its own, for `encode` and the scores."""

    label_separator: str | None = None
    """What stands between the labels of a text, if that has to be known to read a table."""

    @property
    def monitors(self) -> tuple[str, ...]:
        """Metrics that can pick the best weights; the first is what auto takes."""
        return MONITORS[self.name]

    def encode(self, table: LabelledTable[LabelT], tokenizer: ExampleTokenizer) -> Examples:
        """The sequences of a table: a row each, of one text or two."""
        return tokenizer.encode(table.texts, table.pairs)

    def sequences_of(self, rows_N: Tensor, num_rows: int) -> Tensor:
        """Which of the sequences belong to some of a table's rows."""
        return rows_N

    @abstractmethod
    def read(self, cells: LabelledTable[object], config: TableConfig) -> LabelledTable[LabelT]:
        """Read a table's targets.

        Raises:
            UserError: One cannot be used, with its place.
        """

    @abstractmethod
    def output_names(self, table: LabelledTable[LabelT]) -> tuple[str, ...]:
        """Names of the head's outputs, from the training table.

        Raises:
            UserError: There is nothing to learn.
        """

    @abstractmethod
    def targets(
        self, table: LabelledTable[LabelT], names: Sequence[str], *, known_from: str
    ) -> Tensor:
        """What the loss is computed from, the first axis in the order of the rows.

        Args:
            table: A table to train or to judge by.
            names: Of the model's outputs.
            known_from: Where they come from, for a message.

        Raises:
            UserError: A label that the model does not know, with its place.
        """

    @abstractmethod
    def holdout(
        self, table: LabelledTable[LabelT], *, share: float, seed: int
    ) -> tuple[list[int], list[int]]:
        """Rows to learn from and rows to judge by, each in the table's order."""

    @abstractmethod
    def objective(self, loss: LossConfig, targets: Tensor, names: Sequence[str]) -> Objective:
        """The loss, its weights taken from the targets to learn from.

        Raises:
            UserError: The config asks for what this kind has not, or for a label nobody has.
        """

    @abstractmethod
    def merged(self, logits_WC: Tensor, owners_W: Tensor, *, merge: Merge) -> Tensor:
        """Scores of texts from those of their windows, N x C; see `merge_windows`."""

    @abstractmethod
    def decide(self, config: DecideConfig, logits_NC: Tensor, targets: Tensor) -> Decisions:
        """How scores become answers, found on examples that were not learned from."""

    def check_decide(self, config: DecideConfig) -> None:
        """Refuse what this kind does not decide.

        Raises:
            UserError: The config asks for it.
        """

    @abstractmethod
    def metrics(
        self, logits_NC: Tensor, targets: Tensor, names: Sequence[str], decisions: Decisions
    ) -> Metrics:
        """Scores of a whole table.

        Raises:
            FloatingPointError: A score of the model is not finite.
        """

    @abstractmethod
    def answers(
        self, logits_NC: Tensor, names: Sequence[str], decisions: Decisions
    ) -> list[Answer]:
        """What is said of each text."""

    @abstractmethod
    def truths(self, targets: Tensor, names: Sequence[str]) -> list[Said]:
        """Targets in the form of answers."""

    @abstractmethod
    def row_losses(self, logits_NC: Tensor, targets: Tensor, decisions: Decisions) -> Tensor:
        """How wrong the model is in each example, float64, shape N."""

    @abstractmethod
    def describe(self, names: Sequence[str]) -> str:
        """What a model of this kind is, in a few words for its card."""

    def warnings(self, targets: Tensor, names: Sequence[str], *, what: str) -> list[str]:
        """What a person should know of examples to judge by, a line each.

        Args:
            targets: Theirs.
            names: Of the outputs.
            what: The examples, in words.
        """
        return []


def nothing_to_weigh(loss: LossConfig, *, task: str) -> UserError:
    """What to say where a loss has no classes to weigh or to smooth.

    Args:
        loss: Asks for it.
        task: Its name.
    """
    key = next(
        name
        for name, is_asked in (
            ("class_weights", loss.class_weights != "none"),
            ("label_smoothing", loss.label_smoothing > 0),
            ("focal_gamma", True),
        )
        if is_asked
    )
    return UserError(f"--loss.{key}: is for tasks with labels, and this is {task}; leave it out")
