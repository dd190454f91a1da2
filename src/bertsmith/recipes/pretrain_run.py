"""What a pretraining run does around its steps: score, save, say, sum up."""

from dataclasses import asdict, dataclass, replace
from pathlib import Path

from bertsmith.batch import MaskedBatch
from bertsmith.data.shards import TokenCorpus
from bertsmith.data.stream import PretrainStream
from bertsmith.hf import save_model, write_model_files
from bertsmith.model.attention import describe_attention
from bertsmith.model.flops import training_flop
from bertsmith.model.heads import MaskedLM
from bertsmith.parallel.strategies import Strategy
from bertsmith.recipes.config import PretrainConfig
from bertsmith.recipes.resume import fingerprints_of
from bertsmith.report.card import ModelCard, write_card
from bertsmith.report.devices import DeviceUse
from bertsmith.report.gemm import gemm_flop_per_second
from bertsmith.report.metrics_log import MetricsLog
from bertsmith.report.progress import Speaker, TrainingDisplay
from bertsmith.report.run_folder import peak_memory_bytes, versions, write_summary
from bertsmith.report.training_log import TrainingLog
from bertsmith.train.checkpoint import RunState, keep_newest, save_checkpoint
from bertsmith.train.loop import Budget, Outcome
from bertsmith.train.optim import AdamW
from bertsmith.train.precision import Compute
from bertsmith.train.step import StepReport
from bertsmith.train.validation import MaskedScores, score_masked_lm


@dataclass(frozen=True, kw_only=True)
class PretrainSummary:
    """How a run ended; `summary.json` holds the same."""

    status: str
    """completed, interrupted or failed."""

    steps: int
    epochs: float
    """Passes over the training text."""

    real_tokens: int
    real_tokens_per_second: float | None
    """Of training steps alone, the first few left out."""

    seconds: float
    """Of the whole run, resumed parts together."""

    train_loss: float | None
    """Smoothed over the last steps."""

    valid_loss: float | None
    valid_perplexity: float | None
    valid_accuracy: float | None
    """Share of hidden tokens named right."""

    peak_memory_bytes: int
    gemm_share: float | None
    """Useful FLOP/s over the machine's GEMM rate, measured at the start."""

    packing_efficiency: float
    """Real tokens over the packs' budget."""

    ranks: int
    """Processes that trained."""

    devices: list[DeviceUse]
    """What each device carried; empty before the end."""

    idle_share: float | None
    """Share of the work that devices with fewer tokens waited for."""

    parameters: int
    seed: int
    versions: dict[str, str]


@dataclass(frozen=True, kw_only=True)
class PretrainData:
    """The prepared text, as the run uses it."""

    corpus: TokenCorpus
    stream: PretrainStream
    valid: list[MaskedBatch]
    """Packs to score on, their masks fixed; empty if nothing was held out."""

    tokenizer_folder: Path


