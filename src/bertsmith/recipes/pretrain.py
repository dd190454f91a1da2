"""`bertsmith pretrain`: prepared text in, encoder out. The wiring, from top to bottom."""

import math
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from bertsmith.data.shards import TokenCorpus, open_shards
from bertsmith.data.stream import PretrainStream, prefetch, valid_batches
from bertsmith.errors import UserError
from bertsmith.hf import save_model, write_model_files
from bertsmith.model.flops import training_flop
from bertsmith.model.heads import MaskedLM
from bertsmith.model.kernels import build
from bertsmith.recipes.config import PretrainConfig
from bertsmith.recipes.masked_lm import make_masked_lm
from bertsmith.recipes.resume import checkpoint_to_resume, fingerprints_of
from bertsmith.report.card import ModelCard, write_card
from bertsmith.report.gemm import gemm_flop_per_second
from bertsmith.report.metrics_log import MetricsLog
from bertsmith.report.progress import Speaker, TrainingDisplay
from bertsmith.report.run_folder import (
    open_run_folder,
    peak_memory_bytes,
    versions,
    write_config,
    write_summary,
)
from bertsmith.report.training_log import TrainingLog
from bertsmith.train.checkpoint import (
    RunState,
    keep_newest,
    load_moments,
    newest_checkpoint,
    read_state,
    save_checkpoint,
)
from bertsmith.train.interruption import catch_signals
from bertsmith.train.loop import Budget, Cadence, LoopConfig, Outcome, train
from bertsmith.train.memory_reuse import reuse_freed_memory
from bertsmith.train.optim import AdamW, group_parameters
from bertsmith.train.precision import Compute, choose_compute
from bertsmith.train.step import NonFiniteLossError, StepReport
from bertsmith.train.validation import MaskedScores, score_masked_lm

EXIT_INTERRUPTED = 130


@dataclass(frozen=True, kw_only=True)
class PretrainSummary:
    """How a run ended; `summary.json` holds the same."""

    status: str
    """completed, interrupted or failed."""

    steps: int
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

    parameters: int
    seed: int
    versions: dict[str, str]


def main(config: PretrainConfig) -> int:
    """Pretrain, and print the model's folder."""
    summary = pretrain(config)
    if summary.status == "interrupted":
        return EXIT_INTERRUPTED
    print(Path(config.output) / "model")
    return 0


def pretrain(config: PretrainConfig) -> PretrainSummary:
    """Train an encoder by masked-language modelling.

    Raises:
        UserError: The data, the model, the output or a value cannot be used; or the loss is not
            finite, in which case the last good checkpoint stands.
    """
    check_budget(config)
    data = Path(config.data)
    corpus, valid = open_shards(data, "train"), open_shards(data, "valid")
    compute = choose_compute(config.precision, config.device)
    folder = open_run_folder(config.output, resume=config.resume, overwrite=config.overwrite)
    speaker = Speaker(folder)
    if compute.device.type == "cpu":
        reuse_freed_memory()
    checkpoint = checkpoint_to_resume(folder, config, corpus.fingerprint, speaker.say)
    model = make_masked_lm(
        config,
        corpus.vocab,
        tokenizer_folder=data / "tokenizer",
        checkpoint=checkpoint,
        say=speaker.say,
    ).to(compute.device)
    optimizer = AdamW(group_parameters(model, config.optim), config.optim)
    state = RunState()
    if checkpoint is not None:
        state = read_state(checkpoint)[0]
        load_moments(checkpoint, optimizer, updates=state.updates)
        speaker.say(f"resumed from {checkpoint}")
    stream = PretrainStream(
        corpus,
        packing=config.packing,
        masking=config.masking,
        tokens_per_step=config.tokens_per_step,
        seed=config.seed,
    )
    write_config(folder, config)
    run = PretrainRun(config, folder, speaker, compute, model, optimizer, corpus, valid)
    run.say_banner(stream)
    with (
        MetricsLog(folder, steps_done=state.step) as metrics,
        TrainingDisplay(speaker) as display,
        catch_signals() as interruption,
    ):
        run.start_log(metrics, display)
        try:
            outcome = train(
                model,
                optimizer,
                steps=lambda start: prefetch(stream.step, start),
                config=loop_config(config, stream),
                compute=compute,
                state=state,
                hooks=run,
                interruption=interruption,
            )
        except NonFiniteLossError as error:
            run.summarize("failed", run.state, stream.efficiency)
            raise UserError(explain_non_finite(error, stream, corpus, folder)) from error
    return run.conclude(outcome, stream.efficiency)


