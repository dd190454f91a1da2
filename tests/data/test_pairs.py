"""Pairs: every token once, no label told by their shape, the same for any ranks and steps."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from bertsmith.batch import MaskedBatch
from bertsmith.data import blocks
from bertsmith.data.config import MaskingConfig, Objective, PackingConfig
from bertsmith.data.held_out import valid_batches, valid_pairs
from bertsmith.data.pairs import NO_PIECE, match_pieces
from bertsmith.data.stream import PretrainStream
from bertsmith.errors import UserError
from small_corpus import VOCAB, ListCorpus, skewed_lengths

PACKING = PackingConfig(tokens_per_pack=256, max_sequence_tokens=64)
PAIRS: tuple[Objective, ...] = ("mlm+nsp", "mlm+sop")
WORD_UNITS = MaskingConfig(unit="word", share=0.3)
CLASSIC = MaskingConfig(schedule="independent")


class NamedCorpus(ListCorpus):
    """Every token of the corpus has an id of its own, which tells its document and place."""

    def __init__(self, lengths: list[int]) -> None:
        super().__init__(lengths)
        self.vocab = replace(VOCAB, size=5 + sum(lengths))
        self.firsts = 5 + np.cumsum([0, *lengths])

    def document(self, index: int, /) -> NDArray[np.int64]:
        return np.arange(self.firsts[index], self.firsts[index + 1])

    def word_starts(self, index: int, /) -> NDArray[np.bool_]:
        """Six of ten tokens begin a word."""
        return np.random.default_rng(index).random(int(self._lengths_D[index])) < 0.6

    def document_of(self, token: int) -> int:
        return int(np.searchsorted(self.firsts, token, side="right")) - 1

    def begins_word(self, token: int) -> bool:
        document = self.document_of(token)
        return bool(self.word_starts(document)[token - self.firsts[document]])


@dataclass(frozen=True, kw_only=True)
class Sequence:
    """One sequence of a pack, nothing hidden."""

    first: list[int]
    second: list[int]
    label: int | None


def stream_of(corpus: ListCorpus, objective: Objective, **changes: object) -> PretrainStream:
    given: dict[str, object] = {
        "packing": PACKING,
        "masking": MaskingConfig(),
        "tokens_per_step": 512,
        "seed": 0,
    }
    return PretrainStream(corpus, objective=objective, **(given | changes))  # type: ignore[arg-type]


def batches_of(stream: PretrainStream, epoch: int) -> Iterator[MaskedBatch]:
    per_epoch = stream.steps_in_epoch(epoch)
    for step in range(epoch * per_epoch, (epoch + 1) * per_epoch):
        yield from stream.step(step)


def sequences_of(batch: MaskedBatch) -> Iterator[Sequence]:
    """The sequences of a pack, whose special tokens and token types are checked on the way."""
    assert batch.pairs is not None
    ids_T = batch.inputs.input_ids_T.index_copy(0, batch.positions_M, batch.targets_M).tolist()
    segments_T = batch.inputs.segment_ids_T.tolist()
    starts = batch.inputs.starts_N1.tolist()
    labels = dict(zip(batch.pairs.sequences_P.tolist(), batch.pairs.labels_P.tolist(), strict=True))
    for number, (start, end) in enumerate(pairwise(starts)):
        ids = ids_T[start:end]
        assert ids[0] == VOCAB.cls_id
        assert ids[-1] == VOCAB.sep_id
        middle = ids.index(VOCAB.sep_id)
        first, second = ids[1:middle], ids[middle + 1 : -1]
        assert segments_T[start:end] == [0] * (middle + 1) + [1] * (end - start - middle - 1)
        assert batch.inputs.position_ids_T[start:end].tolist() == list(range(end - start))
        assert not set(first + second) & set(VOCAB.special_ids)
        assert middle == len(ids) - 1 or second
        yield Sequence(first=first, second=second, label=labels.get(number))


def equal(left: MaskedBatch, right: MaskedBatch) -> bool:
    assert left.pairs is not None
    assert right.pairs is not None
    return (
        torch.equal(left.inputs.input_ids_T, right.inputs.input_ids_T)
        and torch.equal(left.inputs.segment_ids_T, right.inputs.segment_ids_T)
        and torch.equal(left.inputs.starts_N1, right.inputs.starts_N1)
        and torch.equal(left.positions_M, right.positions_M)
        and torch.equal(left.targets_M, right.targets_M)
        and torch.equal(left.pairs.sequences_P, right.pairs.sequences_P)
        and torch.equal(left.pairs.labels_P, right.pairs.labels_P)
    )


@settings(max_examples=40)
@given(
    lengths=st.lists(st.integers(0, 200), min_size=2, max_size=60).filter(any),
    objective=st.sampled_from(PAIRS),
    masking=st.sampled_from([MaskingConfig(), WORD_UNITS, CLASSIC]),
    seed=st.integers(0, 2**31),
    epoch=st.integers(0, 3),
    block_tokens=st.integers(500, 10_000),
)
def test_an_epoch_holds_every_token_once_in_true_and_false_pairs(
    lengths: list[int],
    objective: Objective,
    masking: MaskingConfig,
    seed: int,
    epoch: int,
    block_tokens: int,
) -> None:
    corpus = NamedCorpus(lengths)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(blocks, "ONE_BLOCK_TOKENS", block_tokens)
        patch.setattr(blocks, "BLOCK_TOKENS", block_tokens)
        if blocks.cut_blocks(corpus).num_blocks * 2 > len(lengths):
            return
        stream = stream_of(corpus, objective, masking=masking, seed=seed)
    seen: Counter[int] = Counter()
    num_tokens = num_whole = 0
    for batch in batches_of(stream, epoch):
        assert batch.num_tokens <= PACKING.tokens_per_pack
        num_tokens += batch.num_tokens
        for found in sequences_of(batch):
            seen.update(found.first + found.second)
            if not found.second:
                assert found.label is None
                assert not any(corpus.begins_word(token) for token in found.first[1:])
                num_whole += len(found.first) > 1
                continue
            before, after = found.first, found.second
            if found.label == 1 and objective == "mlm+sop":
                before, after = after, before
            assert corpus.begins_word(after[0])
            if found.label == 1 and objective == "mlm+nsp":
                one, other = ({corpus.document_of(t) for t in part} for part in (before, after))
                assert len(one) == len(other) == 1
                assert one != other
                assert np.all(np.diff(before) == 1)
                assert np.all(np.diff(after) == 1)
            else:
                assert np.all(np.diff(before + after) == 1)
                assert len({corpus.document_of(t) for t in before + after}) == 1
    assert seen == Counter(range(5, 5 + sum(lengths)))
    assert num_tokens == stream.num_tokens_per_epoch - num_whole


@pytest.mark.parametrize("masking", [MaskingConfig(), WORD_UNITS])
@pytest.mark.parametrize("objective", PAIRS)
def test_masks_go_with_their_tokens_wherever_a_segment_is_put(
    objective: Objective, masking: MaskingConfig
) -> None:
    """So what masking promises of a document's tokens holds of those of pairs."""
    corpus = NamedCorpus(skewed_lengths(60))
    stream = stream_of(corpus, objective, masking=masking)
    for epoch in (0, 3):
        hidden = torch.cat([batch.targets_M for batch in batches_of(stream, epoch)]).tolist()
        predicted = np.concatenate(
            [stream.predicted(d, epoch=epoch) for d in range(corpus.num_documents)]
        )
        assert sorted(hidden) == (np.flatnonzero(predicted) + 5).tolist()


