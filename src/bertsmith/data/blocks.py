"""A corpus of any size in blocks, each planned by itself: a step costs the same at any size.

A block is no stretch of the corpus but a likeness of it, as a pack is: runs of neighbouring
documents, taken at even distances from all over it. Steps that come from one block then see text
of every source that the corpus holds, in whatever order its files were named.

In an epoch some blocks go abreast: one pack of each in turn, until they are used up. Of a number of
ranks that is a multiple of `BLOCKS_ABREAST` each then stays with one of them, and plans no other.

Shape legend: B blocks, in the order of an epoch; G groups of blocks abreast.
"""

from bisect import bisect_right
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from bertsmith.data.config import Objective, PackingConfig
from bertsmith.data.packing import PackShapes, plan_packs
from bertsmith.data.pieces import Corpus, Pieces, longest_piece, sequence_lengths

ONE_BLOCK_TOKENS = 1 << 27
"""A corpus of up to so many tokens is one block, planned in under half a second."""

BLOCK_TOKENS = 1 << 24
"""About the most tokens in each block of a larger corpus."""

BLOCKS_ABREAST = 8
"""As many as a usual machine has GPUs; they hold 2^27 tokens together."""

RUNS_OF_A_BLOCK = 64
"""Places of the corpus that a block is taken from."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Blocks:
    """Which documents each block holds; together they hold each once."""

    num_documents: int
    num_blocks: int
    """At least 1."""

    runs_of_a_block: int

    def runs_of(self, block: int) -> list[range]:
        """The documents of a block as ranges, ascending."""
        num_runs = self.num_blocks * self.runs_of_a_block
        borders = [
            (self.num_documents * run // num_runs, self.num_documents * (run + 1) // num_runs)
            for run in range(block, num_runs, self.num_blocks)
        ]
        return [range(start, stop) for start, stop in borders]


def cut_blocks(corpus: Corpus) -> Blocks:
    """One block, or as few as have about `BLOCK_TOKENS` each; follows from the corpus's size.

    All have as many documents, give or take one a run. Their tokens differ as those of samples do;
    long documents that lie side by side are spread over all blocks.
    """
    is_one = corpus.num_tokens <= ONE_BLOCK_TOKENS
    wanted = 1 if is_one else -(-corpus.num_tokens // BLOCK_TOKENS)
    num_blocks = max(min(wanted, corpus.num_documents), 1)
    runs = min(RUNS_OF_A_BLOCK, corpus.num_documents // num_blocks) if num_blocks > 1 else 1
    return Blocks(num_documents=corpus.num_documents, num_blocks=num_blocks, runs_of_a_block=runs)


@dataclass(frozen=True, kw_only=True, slots=True)
class BlockPlan:
    """What every epoch has in common in one block."""

    pieces: Pieces
    lengths_S: NDArray[np.int32]
    """Tokens of the sequence of each piece."""

    shapes: PackShapes


def plan_block(
    corpus: Corpus,
    blocks: Blocks,
    block: int,
    packing: PackingConfig,
    objective: Objective = "mlm",
) -> BlockPlan:
    """Read the lengths of a block's documents, and plan its packs."""
    pieces = Pieces(
        corpus,
        max_sequence_tokens=longest_piece(packing, objective),
        runs=blocks.runs_of(block),
    )
    lengths_S = sequence_lengths(pieces, objective)
    shapes = plan_packs(lengths_S, capacity_tokens=packing.tokens_per_pack)
    return BlockPlan(pieces=pieces, lengths_S=lengths_S, shapes=shapes)


class EpochLayout:
    """Which pack of which block comes when in an epoch."""

    def __init__(self, block_B: NDArray[np.int64], num_packs_B: NDArray[np.int64]) -> None:
        """Groups are as many blocks as go abreast, the last one maybe fewer.

        Args:
            block_B: The blocks in the order of the epoch.
            num_packs_B: Packs of each of them, in the same order.
        """
        self._block_B, self._num_packs_B = block_B, num_packs_B
        firsts = np.arange(0, len(block_B), BLOCKS_ABREAST)
        self._stops_G = np.cumsum(np.add.reduceat(num_packs_B, firsts))

    def find(self, pack: int) -> tuple[int, int]:
        """The block of a pack of the epoch, and its number in the order of that block's packs."""
        group = int(np.searchsorted(self._stops_G, pack, side="right"))
        mine = slice(group * BLOCKS_ABREAST, (group + 1) * BLOCKS_ABREAST)
        blocks, counts = self._block_B[mine].tolist(), self._num_packs_B[mine].tolist()
        place = pack - (int(self._stops_G[group]) - sum(counts))

        def packs_before(turn: int) -> int:
            return sum(min(count, turn) for count in counts)

        turn = bisect_right(range(max(counts)), place, key=packs_before) - 1
        in_turn = [block for block, count in zip(blocks, counts, strict=True) if count > turn]
        return in_turn[place - packs_before(turn)], turn