def check_budget(config: PretrainConfig) -> None:
    """Exactly one budget, and a positive one."""
    values = {
        "steps": config.steps,
        "tokens": config.tokens,
        "epochs": config.epochs,
        "minutes": config.minutes,
    }
    given = {name: value for name, value in values.items() if value is not None}
    if len(given) != 1:
        what = ", ".join(f"--{name}" for name in given) or "none"
        raise UserError(f"give one of --steps, --tokens, --epochs, --minutes (given: {what})")
    for name, value in given.items():
        if value <= 0:
            raise UserError(f"--{name} {value}: a budget is more than 0")


def loop_config(config: PretrainConfig, stream: PretrainStream) -> LoopConfig:
    """The loop's budget and cadences."""
    if config.minutes is not None:
        budget = Budget(seconds=config.minutes * 60.0)
    elif config.epochs is not None:
        whole = int(config.epochs)
        steps = float(sum(stream.steps_in_epoch(epoch) for epoch in range(whole)))
        if config.epochs > whole:
            steps += (config.epochs - whole) * stream.steps_in_epoch(whole)
        budget = Budget(steps=max(math.ceil(steps), 1))
    else:
        budget = Budget(steps=config.steps, tokens=config.tokens)
    minutes = config.save.every_minutes
    return LoopConfig(
        budget=budget,
        optim=config.optim,
        seed=config.seed,
        evaluate=Cadence(every_steps=config.eval.every_steps, times_a_run=10),
        save=Cadence(
            every_steps=config.save.every_steps,
            every_seconds=None if minutes is None else minutes * 60.0,
        ),
    )


