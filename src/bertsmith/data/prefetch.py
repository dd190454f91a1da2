"""Make the next values while this one is in use."""

import threading
from collections.abc import Callable, Iterator
from queue import SimpleQueue
from typing import TypeVar

T = TypeVar("T")


def prefetch(make: Callable[[int], T], start: int, *, depth: int = 2) -> Iterator[T]:
    """`make(start)`, `make(start + 1)`, ... without end, made ahead by one thread.

    The values and their order are those of plain calls. An exception of `make` comes out where
    its value would have, and ends the iterator. The thread starts at the first `next` and has
    ended when `close()` returns.

    Args:
        make: Called in the other thread, never twice at once.
        start: First argument.
        depth: Most values made and not yet taken, at least 1.
    """
    made: SimpleQueue[tuple[T, None] | tuple[None, BaseException]] = SimpleQueue()
    free = threading.Semaphore(depth)
    is_closed = threading.Event()

    def work() -> None:
        index = start
        while True:
            free.acquire()
            if is_closed.is_set():
                return
            try:
                value = make(index)
            except BaseException as error:  # whatever it is, the taker gets it
                error.add_note(f"while step {index:,}, counted from 0, was made ahead")
                made.put((None, error))
                return
            made.put((value, None))
            del value  # or it would live on here while the next one is made
            index += 1

    thread = threading.Thread(target=work, name="prefetch", daemon=True)
    thread.start()
    try:
        while True:
            item = made.get()
            if item[1] is not None:
                raise item[1]
            free.release()
            yield item[0]
    finally:
        is_closed.set()
        free.release()
        thread.join()
