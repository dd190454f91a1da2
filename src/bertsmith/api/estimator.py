"""What all estimators share: parameters, a run behind `fit`, storage. Nothing of scikit-learn."""

import contextlib
import inspect
import json
import os
import shutil
import tempfile
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Generic, Self, TypeVar

from bertsmith.errors import UserError
from bertsmith.recipes.classifier import model_folder
from bertsmith.recipes.config import Device, FinetuneConfig
from bertsmith.recipes.finetune import finetune
from bertsmith.recipes.finetune_run import FinetuneSummary
from bertsmith.train.config import Precision

ESTIMATOR_FILE = "estimator.json"
"""In a saved folder: parameters, and what else the class needs to know."""

OpenedT = TypeVar("OpenedT")
ConfigOf = Callable[[Path, Path | None, Path], FinetuneConfig]
"""From the training file, the one to judge by and the run folder to a run."""

Rows = Iterable[Mapping[str, object]]


class Estimator(ABC, Generic[OpenedT]):
    """An object with parameters, whose `fit` is a run of `bertsmith finetune`."""

    output: str | None
    precision: Precision
    device: Device
    verbose: bool
    summary_: FinetuneSummary
    model_folder_: str

    @abstractmethod
    def __init__(self, model: str) -> None:
        """Store the parameters; nothing is checked or loaded before `fit`."""

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

    def _fit_rows(self, rows: Rows, judged: Rows | None, config_of: ConfigOf) -> None:
        """Fine-tune on rows, and keep the model.

        Args:
            rows: To learn from.
            judged: To pick the best weights by; None: a part of the others.
            config_of: Says how.

        Raises:
            UserError: A parameter, the model or a row cannot be used.
            KeyboardInterrupt: A signal stopped the training.
        """
        with tempfile.TemporaryDirectory(prefix="bertsmith-") as aside:
            train = write_rows(Path(aside, "train.jsonl"), rows)
            dev = None if judged is None else write_rows(Path(aside, "eval.jsonl"), judged)
            run = Path(self.output) if self.output is not None else Path(aside, "run")
            config = config_of(train, dev, run)
            with contextlib.nullcontext() if self.verbose else _quiet():
                summary = finetune(config)
            if summary.status != "completed":
                raise KeyboardInterrupt(f"training was stopped at step {summary.steps}")
            self.summary_ = summary
            self._adopt(run / "model" if self.output is not None else _kept(run / "model", self))

    @abstractmethod
    def _open(self) -> OpenedT:
        """Load the model of `model_folder_`."""

    def _check_kind(self, opened: OpenedT) -> None:
        """Refuse a model that this class is not for.

        Raises:
            UserError: It is one.
        """

    def _note_model(self, opened: OpenedT) -> None:
        """Find what `fit` would have noted, of a model that another program trained."""

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
            self._opened = (self.precision, self.device, self._open())
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
        loaded._check_kind(opened)
        if state is None:
            loaded._note_model(opened)
        return loaded

    def _state(self) -> dict[str, Any]:
        """What `save` writes beside the weights."""
        params = self.get_params() | {"output": None}
        return {"kind": type(self).__name__, "params": params}

    def _restore(self, state: Mapping[str, Any]) -> None:
        self.set_params(**state["params"])

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


def write_rows(path: Path, rows: Rows) -> Path:
    """Write a JSONL file."""
    with path.open("w", encoding="utf-8") as file:
        for row in rows:
            file.write(json.dumps(row, ensure_ascii=True) + "\n")
    return path


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Within the block nothing is said; the run's log.txt has it all the same."""
    with open(os.devnull, "w", encoding="utf-8") as nowhere, contextlib.redirect_stderr(nowhere):
        yield


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