@pytest.mark.parametrize("objective", PAIRS)
def test_half_of_the_pairs_are_false_and_their_shape_does_not_tell(objective: Objective) -> None:
    """Some 3,000 pairs: shares within four standard errors, 4 * 0.5 / sqrt(n) = 0.037."""
    corpus = NamedCorpus(skewed_lengths(800))
    stream = stream_of(corpus, objective)
    found = [s for e in range(2) for b in batches_of(stream, e) for s in sequences_of(b)]
    labels = np.array([-1 if s.label is None else s.label for s in found])
    assert np.mean(labels >= 0) > 0.97
    judged = labels >= 0
    bound = 2.0 / np.sqrt(judged.sum())
    assert abs(np.mean(labels[judged]) - 0.5) < bound
    for what in (
        np.array([len(s.first) + len(s.second) for s in found]),
        np.array([len(s.first) for s in found]),
        np.array([len(s.second) for s in found]),
    ):
        short = judged & (what <= np.median(what[judged]))
        assert abs(np.mean(labels[short]) - 0.5) < bound * 1.5


@pytest.mark.parametrize("objective", PAIRS)
def test_ranks_steps_and_starts_change_no_pair(objective: Objective) -> None:
    corpus = NamedCorpus(skewed_lengths(200))
    stream = stream_of(corpus, objective, tokens_per_step=1024)
    in_small_steps = list(batches_of(stream_of(corpus, objective, tokens_per_step=256), 1))
    per_epoch = stream.steps_in_epoch(0)
    whole = list(batches_of(stream, 1))
    assert all(equal(a, b) for a, b in zip(whole, in_small_steps, strict=True))
    step = per_epoch + 2
    for num_ranks in (2, 3, 5):
        packs = stream_of(corpus, objective, tokens_per_step=1024).step(step)
        for rank in range(num_ranks):
            fresh = stream_of(corpus, objective, tokens_per_step=1024)
            share = fresh.share(step, rank=rank, num_ranks=num_ranks)
            for number, pack in zip(share.numbers, share.packs, strict=False):
                assert equal(pack, packs[number])
            for filler in share.packs[len(share.numbers) :]:
                assert filler.target_counts == (0, 0)


