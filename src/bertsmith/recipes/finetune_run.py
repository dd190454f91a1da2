"""What a fine-tuning run does around its steps: judge, keep the best, save, say, sum up."""

import math
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Generic, Protocol, TypeVar

from bertsmith.checkpoint.folder import Identity
from bertsmith.checkpoint.state import RunState
from bertsmith.data.tokenizer import write_tokenizer
from bertsmith.hf import save_model, write_model_files
from bertsmith.hf.sentence import write_sentence_files
from bertsmith.metrics import LOWER_IS_BETTER, Metrics
from bertsmith.model.attention import describe_attention
from bertsmith.model.compact import Vocabulary
from bertsmith.model.embedder import SentenceEmbedder
from bertsmith.model.flops import training_flop
from bertsmith.model.heads import SequenceClassifier
from bertsmith.model.lora import merged
from bertsmith.model.parts import EMBEDDINGS
from bertsmith.model.span_model import SpanModel
from bertsmith.model.token_classifier import TokenClassifier
from bertsmith.recipes.adapters import Lora
from bertsmith.recipes.best_model import BestModel
from bertsmith.recipes.config import FinetuneConfig
from bertsmith.recipes.finetune_data import FinetuneData, Tables
from bertsmith.recipes.run_checkpoints import WrittenFirst
from bertsmith.recipes.trained_parts import is_frozen
from bertsmith.recipes.training import Rig, TrainingRun
from bertsmith.report.card import ModelCard, write_card
from bertsmith.report.devices import DeviceUse
from bertsmith.report.gemm import gemm_flop_per_second
from bertsmith.report.metrics_log import MetricsLog
from bertsmith.report.progress import TrainingDisplay
from bertsmith.report.run_folder import peak_memory_bytes, versions
from bertsmith.report.training_log import TrainingLog
from bertsmith.train.guard import BadStepError
from bertsmith.train.loop import Budget, Cadence, LoopConfig, Outcome

JUDGEMENTS_AN_EPOCH = 2
"""How often the model is judged when the config says nothing."""

TIE = 1e-6
"""Scores that differ by less are as good as each other; the loss then decides."""


@dataclass(frozen=True, kw_only=True)
class FinetuneSummary:
    """How a run ended; `summary.json` holds the same."""

    status: str
    """completed, interrupted or failed."""

    stopped_early: bool
    """Whether judgements stopped getting better before the budget was spent."""

    steps: int
    epochs: float
    """Passes over the training examples that were made."""

    best_step: int | None
    """The step whose weights `model/` holds."""

    metrics: dict[str, float]
    """Scores of `model/` on the examples it was judged by."""

    valid_loss: float | None
    real_tokens: int
    real_tokens_per_second: float | None
    """Of training steps alone, the first few left out."""

    seconds: float
    """Of the whole run, resumed parts together."""

    train_loss: float | None
    """Smoothed over the last steps."""

    skipped_steps: list[int]
    """Passed over, because their numbers had gone wrong."""

    overflowed_steps: int
    """Updates left out because an fp16 gradient overflowed."""

    train_examples: int
    eval_examples: int
    num_labels: int
    cut_examples: int
    """Training examples that were too long and lost their end."""

    windowed_examples: int
    """Training examples that were too long and are read in windows."""

    leaked_examples: int
    """Examples to judge by whose text stands in the training part too."""

    peak_memory_bytes: int
    """Most memory used: on a GPU by tensors (torch's `max_memory_allocated`), on a CPU by the whole
    process (resident)."""

    planned_peak_bytes: int | None
    """What was planned of the same: on a GPU the peak of tensors, on a CPU with what is beside
    them. None: the planner does not know such a run."""

    gemm_share: float | None
    """Useful FLOP/s over the machine's GEMM rate, measured at the start."""

    ranks: int
    """Processes that trained."""

    devices: list[DeviceUse]
    """What each device carried; empty before the end."""

    idle_share: float | None
    """Share of the work that devices with fewer tokens waited for."""

    parameters: int
    seed: int
    versions: dict[str, str]


def rank_of(scores: Mapping[str, float], monitor: str) -> float:
    """How good scores are, larger is better: by `monitor`, and where that ties by the loss.

    Accuracy on a small table often ties while the model still learns. Values closer than
    `TIE` count as tied.
    """
    value = -scores[monitor] if monitor in LOWER_IS_BETTER else scores[monitor]
    return value - TIE * scores["loss"] / (1.0 + scores["loss"])


FinetunedModel = SequenceClassifier | SentenceEmbedder | TokenClassifier | SpanModel
ModelT = TypeVar("ModelT", bound=FinetunedModel)
DataT = TypeVar("DataT", bound=FinetuneData)


