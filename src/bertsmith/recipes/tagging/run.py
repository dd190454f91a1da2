"""A fine-tuning run whose model tags words."""

from collections.abc import Mapping
from pathlib import Path

import torch

from bertsmith.errors import UserError
from bertsmith.hf import load_token_classifier
from bertsmith.metrics import Metrics
from bertsmith.metrics.spans import tag_metrics
from bertsmith.model.token_classifier import TokenClassifier
from bertsmith.parallel.world import dealt
from bertsmith.recipes.finetune_run import FinetuneRun
from bertsmith.recipes.tagging.data import TaggingData
from bertsmith.recipes.tagging.task import TaggingTask, logits_MC, read_tagging_task

USE = """```python
from transformers import pipeline
pipeline("token-classification", model="model", aggregation_strategy="first")("a text of your own")
```

`first`: a word has the tag of its first piece, as in training. `bertsmith predict --model model`
says it the same way."""


class TaggingRun(FinetuneRun[TokenClassifier, TaggingData]):
    """Judges by all words of the dev part; a row of a step is a window."""

    hub_task = "token-classification"

    @property
    def use(self) -> str:
        """The pipeline has to be told what a word is."""
        return USE

    def place_of(self, row: int) -> str:
        """File and line of an example to learn from."""
        part = self._data.train
        return f"{part.path}:{part.table[row].lines[0]}"

    def new_model(self, folder: Path) -> TokenClassifier:
        """The model of a folder, with the run's head."""
        return load_token_classifier(
            folder,
            labels=self._data.tables.labels,
            objective=self._data.tables.objective,
            seed=self._config.seed,
        )[0]

    def read_best(self) -> TaggingTask | None:
        """What stands beside the best weights."""
        return read_tagging_task(self._folder / "model")

    def judge(self, max_tokens: int | None) -> Metrics:
        """Scores of every word of the dev part, each on one rank; nothing random is drawn."""
        dev, names = self._data.dev, self._data.tables.labels
        packs = dev.windows.packs(tokens_per_pack=max_tokens or self._config.tokens_per_pack)
        scores_WC = torch.zeros(len(dev.tags_W), len(names))
        for number, rows in dealt(packs, self._world, stop_asked=self.stop_asked):
            self._world.beat("the judging")
            batch, words_M = dev.windows.batch(rows, dev.tags_W)
            found_MC = logits_MC(self._model, batch, self._compute)
            if number is not None:
                scores_WC[words_M] = found_MC
        kind = self._data.tables.kind
        scores_WC = self._world.sum_tensor(scores_WC)
        try:
            counts = kind.count(scores_WC, dev.tags_W, dev.windows.words_S1, names)
        except FloatingPointError as error:
            raise UserError(
                f"after step {self.state.step:,} the model gives scores that are not finite; "
                "the best model so far stands; try a lower --optim.learning_rate"
            ) from error
        return tag_metrics(counts, has_spans=kind.has_spans)

    def write_task(self, folder: Path, step: int, *, scores: Mapping[str, float]) -> None:
        """How the model was trained to read and to answer."""
        TaggingTask(
            max_sequence_tokens=self._data.longest,
            overlap_tokens=self._data.overlap_tokens,
            step=step,
            scores=scores,
        ).write(folder)
