"""How many packs and tokens each block of a corpus has, found once and remembered.

A step's place follows from the packs of the blocks before it. To count them each block is
planned, one after another, which takes minutes where there are hundreds; so the counts are kept in
a small file beside the shards. It is a note, not data: where it cannot be read, or is of something
else, the counts are made again, and where it cannot be written, nothing is lost but time.

The file: ``{"of": what the counts depend on, "counts": {packing: [[packs, tokens], ...]}}``. A list
shorter than the blocks was interrupted, and is gone on with.
"""

import json
from collections.abc import Callable
from contextlib import suppress
from typing import Any, NamedTuple

from bertsmith.data.blocks import Blocks, plan_block
from bertsmith.data.config import Objective, PackingConfig, has_pairs
from bertsmith.data.pieces import Corpus
from bertsmith.durable import write_whole

COUNTS_FILE = "pack-counts.json"
SCHEMA = 1
"""To be raised when blocks or packs are planned in another way."""

BLOCKS_A_WRITE = 100
"""An interruption costs the counting of so many blocks."""


class BlockCount(NamedTuple):
    """What is known of a block without planning it."""

    packs: int
    tokens: int
    """Special ones included."""


def count_blocks(
    corpus: Corpus,
    blocks: Blocks,
    packing: PackingConfig,
    *,
    objective: Objective = "mlm",
    advance: Callable[[int, int], None] = lambda done, total: None,
) -> list[BlockCount]:
    """Packs and tokens of each block.

    Args:
        corpus: The documents, and the folder where counts are remembered.
        blocks: Of the corpus.
        packing: Sizes of packs and sequences.
        objective: Whether sequences are pairs.
        advance: Told the blocks counted and in all, where some were not remembered.
    """
    key = _key(packing, objective)
    counts = _remembered(corpus, blocks).get(key, [])[: blocks.num_blocks]
    while len(counts) < blocks.num_blocks:
        plan = plan_block(corpus, blocks, len(counts), packing, objective)
        num_tokens = int(plan.lengths_S.sum(dtype="int64"))
        counts.append(BlockCount(plan.shapes.num_packs, num_tokens))
        advance(len(counts), blocks.num_blocks)
        if len(counts) % BLOCKS_A_WRITE == 0 or len(counts) == blocks.num_blocks:
            remember_counts(corpus, blocks, packing, counts, objective=objective)
    return counts


def remember_counts(
    corpus: Corpus,
    blocks: Blocks,
    packing: PackingConfig,
    counts: list[BlockCount],
    *,
    objective: Objective = "mlm",
) -> None:
    """Note the counts of the first blocks beside those of other packings.

    A corpus without a folder, or one that may not be written, is left as it is.
    """
    if corpus.folder is None:
        return
    content = {
        "of": _what_it_depends_on(corpus, blocks),
        "counts": _remembered(corpus, blocks) | {_key(packing, objective): counts},
    }
    with suppress(OSError):
        write_whole(corpus.folder / COUNTS_FILE, json.dumps(content) + "\n")


def _key(packing: PackingConfig, objective: Objective) -> str:
    of_pairs = "/pairs" if has_pairs(objective) else ""
    return f"{packing.tokens_per_pack}/{packing.max_sequence_tokens}{of_pairs}"


def _what_it_depends_on(corpus: Corpus, blocks: Blocks) -> dict[str, Any]:
    return {
        "schema": SCHEMA,
        "fingerprint": corpus.fingerprint,
        "documents": blocks.num_documents,
        "blocks": blocks.num_blocks,
        "runs_of_a_block": blocks.runs_of_a_block,
    }


def _remembered(corpus: Corpus, blocks: Blocks) -> dict[str, list[BlockCount]]:
    """The counts in the file by packing; none if it is of something else, damaged or not there."""
    if corpus.folder is None:
        return {}
    try:
        content: Any = json.loads((corpus.folder / COUNTS_FILE).read_text(encoding="utf-8"))
        if content["of"] != _what_it_depends_on(corpus, blocks):
            return {}
        found = {
            str(key): [BlockCount(packs, tokens) for packs, tokens in counts]
            for key, counts in content["counts"].items()
        }
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return {}
    numbers = (n for counts in found.values() for count in counts for n in count)
    return found if all(type(n) is int and n >= 0 for n in numbers) else {}
