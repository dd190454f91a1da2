"""Models with `fit` and `predict`, to scikit-learn's contract and without importing it.

`fit` is `bertsmith finetune` and `predict` is `bertsmith predict`: the same recipes, so the same
numbers. A constructor only stores its parameters; what `fit` finds ends in an underscore.
"""

import contextlib
import inspect
import json
import os
import re
import shutil
import tempfile
import weakref
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Generic, Self, TypeVar

from bertsmith.api.config_of import with_options
from bertsmith.api.inputs import Given
from bertsmith.data.config import TableConfig
from bertsmith.data.tables import SKIP_HINT
from bertsmith.errors import UserError
from bertsmith.recipes.config import Device, EvaluateConfig, FinetuneConfig
from bertsmith.recipes.evaluate import evaluate
from bertsmith.recipes.finetune import finetune
from bertsmith.recipes.model_folder import model_folder
from bertsmith.tasks.config import TaskName
from bertsmith.train.config import Precision

ESTIMATOR_FILE = "estimator.json"
"""In a saved folder: parameters, and classes as they were given."""

OpenedT = TypeVar("OpenedT")


@dataclass(frozen=True, kw_only=True)
class Rows:
    """What is handed over, as a table takes it."""

    rows: Sequence[Mapping[str, object]]
    table: TableConfig
    """Names of its columns, where they have to be said."""

    given: Given | None = None
    """The same before, where it is rows of text."""


