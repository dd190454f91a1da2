"""The loop's hooks with nothing in them, for tests to fill in what they look at."""

from bertsmith.checkpoint.state import RunState
from bertsmith.train.guard import BadStepError
from bertsmith.train.step import StepReport


class QuietHooks:
    """Evaluates nothing, saves nowhere, never stops."""

    is_saving = False
    has_failed_to_save = False

    def on_report(self, report: StepReport, state: RunState, progress: float) -> None:
        pass

    def on_bad_step(self, error: BadStepError, follows: str) -> None:
        pass

    def on_out_of_memory(self, step: int, max_tokens: int) -> None:
        pass

    def on_trial_out_of_memory(self, max_tokens: int) -> None:
        pass

    def on_rollback(self) -> RunState | None:
        return None

    def on_evaluate(self, state: RunState) -> RunState:
        return state

    def should_stop(self, state: RunState) -> bool:
        return False

    def on_save(self, state: RunState) -> None:
        pass

    def settle_saves(self, *, is_end: bool) -> bool:
        return True
