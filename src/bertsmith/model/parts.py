"""Names of a model's parts: `embeddings`, the layers `0`, `1`, ... and `head`.

A list of parts is written `embeddings,0-5`; a list with a rate each `embeddings=5e-5,0-5=3e-5`.
What does not belong to the encoder is the head, the pooler included. A token table that a decoder
shares is one parameter and belongs to the embeddings.

Imports neither torch nor numpy, so that help and checks are instant.
"""

import math
import re
from collections.abc import Iterable

EMBEDDINGS = "embeddings"
HEAD = "head"

Span = str | range
"""A part by its name, or some layers in a row."""

_BLOCK = re.compile(r"encoder\.blocks\.(\d+)\.")
_LAYERS = re.compile(r"(\d+)(?:-(\d+))?", re.ASCII)

PARTS_FORM = "embeddings, a layer (3), layers in a row (0-5), split by commas"
RATES_FORM = "parts with a rate each: embeddings=5e-5,0-5=3e-5,6-11=1e-5,head=1e-4"


def part_of(parameter_name: str) -> str:
    """The part that a parameter of a model of ours belongs to."""
    if match := _BLOCK.match(parameter_name):
        return match[1]
    return EMBEDDINGS if parameter_name.startswith("encoder.embeddings.") else HEAD


def parts_of(parameter_names: Iterable[str]) -> list[str]:
    """The parts that parameters belong to, from the bottom up."""
    found = {part_of(name) for name in parameter_names}
    layers = sorted((part for part in found if part.isdecimal()), key=int)
    return [part for part in (EMBEDDINGS, *layers, HEAD) if part in found]


def read_parts(text: str) -> list[Span]:
    """Read a list of parts.

    Raises:
        ValueError: It is none.
    """
    return [_read_span(item.strip()) for item in text.split(",")]


def read_rates(text: str) -> list[tuple[Span, float]]:
    """Read a list of parts with a rate each.

    Raises:
        ValueError: It is none, or a rate is negative or not finite.
    """
    rates = []
    for item in text.split(","):
        name, equals, number = item.partition("=")
        try:
            rate = float(number)
        except ValueError:
            rate = math.nan
        if not equals or not 0.0 <= rate < math.inf:
            raise ValueError(f"{item.strip()!r} is no part with a rate; give {RATES_FORM}")
        rates.append((_read_span(name.strip()), rate))
    return rates


def spread(spans: Iterable[Span], *, num_layers: int) -> list[str]:
    """The names of all parts in a list, each once.

    Args:
        spans: As read.
        num_layers: Layers of the model.

    Raises:
        ValueError: A layer is beyond the model's last, or a part is named twice.
    """
    names: list[str] = []
    for span in spans:
        if isinstance(span, range) and span.stop > num_layers:
            raise ValueError(
                f"there is no layer {span.stop - 1}; the model's layers are 0-{num_layers - 1}"
            )
        names += [span] if isinstance(span, str) else [str(i) for i in span]
    twice = [name for i, name in enumerate(names) if name in names[:i]]
    if twice:
        raise ValueError(f"{said_part(twice[0])} is named twice")
    return names


def said_part(name: str) -> str:
    """A part as people say it."""
    return f"layer {name}" if name.isdecimal() else name


def _read_span(text: str) -> Span:
    if text in (EMBEDDINGS, HEAD):
        return text
    match = _LAYERS.fullmatch(text)
    if match is None or len(text) > 9:
        raise ValueError(f"{text!r} names no part; give {PARTS_FORM}, or head")
    first, last = int(match[1]), int(match[2] or match[1])
    if first > last:
        raise ValueError(f"{text!r} runs backwards; give {last}-{first}")
    return range(first, last + 1)
