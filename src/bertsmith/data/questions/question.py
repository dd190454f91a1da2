"""A question, the text that it is asked of, and the answers that stand there."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal, NamedTuple

from bertsmith.data.tables import LONE_SURROGATE

PLACES_SHOWN = 3
"""Where else an answer stands: so many places are told."""


class GoldAnswer(NamedTuple):
    """An answer that was given, and its first character's place in the context."""

    text: str
    start: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Question:
    """One question of one context."""

    id: str
    place: str
    """Where it stands: a file and a line, or a way through a SQuAD file."""

    question: str
    context: str
    answers: tuple[GoldAnswer, ...] = ()
    """As they were given, in any number; none if the context has no answer, or none are known."""

    @property
    def golds(self) -> tuple[str, ...]:
        """The answers' texts."""
        return tuple(answer.text for answer in self.answers)


Fault = Literal["unreadable", "misplaced", "repeated"]
"""Sorts of what is wrong with a question: what it says, where its answer stands, its id."""


class QuestionFaultError(Exception):
    """Why a question cannot be used."""

    def __init__(self, said: str, fault: Fault = "unreadable") -> None:
        """What is wrong, in words and by its sort."""
        super().__init__(said)
        self.fault: Fault = fault


def read_text(content: Mapping[str, object], key: str) -> str:
    """A text that must be there and say something.

    Raises:
        QuestionFaultError: It does not.
    """
    value = content.get(key)
    if value is None:
        raise QuestionFaultError(f"there is no {key!r}")
    if not isinstance(value, str):
        raise QuestionFaultError(f"{key!r} is no text")
    if not value.strip():
        raise QuestionFaultError(f"the {key} is empty")
    if LONE_SURROGATE.search(value):
        raise QuestionFaultError(f"the {key} holds half a surrogate pair")
    return value


def read_id(content: Mapping[str, object], usual: str | None) -> str:
    """The name of a question, a number's digits if it is one.

    Args:
        content: Of the question.
        usual: What it is called without one; None: it must have one.

    Raises:
        QuestionFaultError: It has none that can be used.
    """
    value = content.get("id")
    if value is None and usual is not None:
        return usual
    if type(value) is int:
        return str(value)
    return read_text(content, "id")


def read_answers(content: Mapping[str, object], context: str, *, says_so: bool) -> list[GoldAnswer]:
    """The answers of a question, checked against its context.

    Args:
        content: Of the question: `answers` is a list of objects, or an object of two lists.
        context: Where they must stand.
        says_so: Whether a question without answers must say `is_impossible`.

    Raises:
        QuestionFaultError: One does not stand where it says, or what is said contradicts itself.
    """
    given = content.get("answers")
    is_impossible = content.get("is_impossible")
    if is_impossible not in (None, True, False):
        raise QuestionFaultError("'is_impossible' is neither true nor false")
    if given is None and not is_impossible:
        raise QuestionFaultError("there are no 'answers'")
    answers = [_checked(text, start, context) for text, start in _pairs(given)]
    if answers and is_impossible:
        raise QuestionFaultError("it has answers, and 'is_impossible' is true")
    if not answers and (is_impossible is False or (says_so and not is_impossible)):
        raise QuestionFaultError("it has no answers, and 'is_impossible' is not true")
    return answers


def _pairs(given: object) -> Iterable[tuple[object, object]]:
    """Text and start of each answer, as SQuAD or as `datasets` lays them out."""
    match given:
        case None:
            return []
        case {"text": list() as texts, "answer_start": list() as starts}:
            if len(texts) != len(starts):
                raise QuestionFaultError(
                    f"'answers' has {len(texts)} texts and {len(starts)} starts"
                )
            return zip(texts, starts, strict=True)
        case list() if all(isinstance(one, dict) for one in given):
            return [(one.get("text"), one.get("answer_start")) for one in given]
        case _:
            raise QuestionFaultError(
                "'answers' is neither a list of objects with text and answer_start, nor an object "
                "with lists of these"
            )


def _checked(text: object, start: object, context: str) -> GoldAnswer:
    if not isinstance(text, str) or type(start) is not int:
        raise QuestionFaultError("an answer needs text, and answer_start (a whole number)")
    if not text.strip():
        raise QuestionFaultError("an answer is empty")
    if LONE_SURROGATE.search(text):
        raise QuestionFaultError("an answer holds half a surrogate pair")
    shown = repr(text if len(text) <= 40 else text[:37] + "...")
    if not 0 <= start < len(context):
        raise QuestionFaultError(
            f"the answer {shown} begins at {start}, outside the context of {len(context)} "
            f"characters; {_elsewhere(text, context, start)}",
            "misplaced",
        )
    if not context.startswith(text, start):
        there = context[start : start + min(len(text), 40)]
        raise QuestionFaultError(
            f"the answer {shown} does not stand at {start}, where {there!r} stands; "
            f"{_elsewhere(text, context, start)}",
            "misplaced",
        )
    return GoldAnswer(text, start)


def _elsewhere(text: str, context: str, start: int) -> str:
    """Where an answer does stand, the nearest places first."""
    places = []
    place = context.find(text)
    while place >= 0:
        places.append(place)
        place = context.find(text, place + 1)
    if not places:
        lower = text.lower() in context.lower()
        return "it stands nowhere in it" + (", but for upper and lower case" if lower else "")
    places.sort(key=lambda place: abs(place - start))
    shown = ", ".join(str(place) for place in places[:PLACES_SHOWN])
    return f"it stands at {shown}" + (", ..." if len(places) > PLACES_SHOWN else "")