@dataclass(frozen=True, kw_only=True)
class Aside:
    """What a run has beside model, data and rig."""

    vocabulary: Vocabulary
    identity: Identity
    source: Path
    """Folder of the model that the run began with."""

    lora: Lora | None


class Best(Protocol):
    """What stands beside the best weights."""

    @property
    def step(self) -> int:
        """Of the weights."""
        ...

    @property
    def scores(self) -> Mapping[str, float]:
        """How they did."""
        ...


class FinetuneRun(TrainingRun[ModelT, FinetuneSummary], Generic[ModelT, DataT]):
    """What happens around the steps: lines, judgements, the best model, the end."""

    def __init__(
        self,
        config: FinetuneConfig,
        rig: Rig,
        model: ModelT,
        data: DataT,
        state: RunState,
        *,
        aside: Aside,
    ) -> None:
        """Nothing is written yet."""
        super().__init__(rig, model, state, identity=aside.identity, settings=config)
        self._config, self._data, self._steps = config, data, data.steps
        self._vocabulary = aside.vocabulary
        self._source, self._lora = aside.source, aside.lora
        self._best = BestModel[ModelT](self._speaker.say)

    @property
    def written_first(self) -> Sequence[WrittenFirst]:
        """A checkpoint speaks of the best weights."""
        return [self._best]

    def on_rollback(self) -> RunState | None:
        """Go back, also from weights that were the best."""
        self._best.forget()
        return super().on_rollback()

    def in_whole(self) -> AbstractContextManager[None]:
        """Within the block the token table is the whole one."""
        return self._vocabulary.whole()

    @property
    def _num_parameters(self) -> int:
        trained = sum(p.numel() for p in self._model.parameters())
        return trained + self._vocabulary.num_parameters_aside

    @property
    @abstractmethod
    def hub_task(self) -> str:
        """The hub's name of the task."""

    @property
    def use(self) -> str | None:
        """What the card says on how the model is used; None: by the pipeline of its task."""
        return None

    def say_banner(self) -> None:
        """What is about to run, before time is spent on it."""
        say, data = self._speaker.say, self._data
        for line in data.tables.describe():
            say(line)
        for name, part in (("training", data.train), ("judging", data.dev)):
            examples = part.examples
            if examples.num_windowed:
                say(
                    f"{name}: {examples.num_windowed:,} texts of more than {data.longest} tokens "
                    f"are read in windows that share {data.overlap_tokens} tokens, "
                    f"{len(examples):,} sequences in all"
                )
            if examples.num_cut:
                tokens = examples.tokens_cut / (len(examples.input_ids_T) + examples.tokens_cut)
                say(
                    f"{name}: {examples.num_cut:,} examples of more than {data.longest} tokens "
                    f"lose their end ({tokens:.1%} of all tokens)"
                )
        num_steps = loop_config(self._config, self._data).budget.steps
        say(
            f"step: up to {self._config.examples_per_step} examples; {num_steps:,} steps, "
            f"{self._steps.steps_per_epoch:,} an epoch; best by {self._config.monitor}; "
            f"seed {self._config.seed}"
        )
        say(
            f"model: {self._num_parameters:,} parameters, {self._compute.name} on "
            f"{self._compute.device}; {self._vocabulary.num_rows:,} tokens occur in the data"
            + (
                ""
                if is_frozen(self._model, EMBEDDINGS)
                else ", and only their rows of the token table are trained"
            )
        )
        shape, compute = self._model.encoder.config, self._compute
        say(describe_attention(shape, device=compute.device, dtype=compute.dtype))

    def new_log(self, metrics: MetricsLog | None, display: TrainingDisplay) -> TrainingLog:
        """Rates against the machine's GEMM limit, which is measured now."""
        shape, lengths = self._model.encoder.config, self._data.train.examples.lengths_N.tolist()
        in_a_step = sum(lengths) // self._steps.steps_per_epoch
        most = self.state.micro_batch_tokens or in_a_step
        flop = training_flop(shape, lengths, num_read=len(lengths), scores_vocabulary=False)
        return TrainingLog(
            metrics,
            display,
            log_every_steps=self._config.log_every_steps,
            rate_shares=self.rate_shares,
            flop_per_token=flop / sum(lengths),
            gemm_flop_per_second=self._strategy.packs_at_once
            * gemm_flop_per_second(
                shape,
                tokens=max(1, min(self._config.tokens_per_pack, in_a_step, most)),
                compute=self._compute,
            ),
        )

    def on_evaluate(self, state: RunState) -> RunState:
        """Judge the model; keep its weights if it is the best so far."""
        with self._vocabulary.whole():
            return self._judge_and_keep(state)

    def _judge_and_keep(self, state: RunState) -> RunState:
        assert self._log is not None
        scores = self.judge(state.micro_batch_tokens).by_name()
        self._log.scores(scores, state)
        value = rank_of(scores, self._config.monitor)
        is_best = state.best_value is None or value > state.best_value
        # A young model finds no span yet, or always the same class, while its loss falls.
        is_learning = state.least_loss is None or scores["loss"] < state.least_loss
        state = replace(state, least_loss=scores["loss"] if is_learning else state.least_loss)
        shown = ", ".join(
            f"{name.replace('_f1', ' F1').replace('_', ' ')} {scores[name]:.4f}"
            for name in self._data.tables.kind.headline
        )
        self._speaker.say(f"step {state.step:,}: {shown}" + (" (best)" if is_best else ""))
        if not is_best:
            is_new = state.value is None  # else a finished run is judged again: it counted already
            standing = 0 if is_learning else state.evaluations_since_best + is_new
            return replace(state, value=value, evaluations_since_best=standing)
        model = self._strategy.whole_model(self._model)

        def write(best: ModelT) -> None:
            self.check_folder()
            labels = self._data.tables.labels

            def write_more(fresh: Path) -> None:
                self.write_beside(fresh, state.step, scores=scores)
                if isinstance(best, SentenceEmbedder):
                    write_sentence_files(
                        fresh,
                        pooling=best.pooling,
                        width=best.num_outputs,
                        max_sequence_tokens=self._data.longest,
                    )

            if self._lora is not None:
                self._lora.save(self._folder, best, labels=labels, write_more=write_more)
            save_model(self._folder / "model", merged(best), labels=labels, write_more=write_more)

        def keep() -> bool:
            self._best.keep(model, write)
            return True

        self._world.on_main(keep)
        return replace(
            state, value=value, best_value=value, best_step=state.step, evaluations_since_best=0
        )

    def should_stop(self, state: RunState) -> bool:
        """Whether so many judgements in a row had neither a better score nor a lower loss."""
        patience = self._config.patience
        return patience is not None and state.evaluations_since_best >= patience

    @abstractmethod
    def judge(self, max_tokens: int | None) -> Metrics:
        """Scores on every example of the dev part; nothing random is drawn.

        `max_tokens` is that of one pass, as in training.
        """

    @abstractmethod
    def new_model(self, folder: Path) -> ModelT:
        """The model of a folder, with the run's head."""

    @abstractmethod
    def read_best(self) -> Best | None:
        """What stands beside the best weights; None if there are none."""

    @abstractmethod
    def write_task(self, folder: Path, step: int, *, scores: Mapping[str, float]) -> None:
        """Add to a model's folder how it was trained to read and to answer."""

    @abstractmethod
    def place_of(self, row: int) -> str:
        """Where an example to learn from stands in its file."""

    def write_beside(self, folder: Path, step: int, *, scores: Mapping[str, float]) -> None:
        """Add what weights do not say: the tokenizer, told how long texts are, and the task."""
        tokenizer = self._data.tokenizer
        longest = {"model_max_length": self._data.longest}
        write_tokenizer(folder, replace(tokenizer, config=tokenizer.config | longest))
        self.write_task(folder, step, scores=scores)

    def documents_of(self, error: BadStepError) -> str:
        """Examples of the bad pack, or of the whole step, by their places."""
        packs = self._steps.packs(error.step)
        bad = packs if error.pack is None else [packs[error.pack]]
        part = self._data.train
        owners_N, num_rows = part.examples.owners_N, len(part.table)  # a row may be two sequences
        rows = sorted({int(owners_N[row]) % num_rows for pack in bad for row in pack})
        shown = ", ".join(self.place_of(row) for row in rows[:5])
        return shown + (f" and {len(rows) - 5:,} more" if len(rows) > 5 else "")

    def load_model(self, checkpoint: Path) -> ModelT:
        """The model of one of the run's checkpoints; with adapters, these on the run's base."""
        model = self.new_model(checkpoint if self._lora is None else self._source)
        if self._lora is not None:
            self._lora.put_on(model, checkpoint)
        return model

    def write_model(self, folder: Path, model: ModelT, step: int) -> None:
        """A checkpoint's model: nobody judged its weights, so it has no scores."""
        write_model_files(folder, merged(model), labels=self._data.tables.labels)
        if self._lora is not None:
            self._lora.write_in_checkpoint(folder, model)
        self.write_beside(folder, step, scores={})

    def conclude(self, outcome: Outcome) -> FinetuneSummary:
        """Write the summary and the card, or say how to go on."""
        is_over = outcome.status in ("completed", "stopped_early")
        summary = self.summarize(
            "completed" if is_over else "interrupted",
            outcome.state,
            stopped_early=outcome.status == "stopped_early",
        )
        if not is_over:
            self.say_how_to_go_on(outcome)
            return summary
        if summary.stopped_early:
            self._speaker.say(
                f"stopped early: {outcome.state.evaluations_since_best} judgements without a "
                f"better {self._config.monitor} or a lower loss"
            )

        def write() -> bool:
            self.check_folder()
            scores = ", ".join(f"{name} {value:.4f}" for name, value in summary.metrics.items())
            self._speaker.say(f"best model, of step {summary.best_step:,}: {scores}")
            card = finetune_card(
                self._config, summary, self._data.tables, hub_task=self.hub_task, use=self.use
            )
            write_card(self._folder, card)
            return True

        self._world.on_main(write)
        return summary

    def summarize(
        self, status: str, state: RunState, *, stopped_early: bool = False
    ) -> FinetuneSummary:
        """Write `summary.json`; its metrics are those of the weights in `model/`.

        Rank 0 alone reads what it wrote: on the others the summary has no metrics.
        """
        log = self._log
        rate = None if log is None else log.tokens_per_second
        best = self.read_best() if self._world.is_main else None
        metrics = {} if best is None else dict(best.scores)
        summary = FinetuneSummary(
            status=status,
            stopped_early=stopped_early,
            steps=state.step,
            epochs=round(state.step / self._steps.steps_per_epoch, 3),
            best_step=None if best is None else best.step,
            metrics=metrics,
            valid_loss=metrics.get("loss"),
            real_tokens=state.tokens,
            real_tokens_per_second=None if rate is None else round(rate, 1),
            seconds=round(state.elapsed_seconds, 3),
            train_loss=state.smoothed_loss,
            skipped_steps=list(state.skipped),
            overflowed_steps=state.overflows,
            train_examples=len(self._data.train.table),
            eval_examples=len(self._data.dev.table),
            num_labels=len(self._data.tables.labels),
            cut_examples=self._data.train.examples.num_cut,
            windowed_examples=self._data.train.examples.num_windowed,
            leaked_examples=self._data.tables.num_leaked,
            peak_memory_bytes=peak_memory_bytes(self._compute.device),
            planned_peak_bytes=self.planned_peak_bytes,
            gemm_share=None if log is None else log.gemm_share,
            ranks=self._world.size,
            devices=self._uses,
            idle_share=None if log is None else log.idle_share,
            parameters=self._num_parameters,
            seed=self._config.seed,
            versions=versions(),
        )
        self.write_summary(asdict(summary))
        return summary