class PretrainRun:
    """What happens around the steps: lines, scores, checkpoints, the end."""

    def __init__(
        self,
        config: PretrainConfig,
        folder: Path,
        speaker: Speaker,
        compute: Compute,
        model: MaskedLM,
        optimizer: AdamW,
        corpus: TokenCorpus,
        valid: TokenCorpus,
    ) -> None:
        """Nothing is written yet."""
        self._config, self._folder, self._speaker = config, folder, speaker
        self._compute, self._model, self._optimizer = compute, model, optimizer
        self._corpus, self._valid = corpus, valid
        self._scores: MaskedScores | None = None
        self._log: TrainingLog | None = None
        self.state = RunState()

    def say_banner(self, stream: PretrainStream) -> None:
        """What is about to run, before time is spent on it."""
        config = self._config
        self._speaker.say(
            f"data: {self._corpus.num_documents:,} documents, {stream.num_tokens_per_epoch:,} "
            f"tokens an epoch in {stream.steps_in_epoch(0):,} steps, packs "
            f"{stream.efficiency:.1%} full; validation {self._valid.num_documents:,} documents"
        )
        packs = max(config.tokens_per_step // config.packing.tokens_per_pack, 1)
        self._speaker.say(
            f"step: {packs} packs of up to {config.packing.tokens_per_pack:,} tokens, "
            f"{config.masking.share:.0%} of tokens predicted; seed {config.seed}"
        )
        parameters = sum(p.numel() for p in self._model.parameters())
        self._speaker.say(
            f"model: {parameters:,} parameters, {self._compute.name} on {self._compute.device}"
        )
        if self._compute.device.type == "cpu":
            self._speaker.say(build.status())

    def start_log(self, metrics: MetricsLog, display: TrainingDisplay) -> None:
        """Open the log; measures the machine's limit, which takes a moment."""
        shape, tokens = self._model.encoder.config, self._config.packing.tokens_per_pack
        lengths = (self._corpus.lengths_D + 2).clip(max=self._config.packing.max_sequence_tokens)
        sample = lengths[:: max(len(lengths) // 10_000, 1)].tolist()
        predicted = round(self._config.masking.share * sum(n - 2 for n in sample))
        self._log = TrainingLog(
            metrics,
            display,
            log_every_steps=self._config.log_every_steps,
            flop_per_token=training_flop(shape, sample, num_predicted=predicted) / sum(sample),
            gemm_flop_per_second=gemm_flop_per_second(shape, tokens=tokens, compute=self._compute),
        )

    def on_report(self, report: StepReport, state: RunState, progress: float) -> None:
        """Show the step, and log one in so many."""
        assert self._log is not None
        self.state = state
        self._log.report(report, state, progress)

    def on_evaluate(self, state: RunState) -> RunState:
        """Score the validation split with its fixed masks."""
        assert self._log is not None
        batches = valid_batches(
            self._valid,
            packing=self._config.packing,
            masking=self._config.masking,
            max_tokens=self._config.eval.max_tokens,
        )
        scores = score_masked_lm(self._model, batches, self._compute)
        if scores.num_targets == 0:
            return state
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
        save_checkpoint(
            folder,
            state=state,
            optimizer=self._optimizer,
            write_model=self._write_model,
            fingerprints=fingerprints_of(self._config, self._corpus.fingerprint),
        )
        keep_newest(folder, keep_last=self._config.save.keep_last, best_step=state.best_step)

    def conclude(self, outcome: Outcome, efficiency: float) -> PretrainSummary:
        """Write the model, the summary and the card, or say how to go on."""
        summary = self.summarize(outcome.status, outcome.state, efficiency)
        if outcome.status == "interrupted":
            self._speaker.say(
                f"interrupted at step {outcome.state.step:,}; saved. Go on with: bertsmith "
                f"pretrain --config {self._folder / 'run.yaml'} --resume"
            )
            return summary
        tokenizer = Path(self._config.data) / "tokenizer"
        save_model(self._folder / "model", self._model, tokenizer_folder=tokenizer)
        write_card(self._folder, pretrain_card(self._config, summary))
        return summary

    def summarize(self, status: str, state: RunState, efficiency: float) -> PretrainSummary:
        """Write `summary.json`."""
        log, scores = self._log, self._scores
        rate = None if log is None else log.tokens_per_second
        summary = PretrainSummary(
            status=status,
            steps=state.step,
            real_tokens=state.tokens,
            real_tokens_per_second=None if rate is None else round(rate, 1),
            seconds=round(state.elapsed_seconds, 3),
            train_loss=None if log is None else log.recent_loss,
            valid_loss=None if scores is None else scores.loss,
            valid_perplexity=None if scores is None else scores.perplexity,
            valid_accuracy=None if scores is None else scores.accuracy,
            peak_memory_bytes=peak_memory_bytes(self._compute.device),
            gemm_share=None if log is None else log.gemm_share,
            packing_efficiency=efficiency,
            parameters=sum(p.numel() for p in self._model.parameters()),
            seed=self._config.seed,
            versions=versions(),
        )
        write_summary(self._folder, asdict(summary))
        return summary

    def _write_model(self, folder: Path) -> None:
        tokenizer = Path(self._config.data) / "tokenizer"
        write_model_files(folder, self._model, tokenizer_folder=tokenizer)


def explain_non_finite(
    error: NonFiniteLossError, stream: PretrainStream, corpus: TokenCorpus, folder: Path
) -> str:
    """One line: the step, the documents, and what stands."""
    packs = stream.documents_of(error.step)
    documents = [d for pack in packs for d in pack] if error.pack is None else packs[error.pack]
    names = [corpus.name_of(d) for d in sorted(set(documents))]
    shown = ", ".join(names[:5]) + (f" and {len(names) - 5:,} more" if len(names) > 5 else "")
    good = newest_checkpoint(folder / "checkpoints", lambda line: None)
    kept = f"the last good checkpoint is {good}" if good else "no checkpoint was made before"
    return (
        f"the {error.what} of step {error.step + 1} is not finite (NaN or infinite), on documents "
        f"{shown}; weights were not updated, {kept}; try a lower --optim.learning_rate"
    )


def pretrain_card(config: PretrainConfig, summary: PretrainSummary) -> ModelCard:
    """The model card of a pretrained encoder."""
    results = {
        "validation loss": f"{summary.valid_loss}",
        "validation perplexity": f"{summary.valid_perplexity}",
        "hidden tokens named right": f"{summary.valid_accuracy}",
        "training loss": f"{summary.train_loss}",
        "steps": f"{summary.steps:,}",
        "real tokens": f"{summary.real_tokens:,}",
        "real tokens a second": f"{summary.real_tokens_per_second}",
    }
    return ModelCard(
        title=f"{config.model}, pretrained on {Path(config.data).name}",
        task="fill-mask",
        summary="A BERT encoder trained with masked-language modelling by bertsmith.",
        data={"prepared data": config.data},
        settings={
            "model": config.model,
            "tokens a step": f"{config.tokens_per_step:,}",
            "learning rate": f"{config.optim.learning_rate} ({config.optim.schedule})",
            "share predicted": f"{config.masking.share}",
            "seed": f"{config.seed}",
        },
        results=results,
        versions=summary.versions,
        repeat="bertsmith pretrain --config run.yaml",
        example="the [MASK] of the house",
    )
