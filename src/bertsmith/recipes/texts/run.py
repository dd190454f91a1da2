"""A fine-tuning run whose model gives a text one row of scores, or its embedding."""

from collections.abc import Mapping
from pathlib import Path

import torch

from bertsmith.data.examples import packs_by_length
from bertsmith.errors import UserError
from bertsmith.metrics import Metrics
from bertsmith.parallel.world import dealt
from bertsmith.recipes.finetune_run import FinetuneRun
from bertsmith.recipes.texts.data import TaskData
from bertsmith.recipes.texts.model import Dropout, TextModel, load_text_model
from bertsmith.recipes.texts.task import Task, logits_NC, read_task
from bertsmith.tasks.decisions import Decisions

EMBEDDING_USE = """```python
from sentence_transformers import SentenceTransformer
SentenceTransformer("model").encode(["a text of your own"])
```

or `bertsmith predict --model model --data texts.txt --output vectors.npy`."""

MULTILABEL_USE = """```python
from transformers import pipeline
pipeline("text-classification", model="model", top_k=None)("a text of your own")
```

gives each label's probability; which of them are said to be there, `bertsmith predict --model
model` knows (`decisions` in `bertsmith.json`: a half, or each label's own threshold)."""


class TextRun(FinetuneRun[TextModel, TaskData]):
    """Judges by one row of scores a text, or by its embedding."""

    _decisions = Decisions()
    """How scores became answers when the model was judged last."""

    @property
    def hub_task(self) -> str:
        """By whether texts have scores or embeddings."""
        return "sentence-similarity" if self._data.tables.kind.is_apart else "text-classification"

    @property
    def use(self) -> str | None:
        """Where a plain pipeline would not show the model's answers."""
        kind = self._data.tables.kind
        if kind.is_apart:
            return EMBEDDING_USE
        is_several = kind.problem_type == "multi_label_classification"
        return MULTILABEL_USE if is_several and self._config.head.norm != "layer" else None

    def place_of(self, row: int) -> str:
        """File and line of an example to learn from."""
        return self._data.train.table.place(row)

    def new_model(self, folder: Path) -> TextModel:
        """The model of a folder, with the run's head."""
        return load_text_model(folder, self._config, self._data.tables, dropout=Dropout())[0]

    def read_best(self) -> Task | None:
        """What stands beside the best weights."""
        return read_task(self._folder / "model")

    def judge(self, max_tokens: int | None) -> Metrics:
        """Scores on every example of the dev part, each on one rank; nothing random is drawn.

        `max_tokens` is that of one pass, as in training.
        """
        dev, names = self._data.dev, self._data.tables.labels
        packs = packs_by_length(
            dev.examples.lengths_N,
            range(len(dev.examples)),
            tokens_per_pack=max_tokens or self._config.tokens_per_pack,
        )
        scores_WC = torch.zeros(len(dev.examples), self._model.num_outputs)
        for number, rows in dealt(packs, self._world, stop_asked=self.stop_asked):
            self._world.beat("the judging")
            found_NC = logits_NC(self._model, dev.examples.pack(rows), self._compute)
            if number is not None:
                scores_WC[torch.tensor(rows)] = found_NC
        kind = self._data.tables.kind
        scores_NC = kind.merged(
            self._world.sum_tensor(scores_WC),
            dev.examples.owners_N,
            merge=self._config.window.merge,
        )
        try:
            self._decisions = kind.decide(self._config.decide, scores_NC, dev.labels_N)
            return kind.metrics(scores_NC, dev.labels_N, names, self._decisions)
        except FloatingPointError as error:
            raise UserError(
                f"after step {self.state.step:,} the model gives scores that are not finite; "
                "the best model so far stands; try a lower --optim.learning_rate"
            ) from error

    def write_task(self, folder: Path, step: int, *, scores: Mapping[str, float]) -> None:
        """How the model was trained to read and to answer."""
        task = Task(
            columns=self._data.tables.columns,
            max_sequence_tokens=self._data.longest,
            overlap_tokens=self._data.overlap_tokens,
            merge=self._config.window.merge,
            step=step,
            scores=scores,
            problem_type=self._data.tables.kind.problem_type,
            label_separator=self._data.tables.kind.label_separator,
            decisions=self._decisions.as_json(self._data.tables.labels),
        )
        task.write(folder)