def test_every_epoch_makes_other_pairs_and_other_cuts() -> None:
    corpus = NamedCorpus([40] * 200)
    stream = stream_of(corpus, "mlm+nsp")
    meetings: list[set[tuple[int, int]]] = []
    for epoch in range(3):
        meetings.append(set())
        for batch in batches_of(stream, epoch):
            for found in sequences_of(batch):
                if found.label == 1:
                    one, other = found.first[0], found.second[0]
                    meetings[-1].add((corpus.document_of(one), corpus.document_of(other)))
    # A document meets one of about 64 others: about one pair in 64 comes again by chance.
    assert len(meetings[0]) > 70
    assert len(meetings[0] & meetings[1]) < 15
    assert len(meetings[1] & meetings[2]) < 15


def test_the_parts_of_a_cut_pack_have_their_own_pairs() -> None:
    stream = stream_of(NamedCorpus(skewed_lengths(100)), "mlm+nsp")
    batch = stream.step(0)[0]
    whole = list(sequences_of(batch))
    parts = batch.cut(100)
    assert len(parts) > 2
    assert [s for part in parts for s in sequences_of(part)] == whole
    assert batch.filler().target_counts == (0, 0)


@settings(max_examples=100)
@given(
    documents=st.lists(st.integers(0, 12), max_size=300),
    of_one=st.integers(0, 200),
    seed=st.integers(0, 99),
)
def test_pieces_are_matched_with_those_of_other_documents_as_far_as_there_are_any(
    documents: list[int], of_one: int, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    documents_S = rng.permutation(np.array([*documents, *[3] * of_one], np.int64))
    pieces_S = rng.permutation(len(documents_S)) + 100
    matched_S = match_pieces(pieces_S, documents_S, np.random.default_rng(seed))
    document_of = dict(zip(pieces_S.tolist(), documents_S.tolist(), strict=True))
    match_of = dict(zip(pieces_S.tolist(), matched_S.tolist(), strict=True))
    matched = {piece: match for piece, match in match_of.items() if match != NO_PIECE}
    for piece, match in matched.items():
        assert match_of[match] == piece
        assert document_of[match] != document_of[piece]
    num = len(pieces_S)
    largest = max(Counter(documents_S.tolist()).values(), default=0)
    assert num - len(matched) <= num % 2 + 2 * max(0, largest - num // 2)


def test_books_whose_pieces_have_lengths_of_their_own_are_matched_all_the_same() -> None:
    """Next to each other in length are only pieces of one book, 64 and more in a row."""
    documents_S = np.repeat(np.arange(4), 200)
    matched_S = match_pieces(np.arange(800), documents_S, np.random.default_rng(0))
    assert matched_S.min() >= 0
    assert np.all(documents_S[matched_S] != documents_S)


def test_matches_are_of_like_length() -> None:
    lengths_S = np.sort(np.array(skewed_lengths(1000)))[::-1]
    matched_S = match_pieces(np.arange(1000), np.arange(1000), np.random.default_rng(0))
    assert np.max(np.abs(matched_S - np.arange(1000))) < 64
    assert np.median(np.abs(lengths_S[matched_S] - lengths_S)) < 5


def test_a_corpus_of_one_document_has_no_other_to_take_from() -> None:
    with pytest.raises(UserError, match=r"--objective mlm\+nsp: .*other documents.*mlm\+sop"):
        stream_of(NamedCorpus([500]), "mlm+nsp")
    assert sum(b.num_targets for b in batches_of(stream_of(NamedCorpus([500]), "mlm+sop"), 0))


def test_text_prepared_without_words_is_refused_before_the_first_step() -> None:
    class Wordless(NamedCorpus):
        def word_starts(self, index: int, /) -> NDArray[np.bool_]:
            raise UserError("no words")

    stream_of(Wordless([50, 50]), "mlm")
    for objective in PAIRS:
        with pytest.raises(UserError, match="no words"):
            stream_of(Wordless([50, 50]), objective)


def test_documents_of_a_step_are_those_that_it_has_text_of() -> None:
    corpus = NamedCorpus(skewed_lengths(100))
    stream = stream_of(corpus, "mlm+nsp")
    for batch, documents in zip(stream.step(2), stream.documents_of(2), strict=True):
        tokens = [t for s in sequences_of(batch) for t in s.first + s.second]
        assert {corpus.document_of(t) for t in tokens} == set(documents)


@pytest.mark.parametrize("objective", PAIRS)
def test_validation_pairs_stand_still_and_hide_what_validation_hides(
    objective: Objective,
) -> None:
    corpus = NamedCorpus(skewed_lengths(80))
    settings = {"packing": PACKING, "max_tokens": 3000}
    one, two = (valid_pairs(corpus, objective=objective, **settings) for _ in range(2))  # type: ignore[arg-type]
    assert all(equal(a, b) for a, b in zip(one, two, strict=True))
    hidden = {t for batch in valid_batches(corpus, **settings) for t in batch.targets_M.tolist()}  # type: ignore[arg-type]
    assert {t for batch in one for t in batch.targets_M.tolist()} == hidden
    labels = torch.cat([batch.pairs.labels_P for batch in one if batch.pairs])
    assert len(labels) > 30
    assert 0.3 < labels.float().mean() < 0.7
    for batch in one:
        for found in sequences_of(batch):
            if found.label == 0:
                assert np.all(np.diff(found.first + found.second) == 1)


def test_text_too_short_for_pairs_gives_none_to_validate_on() -> None:
    packing = {"packing": PACKING, "max_tokens": 3000}
    assert valid_pairs(ListCorpus([1, 1, 1]), objective="mlm+sop", **packing) == []  # type: ignore[arg-type]
    assert valid_pairs(ListCorpus([50]), objective="mlm+nsp", **packing) == []  # type: ignore[arg-type]
