"""Pretraining text and the labelled task stay apart by module, balanced and without names."""

from collections import Counter

import pytest

from bertsmith.data.docstring_task import (
    DocstringTask,
    TaskSizes,
    draw_train,
    is_held_out,
    make_task,
)
from bertsmith.data.docstrings import Docstring

SIZES = TaskSizes(num_labels=2, train=5, dev=3, test=4)


def docstrings_of(package: str, num_modules: int) -> list[Docstring]:
    return [
        Docstring(
            package=package,
            module=f"{package}/m{n}.py",
            line=1,
            paragraphs=(
                f"In {package} number {n} says {package[::-1]}.",
                f"It ({package}_x) adds {n} more {package[::-1]}.",
                f"The {package} module has a number.",
            ),
        )
        for n in range(num_modules)
    ]


@pytest.fixture
def harvest() -> list[Docstring]:
    found: list[Docstring] = []
    for package, num_modules in (("numpy", 80), ("rich", 70), ("yaml", 60), ("tiny", 3)):
        found += docstrings_of(package, num_modules)
    return found


@pytest.fixture
def task(harvest: list[Docstring]) -> DocstringTask:
    return make_task(harvest, SIZES)


def test_the_packages_with_most_paragraphs_are_the_labels(task: DocstringTask) -> None:
    assert task.labels == ("numpy", "rich")


def test_nothing_of_a_held_out_module_is_in_the_pretraining_text_or_the_training_pool(
    task: DocstringTask, harvest: list[Docstring]
) -> None:
    held_out = {d.text for d in harvest if is_held_out(d.module)}
    assert held_out == set(task.held_out_texts)
    assert set(task.texts) == {d.text for d in harvest} - held_out
    assert not {e.text for e in task.train_pool} & {e.text for e in (*task.dev, *task.test)}
    share = len(held_out) / len(harvest)
    assert 0.1 < share < 0.3  # a fifth, of 213 modules


def test_dev_and_test_hold_as_many_of_each_label_and_no_text_twice(task: DocstringTask) -> None:
    assert Counter(e.label for e in task.dev) == {"numpy": 3, "rich": 3}
    assert Counter(e.label for e in task.test) == {"numpy": 4, "rich": 4}
    texts = [(e.text, e.label) for e in (*task.dev, *task.test)]
    assert len(set(texts)) == len(texts)


def test_a_text_that_stands_under_two_labels_once_names_are_hidden_is_nobodys(
    task: DocstringTask,
) -> None:
    for example in (*task.train_pool, *task.dev, *task.test):
        assert example.text != "The package module has a number."


def test_no_example_names_a_package_of_the_task(task: DocstringTask) -> None:
    for example in (*task.train_pool, *task.dev, *task.test):
        assert not {"numpy", "rich"} & set(example.text.replace("_", " ").replace("(", "").split())
    assert any("(package_x)" in e.text for e in task.train_pool)


def test_each_seed_draws_other_training_examples_and_always_the_same(task: DocstringTask) -> None:
    first, second = draw_train(task, SIZES, seed=0), draw_train(task, SIZES, seed=1)
    assert first == draw_train(task, SIZES, seed=0)
    assert first != second
    assert Counter(e.label for e in first) == {"numpy": 5, "rich": 5}


def test_one_package_is_no_task() -> None:
    with pytest.raises(ValueError, match="only 1 packages have enough docstrings"):
        make_task(docstrings_of("numpy", 80), SIZES)
