"""Text to train a tokenizer on: a part of the corpus taken from all over it."""

from collections.abc import Iterator
from itertools import islice

from bertsmith.data.corpus import Document, ReadOptions, read_documents
from bertsmith.data.plan import Unit

GOLDEN_RATIO = 0.6180339887498949
"""The fractional parts of its multiples lie evenly, however many are taken."""

UNITS_A_ROUND = 256
"""Enough for a spread; more would open files by the thousand for a few lines each."""


def sample_texts(units: list[Unit], read: ReadOptions, *, characters: int) -> Iterator[str]:
    """Whole documents from all units, until they have so many characters.

    Each unit gives documents from its beginning, in proportion to its bytes on disk. What is still
    wanted when some had less than their share is asked of the others in the next round.

    Args:
        units: Of the whole corpus.
        read: How documents are found in them.
        characters: When to stop; the last document may go beyond.
    """
    waiting = sorted(units, key=lambda unit: unit.number * GOLDEN_RATIO % 1.0)
    taken = dict.fromkeys((unit.number for unit in units), 0)
    left = characters
    while waiting:
        asked, unfinished = waiting[:UNITS_A_ROUND], []
        wanted, asked_bytes = left, sum(sum(unit.span_bytes) for unit in asked)
        share = 0
        for unit in asked:
            over = min(share, 0)  # a long document of one unit is at the cost of the next
            share = over - (-wanted * sum(unit.span_bytes) // asked_bytes)
            documents = islice(_documents(unit, read), taken[unit.number], None)
            for document in documents:
                if share <= 0:
                    unfinished.append(unit)
                    break
                yield document.text
                taken[unit.number] += 1
                share -= len(document.text)
                left -= len(document.text)
                if left <= 0:
                    return
        waiting = waiting[UNITS_A_ROUND:] + unfinished


def _documents(unit: Unit, read: ReadOptions) -> Iterator[Document]:
    for span in unit.spans:
        yield from read_documents(span, read)
