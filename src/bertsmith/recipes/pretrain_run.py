"""What a pretraining run does around its steps: score, save, say, sum up."""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from bertsmith.batch import MaskedBatch
from bertsmith.checkpoint.folder import Identity
from bertsmith.checkpoint.state import RunState
from bertsmith.data.config import has_pairs
from bertsmith.data.coverage import CoverageCounter
from bertsmith.data.frequency import BUCKETS, TypeFrequencies
from bertsmith.data.shards import TokenCorpus
from bertsmith.data.stream import PretrainStream
from bertsmith.hf import save_model, write_model_files
from bertsmith.model.attention import describe_attention
from bertsmith.model.flops import training_flop
from bertsmith.model.heads import MaskedLM, PairedLM
from bertsmith.recipes.config import PretrainConfig
from bertsmith.recipes.coverage import named
from bertsmith.recipes.masked_lm import load_for
from bertsmith.recipes.training import Rig, TrainingRun
from bertsmith.report.card import ModelCard, write_card
from bertsmith.report.coverage_report import PLOT_FILE, coverage_markdown, write_coverage_plot
from bertsmith.report.devices import DeviceUse
from bertsmith.report.gemm import gemm_flop_per_second
from bertsmith.report.metrics_log import COVERAGE_PREFIX, MetricsLog
from bertsmith.report.progress import TrainingDisplay
from bertsmith.report.run_folder import peak_memory_bytes, versions
from bertsmith.report.training_log import TrainingLog
from bertsmith.train.guard import BadStepError
from bertsmith.train.loop import Budget, Outcome
from bertsmith.train.validation import (
    GroupScores,
    MaskedScores,
    TypeGroups,
    score_masked_lm,
    score_pairs,
)


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

    skipped_steps: list[int]
    """Passed over, because their numbers had gone wrong."""

    overflowed_steps: int
    """Updates left out because an fp16 gradient overflowed."""

    valid_loss: float | None
    valid_perplexity: float | None
    valid_accuracy: float | None
    """Share of hidden tokens named right."""

    valid_by_frequency: dict[str, GroupScores] | None
    """The same of rare, middle and frequent token types (`data.frequency`)."""

    valid_pair_loss: float | None
    valid_pair_accuracy: float | None
    """Share of pairs of segments judged right; None where the objective has no pairs."""

    coverage: dict[str, Any] | None
    """What has been predicted how often (`data.coverage`); None before the end."""

    peak_memory_bytes: int
    """Most memory used: on a GPU by tensors (torch's `max_memory_allocated`), on a CPU by the whole
    process (resident)."""

    planned_peak_bytes: int | None
    """What was planned of the same: on a GPU the peak of tensors, on a CPU with what is beside
    them. None: the planner does not know such a run."""

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

    valid_pairs: list[MaskedBatch]
    """Packs to score pairs on; empty if there are none, or the objective has none."""

    frequencies: TypeFrequencies
    """Of the token types in the text to train on."""

    tokenizer_folder: Path


