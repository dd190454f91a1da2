"""How often each token type stands in a text, and which types are rare.

Shape legend: V token types (ids of the vocabulary).
"""

import json
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from bertsmith.data.masking import MaskingVocab
from bertsmith.data.shards import TokenCorpus
from bertsmith.durable import write_whole

COUNTS_FILE = "type-counts.json"
BUCKETS: Final = ("rare", "middle", "frequent")
NO_BUCKET = -1

FREQUENT_SHARE = 0.1
"""Of the types seen in training, how many are frequent: about three quarters of a text's tokens."""

RARE_SHARE = 0.5
"""Of the types seen in training, how many are rare: less than a tenth of a text's tokens."""


@dataclass(frozen=True, kw_only=True)
class TypeFrequencies:
    """Counts of token types, and the bucket of each type by its rank.

    Types that occur are ranked by their count, the most frequent first, those of one count by id.
    The first tenth of the ranks is frequent, the last half is rare, the rest is middle. A type
    that never occurs is rare. Special tokens, which are never predicted, are in no bucket.
    """

    counts_V: NDArray[np.int64]
    bucket_V: NDArray[np.int8]
    """Number in `BUCKETS`, or `NO_BUCKET`."""


def frequencies(counts_V: NDArray[np.int64], vocab: MaskingVocab) -> TypeFrequencies:
    """Rank the ordinary types of a vocabulary.

    Args:
        counts_V: How often each id occurs.
        vocab: Names the ordinary ids.
    """
    ordinary = vocab.ordinary_ids
    bucket_V = np.full(len(counts_V), NO_BUCKET, np.int8)
    bucket_V[ordinary] = BUCKETS.index("rare")
    ranked = ordinary[np.argsort(-counts_V[ordinary], kind="stable")]
    num_seen = int(np.count_nonzero(counts_V[ordinary]))
    num_rare = int(num_seen * RARE_SHARE)
    num_frequent = min(-int(-num_seen * FREQUENT_SHARE // 1), num_seen - num_rare)
    bucket_V[ranked[:num_frequent]] = BUCKETS.index("frequent")
    bucket_V[ranked[num_frequent : num_seen - num_rare]] = BUCKETS.index("middle")
    return TypeFrequencies(counts_V=counts_V, bucket_V=bucket_V)


def corpus_frequencies(corpus: TokenCorpus) -> TypeFrequencies:
    """The frequencies of a prepared text.

    Counting reads every token once, about 10^8 a second; the counts are noted beside the shards,
    so that one process and one run of many does it. A note that cannot be read or written, or is
    of other text, costs nothing but that time.
    """
    counts_V = _remembered(corpus)
    if counts_V is None:
        counts_V = corpus.type_counts()
        content = {"fingerprint": corpus.fingerprint, "counts": counts_V.tolist()}
        with suppress(OSError):
            write_whole(corpus.folder / COUNTS_FILE, json.dumps(content) + "\n")
    return frequencies(counts_V, corpus.vocab)


def _remembered(corpus: TokenCorpus) -> NDArray[np.int64] | None:
    try:
        content: Any = json.loads((corpus.folder / COUNTS_FILE).read_text(encoding="utf-8"))
        counts = content["counts"]
        is_ours = (
            content["fingerprint"] == corpus.fingerprint
            and len(counts) == corpus.vocab.size
            and all(type(n) is int and n >= 0 for n in counts)
            and sum(counts) == corpus.num_tokens
        )
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return np.array(counts, np.int64) if is_ours else None
