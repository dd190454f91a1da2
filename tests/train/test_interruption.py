"""While there is nothing to save a signal ends the run; then it is a flag, then as it was."""

import signal
import threading

import pytest

from bertsmith.train.interruption import SIGNALS, catch_signals


@pytest.mark.parametrize("number", SIGNALS)
def test_a_signal_is_remembered_and_ends_nothing(number: signal.Signals) -> None:
    before = [signal.getsignal(n) for n in SIGNALS]
    with catch_signals() as interruption:
        interruption.defer()
        assert not interruption.is_requested
        for _ in range(3):
            signal.raise_signal(number)
        assert interruption.is_requested
        assert interruption.signal_name == number.name
    assert [signal.getsignal(n) for n in SIGNALS] == before


@pytest.mark.parametrize("number", SIGNALS)
def test_while_there_is_nothing_to_save_it_ends_the_run_at_once(number: signal.Signals) -> None:
    with catch_signals(), pytest.raises(KeyboardInterrupt, match=number.name):
        signal.raise_signal(number)


def test_outside_the_main_thread_signals_are_left_alone() -> None:
    seen: list[bool] = []

    def work() -> None:
        with catch_signals() as interruption:
            seen.append(interruption.is_requested)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == [False]