class PretrainRun(TrainingRun[MaskedLM, PretrainSummary]):
    """What happens around the steps: lines, scores, the end."""

    def __init__(
        self,
        config: PretrainConfig,
        rig: Rig,
        model: MaskedLM,
        data: PretrainData,
        state: RunState,
        *,
        budget: Budget,
        identity: Identity,
    ) -> None:
        """Nothing is written yet."""
        super().__init__(rig, model, state, identity=identity, settings=config)
        self._config, self._data, self._budget = config, data, budget
        self._scores: MaskedScores | None = None
        self._pair_scores: GroupScores | None = None
        self._coverage: dict[str, Any] | None = None
        self._groups = TypeGroups(
            names=BUCKETS, group_V=torch.from_numpy(data.frequencies.bucket_V).long()
        )

    def say_banner(self) -> None:
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
        if has_pairs(config.objective):
            judged = sum(len(b.pairs.labels_P) for b in self._data.valid_pairs if b.pairs)
            say(f"objective: {config.objective}; scored on {judged:,} pairs of held-out text")
        masking = config.masking
        of_share = "" if masking.share_end is None else f" to {masking.share_end:.0%}"
        say(
            f"step: {stream.packs_per_step} packs of up to {config.packing.tokens_per_pack:,} "
            f"tokens, {masking.share:.0%}{of_share} of tokens predicted "
            f"({masking.schedule}, by {masking.unit}); {said_budget(self._budget)}; "
            f"seed {config.seed}"
        )
        parameters = sum(p.numel() for p in self._model.parameters())
        say(f"model: {parameters:,} parameters, {self._compute.name} on {self._compute.device}")
        shape, compute = self._model.encoder.config, self._compute
        say(describe_attention(shape, device=compute.device, dtype=compute.dtype))

    def new_log(self, metrics: MetricsLog | None, display: TrainingDisplay) -> TrainingLog:
        """Rates against the machine's GEMM limit, which is measured now."""
        shape, packing = self._model.encoder.config, self._config.packing
        sample = self._data.stream.some_lengths(at_most=10_000)
        tokens = min(
            self.state.micro_batch_tokens or packing.tokens_per_pack, packing.tokens_per_pack
        )
        predicted = round(self._config.masking.largest_share * int((sample - 2).sum()))
        flop = training_flop(shape, sample.tolist(), num_read=predicted, scores_vocabulary=True)
        return TrainingLog(
            metrics,
            display,
            log_every_steps=self._config.log_every_steps,
            rate_shares=self.rate_shares,
            flop_per_token=flop / int(sample.sum()),
            gemm_flop_per_second=self._strategy.packs_at_once
            * gemm_flop_per_second(shape, tokens=tokens, compute=self._compute),
        )

    def on_evaluate(self, state: RunState) -> RunState:
        """Score the held-out text with its fixed masks."""
        assert self._log is not None
        self._world.on_main(lambda: self._tell_coverage(state))
        if not self._data.valid:
            return state
        scores = score_masked_lm(
            self._model,
            self._data.valid,
            self._compute,
            self._world,
            groups=self._groups,
            max_tokens=state.micro_batch_tokens,
            stop_asked=self.stop_asked,
        )
        self._scores = scores
        self._pair_scores = self._scored_pairs(state)
        named = {"loss": scores.loss, "perplexity": scores.perplexity, "accuracy": scores.accuracy}
        for name, group in scores.groups.items():
            named |= {f"loss_{name}": group.loss, f"accuracy_{name}": group.accuracy}
        said_pairs = ""
        if self._pair_scores is not None:
            named |= {
                "pair_loss": self._pair_scores.loss,
                "pair_accuracy": self._pair_scores.accuracy,
            }
            said_pairs = f", {self._pair_scores.accuracy:.1%} of pairs"
        self._log.scores(named, state)
        self._speaker.say(
            f"step {state.step:,}: validation loss {scores.loss:.4f}, perplexity "
            f"{scores.perplexity:,.1f}, {scores.accuracy:.1%} of hidden tokens{said_pairs} right"
        )
        if not math.isfinite(scores.loss):
            return replace(state, value=None)
        value = -scores.loss
        if state.best_value is None or value > state.best_value:
            state = replace(state, best_value=value, best_step=state.step)
        return replace(state, value=value)

    def _scored_pairs(self, state: RunState) -> GroupScores | None:
        """Of the fixed pairs, if there are any."""
        if not self._data.valid_pairs:
            return None
        assert isinstance(self._model, PairedLM), "made for the objective"
        return score_pairs(
            self._model,
            self._data.valid_pairs,
            self._compute,
            self._world,
            max_tokens=state.micro_batch_tokens,
            stop_asked=self.stop_asked,
        )

    @cached_property
    def _counter(self) -> CoverageCounter:
        """Of what has been predicted; made on the rank that tells of it."""
        return CoverageCounter(
            self._data.stream,
            self._data.corpus,
            self._data.frequencies,
            packing=self._config.packing,
            is_estimate=self._config.masking.is_classic,
        )

    def _tell_coverage(self, state: RunState) -> bool:
        """A line of the metrics: what whole epochs have predicted, at every evaluation alike."""
        counted = self._counter.whole_epochs(state.step)
        if counted is not None and self._log is not None:
            values = {
                "never_predicted_share": counted.never_predicted_share,
                "types_never_predicted": float(counted.types_never_predicted),
            }
            self._log.values({f"{COVERAGE_PREFIX}{k}": v for k, v in values.items()}, state)
        return True

    def _whole_coverage(self, state: RunState) -> dict[str, Any]:
        """The report on the whole run, and its plot."""
        counted = self._counter.after(state.step)
        write_coverage_plot(self._folder / PLOT_FILE, counted)
        return named(counted, Path(self._config.data))

    def should_stop(self, state: RunState) -> bool:
        """Pretraining uses its whole budget."""
        return False

    def documents_of(self, error: BadStepError) -> str:
        """Documents of the bad pack, or of the whole step."""
        packs = self._data.stream.documents_of(error.step)
        documents = [d for pack in packs for d in pack] if error.pack is None else packs[error.pack]
        names = [self._data.corpus.name_of(d) for d in sorted(set(documents))]
        shown = ", ".join(names[:5]) + (f" and {len(names) - 5:,} more" if len(names) > 5 else "")
        return f"documents {shown}"

    def load_model(self, checkpoint: Path) -> MaskedLM:
        """The model of one of the run's checkpoints."""
        return load_for(self._config, checkpoint)[0]

    def write_model(self, folder: Path, model: MaskedLM, step: int) -> None:
        """A complete Hugging Face folder."""
        write_model_files(folder, model, tokenizer_folder=self._data.tokenizer_folder)

    def conclude(self, outcome: Outcome) -> PretrainSummary:
        """Write the model, the summary and the card, or say how to go on."""
        if outcome.status in ("interrupted", "not_saved"):
            summary = self.summarize("interrupted", outcome.state)
            self.say_how_to_go_on(outcome)
            return summary
        model = self._strategy.whole_model(self._model)

        def save() -> bool:
            self.check_folder()
            save_model(self._folder / "model", model, tokenizer_folder=self._data.tokenizer_folder)
            return True

        def write() -> bool:
            self.check_folder()
            write_card(self._folder, self._card(summary))
            return True

        self._world.on_main(save)
        self._coverage = self._world.on_main(lambda: self._whole_coverage(outcome.state))
        summary = self.summarize("completed", outcome.state)
        self._world.on_main(write)
        return summary

    def summarize(self, status: str, state: RunState) -> PretrainSummary:
        """Write `summary.json`."""
        log, scores, stream = self._log, self._scores, self._data.stream
        of_pairs = self._pair_scores
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
            train_loss=state.smoothed_loss,
            skipped_steps=list(state.skipped),
            overflowed_steps=state.overflows,
            valid_loss=None if scores is None else scores.loss,
            valid_perplexity=None if scores is None else scores.perplexity,
            valid_accuracy=None if scores is None else scores.accuracy,
            valid_by_frequency=None if scores is None else dict(scores.groups),
            valid_pair_loss=None if of_pairs is None else of_pairs.loss,
            valid_pair_accuracy=None if of_pairs is None else of_pairs.accuracy,
            coverage=self._coverage,
            peak_memory_bytes=peak_memory_bytes(self._compute.device),
            planned_peak_bytes=self.planned_peak_bytes,
            gemm_share=None if log is None else log.gemm_share,
            packing_efficiency=stream.efficiency,
            ranks=self._world.size,
            devices=self._uses,
            idle_share=None if log is None else log.idle_share,
            parameters=sum(p.numel() for p in self._model.parameters()),
            seed=self._config.seed,
            versions=versions(),
        )
        self.write_summary(asdict(summary))
        return summary

    def _card(self, summary: PretrainSummary) -> ModelCard:
        """The model card of a pretrained encoder."""
        config, corpus = self._config, self._data.corpus
        results = {
            "validation loss": shown(summary.valid_loss, ".4f"),
            "validation perplexity": shown(summary.valid_perplexity, ",.2f"),
            "hidden tokens named right": shown(summary.valid_accuracy, ".2%"),
            **_shown_by_frequency(summary.valid_by_frequency or {}),
            **_shown_pairs(summary.valid_pair_accuracy),
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
                "objective": config.objective,
                "parameters": f"{summary.parameters:,}",
                "tokens a step": f"{config.tokens_per_step:,}",
                "learning rate": f"{config.optim.learning_rate} ({config.optim.schedule})",
                "share predicted": f"{config.masking.share} ({config.masking.schedule}, by "
                f"{config.masking.unit})",
                "precision": self._compute.name,
                "seed": f"{config.seed}",
            },
            results=results,
            versions=summary.versions,
            repeat="bertsmith pretrain --config run.yaml --output NEW_FOLDER",
            example="the [MASK] of the house",
            more=(
                {}
                if summary.coverage is None
                else {"Coverage": f"{coverage_markdown(summary.coverage)}\n\n![]({PLOT_FILE})"}
            ),
        )


def _shown_by_frequency(groups: Mapping[str, GroupScores]) -> dict[str, str]:
    """Lines of the card."""
    return {
        f"... of {name} token types": (
            f"{group.accuracy:.2%}, loss {group.loss:.4f} ({group.num_targets:,} tokens)"
            if group.num_targets
            else "none was hidden"
        )
        for name, group in groups.items()
    }


def _shown_pairs(accuracy: float | None) -> dict[str, str]:
    """A line of the card, for an objective of pairs."""
    return {} if accuracy is None else {"pairs judged right": f"{accuracy:.2%}"}


def said_budget(budget: Budget) -> str:
    """The budget in words."""
    if budget.seconds is not None:
        minutes = budget.seconds / 60.0
        return f"{minutes:g} minute{'s' * (minutes != 1.0)}"
    return f"{budget.steps:,} steps" if budget.steps is not None else f"{budget.tokens:,} tokens"


def shown(value: float | None, form: str) -> str:
    """A number for the card."""
    return "not measured" if value is None else format(value, form)
