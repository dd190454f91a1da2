"""Values made ahead are the values, in order; errors come out in their place; nothing lingers."""

import threading

import pytest

from bertsmith.data.prefetch import prefetch


def test_values_come_in_order_and_no_more_than_asked_are_made_ahead() -> None:
    made: list[int] = []

    def make(index: int) -> int:
        made.append(index)
        return index * index

    values = prefetch(make, 3, depth=2)
    assert [next(values) for _ in range(4)] == [9, 16, 25, 36]
    values.close()  # type: ignore[attr-defined]
    assert made == list(range(3, 3 + len(made)))
    assert len(made) <= 4 + 2


def test_an_error_comes_where_its_value_would_have() -> None:
    def make(index: int) -> int:
        if index == 2:
            raise ValueError("step 2")
        return index

    values = prefetch(make, 0)
    assert [next(values), next(values)] == [0, 1]
    with pytest.raises(ValueError, match="step 2") as caught:
        next(values)
    assert caught.value.__notes__ == ["while step 2, counted from 0, was made ahead"]
    with pytest.raises(StopIteration):
        next(values)


def test_closing_ends_the_thread() -> None:
    before = threading.active_count()
    values = prefetch(lambda index: index, 0)
    next(values)
    assert threading.active_count() == before + 1
    values.close()  # type: ignore[attr-defined]
    assert threading.active_count() == before
