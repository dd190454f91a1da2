"""A signal is a flag, and outside the block signals are what they were."""

import signal
import threading

from bertsmith.train.interruption import catch_signals


def test_a_signal_is_remembered_and_ends_nothing() -> None:
    before = [signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM)]
    with catch_signals() as interruption:
        assert not interruption.is_requested
        for _ in range(3):
            signal.raise_signal(signal.SIGTERM)
        assert interruption.is_requested
        assert interruption.signal_name == "SIGTERM"
    assert [signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM)] == before


def test_outside_the_main_thread_signals_are_left_alone() -> None:
    seen: list[bool] = []

    def work() -> None:
        with catch_signals() as interruption:
            seen.append(interruption.is_requested)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == [False]