def loop_config(config: FinetuneConfig, data: FinetuneData) -> LoopConfig:
    """The loop's budget and cadences."""
    steps = data.steps
    num_steps = config.steps or max(1, math.ceil(config.epochs * steps.steps_per_epoch))
    every = config.eval_every_steps or math.ceil(steps.steps_per_epoch / JUDGEMENTS_AN_EPOCH)
    longest = data.longest_example
    most = data.most_tokens(config.examples_per_step)
    largest = max(min(config.tokens_per_pack, most), longest)
    return LoopConfig(
        budget=Budget(steps=num_steps),
        optim=config.optim,
        guard=config.guard,
        seed=config.seed,
        largest_pass_tokens=largest,
        # A batch norm takes its statistics over a pass: it cannot be cut.
        smallest_pass_tokens=largest if config.head.norm == "batch" else longest,
        evaluate=Cadence(every_steps=every),
        save=Cadence.of_saves(config.save),
    )


def finetune_card(
    config: FinetuneConfig,
    summary: FinetuneSummary,
    tables: Tables,
    *,
    hub_task: str,
    use: str | None,
) -> ModelCard:
    """The model card of a fine-tuned model."""
    shown = ", ".join(tables.labels[:10]) + (", ..." if len(tables.labels) > 10 else "")
    return ModelCard(
        title=f"{Path(config.model).name}, fine-tuned on {Path(config.data).name}",
        task=hub_task,
        fits_transformers=config.head.norm != "layer",
        summary=f"A BERT {tables.kind.describe(tables.labels)}, fine-tuned by bertsmith.",
        data={
            "training": f"{config.data}, {summary.train_examples:,} examples",
            "judging": f"{config.eval or 'held out of it'}, {summary.eval_examples:,} examples",
            **({"labels": shown} if shown else {}),
        },
        settings={
            "model": config.model,
            "epochs": f"{summary.epochs:g}",
            "examples a step": f"{config.examples_per_step}",
            "learning rate": f"{config.optim.learning_rate} ({config.optim.schedule})",
            "norm of the head": config.head.norm,
            "LoRA": f"rank {config.lora.rank}, on {', '.join(config.lora.targets)}"
            if config.lora.is_on
            else "none",
            "seed": f"{config.seed}",
        },
        results={name: f"{value:.4f}" for name, value in summary.metrics.items()},
        versions=summary.versions,
        repeat="bertsmith finetune --config run.yaml --output NEW_FOLDER",
        example="a text of your own",
        use=use,
    )
