"""What a fine-tuning run asks of its data, whatever form that has."""

from collections.abc import Sequence, Sized
from typing import Any, Protocol

from bertsmith.data.examples import Examples, Steps
from bertsmith.data.tokenizer import TextTokenizer


class Part(Protocol):
    """What is learned from, or judged by, tokenised."""

    @property
    def table(self) -> Sized:
        """Its rows: texts, sentences or questions."""
        ...

    @property
    def examples(self) -> Examples:
        """Its sequences."""
        ...


class Kind(Protocol):
    """What sort of answers a model of the data gives."""

    @property
    def headline(self) -> tuple[str, ...]:
        """Metrics that a line of progress shows."""
        ...

    def describe(self, names: Sequence[str], /) -> str:
        """What such a model is, in a few words for its card."""
        ...


class Tables(Protocol):
    """The data as it was read, for people."""

    @property
    def kind(self) -> Kind:
        """Of its answers."""
        ...

    @property
    def labels(self) -> tuple[str, ...]:
        """Names of the model's outputs; none if they have no names."""
        ...

    @property
    def num_leaked(self) -> int:
        """Rows to judge by that stand in the training part too."""
        ...

    def describe(self) -> list[str]:
        """What a person should know before training, a line each."""
        ...


class FinetuneData(Protocol):
    """A task, tokenised, as a run asks for it."""

    @property
    def tables(self) -> Tables:
        """As they were read."""
        ...

    @property
    def train(self) -> Part:
        """To learn from."""
        ...

    @property
    def dev(self) -> Part:
        """To judge by."""
        ...

    @property
    def steps(self) -> Steps[Any]:
        """What each step sees."""
        ...

    @property
    def longest(self) -> int:
        """Most tokens of a sequence."""
        ...

    @property
    def overlap_tokens(self) -> int | None:
        """That the windows of a longer text share; None: such a text is cut."""
        ...

    @property
    def tokenizer(self) -> TextTokenizer:
        """Of the model."""
        ...

    @property
    def fingerprint(self) -> str:
        """sha256 of all that is learned from and judged by."""
        ...

    @property
    def longest_example(self) -> int:
        """Tokens of the longest sequence there is, in either part."""
        ...

    def most_tokens(self, num_examples: int) -> int:
        """Tokens that so many examples to learn from have together, at most."""
        ...
