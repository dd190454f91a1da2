"""The numbers of training on their way to people and files: rates, smoothed loss, metrics lines."""

import time
from collections.abc import Mapping

from bertsmith.checkpoint.state import RunState
from bertsmith.report.metrics_log import SCORE_PREFIX, MetricsLog
from bertsmith.report.progress import Reading, TrainingDisplay
from bertsmith.train.step import StepReport

WARMUP_STEPS = 3
"""First steps of a process, left out of its speed: allocation and compilation happen there."""


class TrainingLog:
    """Takes each step's report; shows every one and writes one in so many."""

    def __init__(
        self,
        metrics: MetricsLog | None,
        display: TrainingDisplay,
        *,
        log_every_steps: int,
        flop_per_token: float,
        gemm_flop_per_second: float | None,
        rate_shares: Mapping[str, float] | None = None,
    ) -> None:
        """Nothing is written yet.

        Args:
            metrics: Where lines go; None on a rank that writes none.
            display: What a person sees.
            log_every_steps: Steps between lines.
            flop_per_token: Useful work of training on one real token.
            gemm_flop_per_second: The machine's limit; None if not measured.
            rate_shares: Learning rates of the model's parts over that of the step, where they
                differ.
        """
        self._rate_shares = rate_shares or {}
        self._metrics, self._display = metrics, display
        self._log_every_steps = log_every_steps
        self._flop_per_token, self._gemm = flop_per_token, gemm_flop_per_second
        self._steps_seen = self._rated_tokens = self._early_tokens = 0
        self._rated_seconds = self._early_seconds = 0.0
        self._idle_shares = 0.0

    @property
    def tokens_per_second(self) -> float | None:
        """Real tokens a second of training alone, without warm-up; None before the first step.

        A run too short to have got beyond its warm-up is rated on that.
        """
        if self._rated_seconds > 0.0:
            return self._rated_tokens / self._rated_seconds
        return self._early_tokens / self._early_seconds if self._early_seconds > 0.0 else None

    @property
    def gemm_share(self) -> float | None:
        """Useful FLOP/s over the machine's GEMM rate."""
        if self._gemm is None or self.tokens_per_second is None:
            return None
        return self._flop_per_token * self.tokens_per_second / self._gemm

    @property
    def idle_share(self) -> float:
        """Mean share of a step's work that devices with fewer tokens waited for."""
        return self._idle_shares / max(self._steps_seen, 1)

    def report(self, report: StepReport, state: RunState, progress: float) -> None:
        """Take in one step."""
        self._steps_seen += 1
        self._idle_shares += report.idle_share
        if self._steps_seen > WARMUP_STEPS:
            self._rated_tokens += report.num_tokens
            self._rated_seconds += report.seconds
        else:
            self._early_tokens += report.num_tokens
            self._early_seconds += report.seconds
        is_last = progress >= 1.0
        self._display.show(
            Reading(
                step=state.step,
                progress=min(progress, 1.0),
                loss=report.loss if state.smoothed_loss is None else state.smoothed_loss,
                learning_rate=report.learning_rate,
                grad_norm=report.grad_norm,
                tokens_per_second=self.tokens_per_second or 0.0,
                gemm_share=self.gemm_share,
            ),
            is_last=is_last,
        )
        is_due = is_last or state.step == 1 or state.step % self._log_every_steps == 0
        if is_due and self._metrics is not None:
            values = {
                f"learning_rate/{part}": report.learning_rate * share
                for part, share in self._rate_shares.items()
            } | {
                "loss": report.loss,
                "learning_rate": report.learning_rate,
                "grad_norm": report.grad_norm,
                "real_tokens": state.tokens,
                "seconds": round(state.elapsed_seconds, 3),
                "tokens_per_second": round(report.num_tokens / report.seconds, 1),
            }
            self._metrics.write(state.step, values, at_seconds=time.time())

    def scores(self, scores: dict[str, float], state: RunState) -> None:
        """Write the scores of an evaluation, their names with a prefix."""
        self.values({f"{SCORE_PREFIX}{name}": value for name, value in scores.items()}, state)

    def values(self, values: dict[str, float], state: RunState) -> None:
        """Write numbers about the run as it stands."""
        if self._metrics is not None:
            self._metrics.write(state.step, values, at_seconds=time.time())