class Estimator(ABC, Generic[OpenedT]):
    """What all kinds share: parameters, training, storage; `OpenedT` is the model in use."""

    _task: ClassVar[TaskName]

    def __init__(
        self,
        model: str,
        *,
        output: str | None = None,
        epochs: float = 3.0,
        learning_rate: float = 1e-4,
        layer_decay: float | None = None,
        examples_per_step: int = 32,
        max_sequence_tokens: int | None = None,
        holdout_share: float = 0.1,
        text_column: str | None = None,
        pair_column: str | None = None,
        label_column: str | None = None,
        options: Mapping[str, Any] | None = None,
        precision: Precision = "auto",
        device: Device = "auto",
        seed: int = 0,
        overwrite: bool = False,
        verbose: bool = False,
    ) -> None:
        """Store the parameters; nothing is checked or loaded before `fit`.

        Args:
            model: Checkpoint folder or a hub name, as `bertsmith finetune --model` takes it.
            output: Run folder to keep; None: a temporary one, which goes with the object.
            epochs: Passes over the texts.
            learning_rate: Peak of the rate, of the top layer where `layer_decay` is given.
            layer_decay: Factor of the rate from each layer to the one below it.
            examples_per_step: Examples behind one optimizer step.
            max_sequence_tokens: Longest text in tokens; None: the model's limit.
            holdout_share: Share of the texts that the best weights are picked by, where `fit` is
                given no `eval_set`.
            text_column: Of a table; None: found by name. Where words have tags, of the words.
            pair_column: Of a table of pairs.
            label_column: Of a table. Where words have tags, of the tags.
            options: Any other option of `bertsmith finetune` by its key: `{"lora.rank": 8}`.
            precision: Of training and prediction.
            device: Where both run.
            seed: Everything random follows from it.
            overwrite: Whether a run in `output` may be replaced.
            verbose: Whether training says on standard error what the command would say.
        """
        self.model = model
        self.output = output
        self.epochs = epochs
        self.learning_rate = learning_rate
        self.layer_decay = layer_decay
        self.examples_per_step = examples_per_step
        self.max_sequence_tokens = max_sequence_tokens
        self.holdout_share = holdout_share
        self.text_column = text_column
        self.pair_column = pair_column
        self.label_column = label_column
        self.options = options
        self.precision = precision
        self.device = device
        self.seed = seed
        self.overwrite = overwrite
        self.verbose = verbose

    @classmethod
    def _parameter_names(cls) -> list[str]:
        return [name for name in inspect.signature(cls.__init__).parameters if name != "self"]

    def get_params(self, deep: bool = True) -> dict[str, Any]:
        """Parameters by name; `deep` is there for scikit-learn and changes nothing."""
        return {name: getattr(self, name) for name in self._parameter_names()}

    def set_params(self, **params: Any) -> Self:
        """Set some parameters.

        Raises:
            ValueError: A name is none of them.
        """
        known = self._parameter_names()
        for name, value in params.items():
            if name not in known:
                raise ValueError(
                    f"{type(self).__name__} has no parameter {name!r}; it has {', '.join(known)}"
                )
            setattr(self, name, value)
        return self

    def __repr__(self) -> str:
        """The call that makes it, without what is as by default."""
        defaults = inspect.signature(type(self).__init__).parameters
        said = [
            f"{name}={value!r}"
            for name, value in self.get_params().items()
            if value != defaults[name].default
        ]
        return f"{type(self).__name__}({', '.join(said)})"

    def fit(self, X: Any, y: Any = None, *, eval_set: Any = None) -> Self:
        """Fine-tune.

        Args:
            X: What is to be read, or a table that has it and the answers: pandas, polars, Arrow.
            y: The answers; None: the table has them.
            eval_set: A table, or (X, y), to pick the best weights by; None: a part of X is held
                out.

        Raises:
            UserError: A parameter, the model or a row cannot be used.
            KeyboardInterrupt: A signal stopped the training.
        """
        learned = self._learned(X, y)
        judged: Rows | None = None
        if eval_set is not None:
            pair = eval_set if isinstance(eval_set, tuple) else (eval_set, None)
            judged = self._judged(*pair, learned=learned)
        with tempfile.TemporaryDirectory(prefix="bertsmith-") as aside:
            train, dev = Path(aside, "train.jsonl"), Path(aside, "eval.jsonl")
            _write_rows(train, learned.rows)
            if judged is not None:
                _write_rows(dev, judged.rows)
            run = Path(self.output) if self.output is not None else Path(aside, "run")
            config = self._config(learned.table, train, None if judged is None else dev, run)
            said = {train: "the rows to learn from", dev: "the rows to judge by"}
            with contextlib.nullcontext() if self.verbose else _quiet(), _without_paths(said):
                summary = finetune(config)
            if summary.status != "completed":
                raise KeyboardInterrupt(f"training was stopped at step {summary.steps}")
            self.summary_ = summary
            self._adopt(run / "model" if self.output is not None else _kept(run / "model", self))
        return self

    def _evaluated(self, judged: Rows) -> Mapping[str, float]:
        """Scores of the fitted model as `bertsmith evaluate` finds them, by metric."""
        self._fitted()
        with tempfile.TemporaryDirectory(prefix="bertsmith-") as aside:
            data = Path(aside, "rows.jsonl")
            _write_rows(data, judged.rows)
            config = EvaluateConfig(
                model=self.model_folder_,
                data=str(data),
                table=judged.table,
                precision=self.precision,
                device=self.device,
            )
            with _quiet(), _without_paths({data: "the rows to judge by"}):
                return evaluate(config).metrics.by_name()

    @abstractmethod
    def _learned(self, X: Any, y: Any) -> Rows:
        """Read what is to be learned, and note what the answers are."""

    @abstractmethod
    def _judged(self, X: Any, y: Any, *, learned: Rows) -> Rows:
        """Read what is to be judged by, as a table with the columns of `learned`."""

    @abstractmethod
    def _open(self, folder: str) -> OpenedT:
        """Load a model.

        Raises:
            UserError: It is none of this kind.
        """

    def _note_model(self, opened: OpenedT) -> None:
        """Find what `fit` would have noted, of a model that another program trained."""

    def _table(self) -> TableConfig:
        return TableConfig(
            text_column=self.text_column,
            pair_column=self.pair_column,
            label_column=self.label_column,
        )

    def _config(
        self, table: TableConfig, train: Path, dev: Path | None, run: Path
    ) -> FinetuneConfig:
        """The config of the run."""
        try:
            config = FinetuneConfig(
                model=self.model,
                data=str(train),
                output=str(run),
                eval=None if dev is None else str(dev),
                task=self._task,
                epochs=self.epochs,
                examples_per_step=self.examples_per_step,
                max_sequence_tokens=self.max_sequence_tokens,
                holdout_share=self.holdout_share,
                table=table,
                precision=self.precision,
                device=self.device,
                seed=self.seed,
                overwrite=self.overwrite,
            )
        except (ValueError, TypeError) as error:
            raise UserError(str(error)) from error
        rates = {
            "optim.learning_rate": self.learning_rate,
            "optim.layer_decay": self.layer_decay,
        }
        return with_options(config, rates | dict(self.options or {}))

    def _adopt(self, folder: Path) -> None:
        """Take a model folder for the fitted model."""
        self.model_folder_ = str(folder)
        self._opened: tuple[Precision, Device, OpenedT] | None = None

    def _fitted(self) -> OpenedT:
        """The fitted model, loaded when it is first needed.

        Raises:
            UserError: There is none yet, or its folder is gone.
        """
        if not hasattr(self, "model_folder_"):
            raise UserError(f"{type(self).__name__} is not fitted yet; call fit first")
        if self._opened is None or self._opened[:2] != (self.precision, self.device):
            self._opened = (self.precision, self.device, self._open(self.model_folder_))
        return self._opened[2]

    def save(self, folder: str | Path) -> None:
        """Write the model into a new folder, which `load`, every verb and transformers read.

        Raises:
            UserError: It exists, or nothing is fitted.
        """
        self._fitted()
        target = Path(folder)
        if target.exists():
            raise UserError(f"save: {target} exists already; name a new folder")
        try:
            shutil.copytree(self.model_folder_, target)
            text = json.dumps(self._state(), indent=2, ensure_ascii=False)
            (target / ESTIMATOR_FILE).write_text(text + "\n", encoding="utf-8")
        except OSError as error:
            raise UserError(f"save: {target} cannot be written ({error.strerror})") from error

    @classmethod
    def load(cls, folder: str | Path) -> Self:
        """Open a folder that `save` or `bertsmith finetune` wrote.

        Of a model that the command trained, classes are the labels' names.

        Raises:
            UserError: It is no model of this kind.
        """
        found = model_folder(str(folder))
        loaded = cls(model=str(folder))
        try:
            state = json.loads((found / ESTIMATOR_FILE).read_text(encoding="utf-8"))
            loaded._restore(state)
        except FileNotFoundError:
            state = None
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise UserError(f"{found / ESTIMATOR_FILE}: not readable ({error})") from error
        loaded._adopt(found)
        opened = loaded._fitted()
        if state is None:
            loaded._note_model(opened)
        return loaded

    def _state(self) -> dict[str, Any]:
        """What `save` writes beside the weights."""
        params = self.get_params() | {"output": None}
        return {"kind": type(self).__name__, "params": params}

    def _restore(self, state: Mapping[str, Any]) -> None:
        self.set_params(**state["params"])

    def __sklearn_tags__(self) -> Any:
        """What scikit-learn asks an object about itself; called by nobody else."""
        from sklearn.utils import InputTags, Tags, TargetTags  # noqa: PLC0415

        return Tags(
            estimator_type=None,
            target_tags=TargetTags(required=False),
            input_tags=InputTags(two_d_array=False, string=True),
        )

    def __getstate__(self) -> dict[str, Any]:
        """All of it, the files of a fitted model included: it works where the folder is not."""
        state = dict(self.__dict__)
        if "model_folder_" in state:
            root = Path(state.pop("model_folder_"))
            state.pop("_opened", None)
            state["_files"] = {
                str(file.relative_to(root)): file.read_bytes()
                for file in sorted(root.rglob("*"))
                if file.is_file()
            }
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Write a fitted model's files into a temporary folder of this object's own."""
        state = dict(state)
        files = state.pop("_files", None)
        self.__dict__.update(state)
        if files is not None:
            folder = _own_folder(self)
            for name, content in files.items():
                (folder / name).parent.mkdir(parents=True, exist_ok=True)
                (folder / name).write_bytes(content)
            self._adopt(folder)


def _write_rows(path: Path, rows: Sequence[Mapping[str, object]]) -> None:
    with path.open("w", encoding="utf-8") as file:
        for row in rows:
            file.write(json.dumps(row, ensure_ascii=True) + "\n")


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Within the block nothing is said; the run's log.txt has it all the same."""
    with open(os.devnull, "w", encoding="utf-8") as nowhere, contextlib.redirect_stderr(nowhere):
        yield


@contextlib.contextmanager
def _without_paths(said: Mapping[Path, str]) -> Iterator[None]:
    """Within the block a mistake is told in the user's terms, who knows nothing of our files."""
    try:
        yield
    except UserError as error:
        message = str(error).replace(f"; {SKIP_HINT}", "")
        for path, words in said.items():
            message = re.sub(rf"{re.escape(str(path))}:(\d+)", rf"{words}, line \1", message)
            message = message.replace(str(path), words)
        raise UserError(message) from error


def _own_folder(owner: object) -> Path:
    """A temporary folder that goes when its owner does."""
    folder = tempfile.mkdtemp(prefix="bertsmith-")
    weakref.finalize(owner, shutil.rmtree, folder, ignore_errors=True)
    return Path(folder)


def _kept(model: Path, owner: object) -> Path:
    """A run's model, moved to where its owner keeps it."""
    target = _own_folder(owner) / "model"
    shutil.move(model, target)
    return target