class PretrainRun:
    """What happens around the steps: lines, scores, checkpoints, the end."""

    def __init__(
        self,
        config: PretrainConfig,
        folder: Path,
        speaker: Speaker,
        compute: Compute,
        strategy: Strategy,
        model: MaskedLM,
        optimizer: AdamW,
        data: PretrainData,
        state: RunState,
    ) -> None:
        """Nothing is written yet."""
        self._config, self._folder, self._speaker = config, folder, speaker
        self._compute, self._model, self._optimizer = compute, model, optimizer
        self._strategy, self._world = strategy, strategy.world
        self._uses: list[DeviceUse] = []
        self._data = data
        self._scores: MaskedScores | None = None
        self._log: TrainingLog | None = None
        self.state = state

    def say_banner(self, budget: Budget) -> None:
        """What is about to run, before time is spent on it."""
        config, stream, say = self._config, self._data.stream, self._speaker.say
        held_out = sum(batch.num_targets for batch in self._data.valid)
        say(
            f"data: {self._data.corpus.num_documents:,} documents, "
            f"{stream.num_tokens_per_epoch:,} tokens an epoch in {stream.steps_in_epoch(0):,} "
            f"steps, packs {stream.efficiency:.1%} full; scored on {held_out:,} hidden tokens of "
            "held-out text"
        )
        if not held_out:
            say("no text was held out by `bertsmith prepare`: there will be no validation loss")
        say(
            f"step: {stream.packs_per_step} packs of up to {config.packing.tokens_per_pack:,} "
            f"tokens, {config.masking.share:.0%} of tokens predicted; {said_budget(budget)}; "
            f"seed {config.seed}"
        )
        parameters = sum(p.numel() for p in self._model.parameters())
        say(f"model: {parameters:,} parameters, {self._compute.name} on {self._compute.device}")
        shape, compute = self._model.encoder.config, self._compute
        say(describe_attention(shape, device=compute.device, dtype=compute.dtype))

    def start_log(self, metrics: MetricsLog | None, display: TrainingDisplay) -> None:
        """Open the log; measures the machine's limit, which takes a moment."""
        shape, packing = self._model.encoder.config, self._config.packing
        sample = self._data.stream.some_lengths(at_most=10_000)
        predicted = round(self._config.masking.share * int((sample - 2).sum()))
        flop = training_flop(shape, sample.tolist(), num_read=predicted, scores_vocabulary=True)
        self._log = TrainingLog(
            metrics,
            display,
            log_every_steps=self._config.log_every_steps,
            flop_per_token=flop / int(sample.sum()),
            gemm_flop_per_second=self._strategy.packs_at_once
            * gemm_flop_per_second(shape, tokens=packing.tokens_per_pack, compute=self._compute),
        )

    def on_report(self, report: StepReport, state: RunState, progress: float) -> None:
        """Show the step, and log one in so many."""
        assert self._log is not None
        self.state = state
        self._log.report(report, state, progress)

    def on_evaluate(self, state: RunState) -> RunState:
        """Score the held-out text with its fixed masks."""
        assert self._log is not None
        if not self._data.valid:
            return state
        scores = score_masked_lm(self._model, self._data.valid, self._compute, self._world)
        self._scores = scores
        self._log.scores(
            {"loss": scores.loss, "perplexity": scores.perplexity, "accuracy": scores.accuracy},
            state,
        )
        self._speaker.say(
            f"step {state.step:,}: validation loss {scores.loss:.4f}, perplexity "
            f"{scores.perplexity:,.1f}, {scores.accuracy:.1%} of hidden tokens right"
        )
        if state.best_value is None or -scores.loss > state.best_value:
            return replace(state, best_value=-scores.loss, best_step=state.step)
        return state

    def should_stop(self, state: RunState) -> bool:
        """Pretraining uses its whole budget."""
        return False

    def on_save(self, state: RunState) -> None:
        """Write a checkpoint; only then delete old ones."""
        folder = self._folder / "checkpoints"
        model = self._strategy.whole_model(self._model)
        moments = self._strategy.whole_tensors(self._optimizer.named_moments())

        def save() -> str:
            path = save_checkpoint(
                folder,
                state=state,
                moments=moments,
                write_model=lambda fresh: self._write_model(fresh, model),
                fingerprints=fingerprints_of(self._config, self._data.corpus.fingerprint),
            )
            keep_newest(
                folder,
                step=state.step,
                keep_last=self._config.save.keep_last,
                best_step=state.best_step,
            )
            return str(path)

        self._speaker.log(f"saved {self._world.on_main(save)}")

    def conclude(self, outcome: Outcome, uses: list[DeviceUse]) -> PretrainSummary:
        """Write the model, the summary and the card, or say how to go on."""
        self._uses = uses
        if len(uses) > 1:
            for number, use in enumerate(uses):
                self._speaker.say(f"device {number}: {use}")
        if outcome.status == "interrupted":
            summary = self.summarize("interrupted", outcome.state)
            self._speaker.say(
                f"interrupted at step {outcome.state.step:,}; saved. Go on with: bertsmith "
                f"pretrain --config {self._folder / 'run.yaml'} --resume"
            )
            return summary
        model = self._strategy.whole_model(self._model)
        summary = self.summarize("completed", outcome.state)

        def write() -> bool:
            save_model(self._folder / "model", model, tokenizer_folder=self._data.tokenizer_folder)
            write_card(self._folder, self._card(summary))
            return True

        self._world.on_main(write)
        return summary

    def summarize(self, status: str, state: RunState) -> PretrainSummary:
        """Write `summary.json`."""
        log, scores, stream = self._log, self._scores, self._data.stream
        rate = None if log is None else log.tokens_per_second
        if rate is None and state.train_seconds > 0.0:  # resumed with nothing left to do
            rate = state.tokens / state.train_seconds
        summary = PretrainSummary(
            status=status,
            steps=state.step,
            epochs=round(state.tokens / stream.num_tokens_per_epoch, 3),
            real_tokens=state.tokens,
            real_tokens_per_second=None if rate is None else round(rate, 1),
            seconds=round(state.elapsed_seconds, 3),
            train_loss=None if log is None else log.recent_loss,
            valid_loss=None if scores is None else scores.loss,
            valid_perplexity=None if scores is None else scores.perplexity,
            valid_accuracy=None if scores is None else scores.accuracy,
            peak_memory_bytes=peak_memory_bytes(self._compute.device),
            gemm_share=None if log is None else log.gemm_share,
            packing_efficiency=stream.efficiency,
            ranks=self._world.size,
            devices=self._uses,
            idle_share=None if log is None else log.idle_share,
            parameters=sum(p.numel() for p in self._model.parameters()),
            seed=self._config.seed,
            versions=versions(),
        )
        if self._world.is_main:
            write_summary(self._folder, asdict(summary))
        return summary

    def _write_model(self, folder: Path, model: MaskedLM) -> None:
        write_model_files(folder, model, tokenizer_folder=self._data.tokenizer_folder)

    def _card(self, summary: PretrainSummary) -> ModelCard:
        """The model card of a pretrained encoder."""
        config, corpus = self._config, self._data.corpus
        results = {
            "validation loss": shown(summary.valid_loss, ".4f"),
            "validation perplexity": shown(summary.valid_perplexity, ",.2f"),
            "hidden tokens named right": shown(summary.valid_accuracy, ".2%"),
            "training loss": shown(summary.train_loss, ".4f"),
            "steps": f"{summary.steps:,}",
            "real tokens": f"{summary.real_tokens:,} ({summary.epochs:g} epochs)",
            "real tokens a second": shown(summary.real_tokens_per_second, ",.0f"),
        }
        return ModelCard(
            title=f"{config.model}, pretrained on {Path(config.data).name}",
            task="fill-mask",
            summary="A BERT encoder trained with masked-language modelling by bertsmith.",
            data={
                "prepared data": config.data,
                "documents": f"{corpus.num_documents:,}",
                "tokens": f"{corpus.num_tokens:,}",
                "fingerprint": corpus.fingerprint,
            },
            settings={
                "model": config.model,
                "parameters": f"{summary.parameters:,}",
                "tokens a step": f"{config.tokens_per_step:,}",
                "learning rate": f"{config.optim.learning_rate} ({config.optim.schedule})",
                "share predicted": f"{config.masking.share}",
                "precision": self._compute.name,
                "seed": f"{config.seed}",
            },
            results=results,
            versions=summary.versions,
            repeat="bertsmith pretrain --config run.yaml --output NEW_FOLDER",
            example="the [MASK] of the house",
        )


def said_budget(budget: Budget) -> str:
    """The budget in words."""
    if budget.seconds is not None:
        return f"{budget.seconds / 60.0:g} minutes"
    return f"{budget.steps:,} steps" if budget.steps is not None else f"{budget.tokens:,} tokens"


def shown(value: float | None, form: str) -> str:
    """A number for the card."""
    return "not measured" if value is None else format(value, form)
