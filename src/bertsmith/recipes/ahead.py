"""The next of something is made while one is used."""

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

Item = TypeVar("Item")


def ahead(items: Iterator[Item]) -> Iterator[Item]:
    """The same items, the next one made in a thread while one is used."""
    end = object()
    make_next: Callable[[], object] = lambda: next(items, end)  # noqa: E731
    with ThreadPoolExecutor(1) as pool:
        coming = pool.submit(make_next)
        while (item := coming.result()) is not end:
            coming = pool.submit(make_next)
            yield item  # type: ignore[misc]
