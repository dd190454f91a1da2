"""Texts become sequences as transformers makes them, and every example reaches a step."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer
from tokenizers.models import WordPiece
from tokenizers.pre_tokenizers import Whitespace
from tokenizers.processors import TemplateProcessing
from transformers import BertTokenizerFast

from bertsmith.batch import unpack
from bertsmith.data.examples import (
    Examples,
    ExampleTokenizer,
    TrainingSteps,
    evaluation_packs,
    packs_by_length,
)

WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *"abcdefgh"]


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    made = Tokenizer(WordPiece({w: i for i, w in enumerate(WORDS)}, unk_token="[UNK]"))
    made.pre_tokenizer = Whitespace()
    made.post_processor = TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[("[CLS]", 2), ("[SEP]", 3)],
    )
    made.enable_padding(length=50)  # as checkpoints of sentence encoders have it
    made.enable_truncation(4)
    return made


def sequences(examples: Examples) -> list[list[int]]:
    return [s.tolist() for s in unpack(examples.input_ids_T, examples.starts_N1)]


def test_texts_are_wrapped_whole_whatever_padding_and_cutting_the_tokenizer_holds(
    tokenizer: Tokenizer,
) -> None:
    examples = ExampleTokenizer(tokenizer, max_sequence_tokens=20).encode(
        ["a b c d e", "?", "h"], None
    )
    assert sequences(examples) == [[2, 5, 6, 7, 8, 9, 3], [2, 1, 3], [2, 12, 3]]
    assert examples.segment_ids_T is None
    assert (examples.num_cut, examples.tokens_cut) == (0, 0)
    assert tokenizer.truncation is not None


def test_long_texts_lose_their_end_and_are_counted(tokenizer: Tokenizer) -> None:
    examples = ExampleTokenizer(tokenizer, max_sequence_tokens=4).encode(["a b c d e", "a b"], None)
    assert sequences(examples) == [[2, 5, 6, 3], [2, 5, 6, 3]]
    assert (examples.num_cut, examples.tokens_cut) == (1, 3)


def test_pairs_are_those_of_transformers(tokenizer: Tokenizer) -> None:
    firsts = ["a b c d e f g h", "a", "a b c", "a b c d", "a b c d e f g"]
    seconds = ["h", "a b c d e f g h", "d e", "e f g h a", "a b c d e f g"]
    oracle = oracle_of(tokenizer)
    for limit in (5, 8, 9, 40):
        examples = ExampleTokenizer(tokenizer, max_sequence_tokens=limit).encode(firsts, seconds)
        expected = oracle(firsts, seconds, truncation="longest_first", max_length=limit)
        assert sequences(examples) == expected["input_ids"]
        assert examples.segment_ids_T is not None
        segments = unpack(examples.segment_ids_T, examples.starts_N1)
        assert [s.tolist() for s in segments] == expected["token_type_ids"]


@given(st.lists(st.integers(1, 60), min_size=1, max_size=50), st.integers(1, 80))
def test_packs_hold_each_row_once_within_their_room_longest_first(
    lengths: list[int], room: int
) -> None:
    packs = packs_by_length(torch.tensor(lengths), range(len(lengths)), tokens_per_pack=room)
    assert sorted(r for p in packs for r in p) == list(range(len(lengths)))
    for some in packs:
        assert len(some) == 1 or sum(lengths[r] for r in some) <= room
    in_order = [lengths[r] for p in packs for r in p]
    assert in_order == sorted(lengths, reverse=True)


@pytest.fixture(scope="module")
def examples(tokenizer: Tokenizer) -> Examples:
    texts = [" ".join("abcdefgh"[: 1 + i % 8]) for i in range(33)]
    return ExampleTokenizer(tokenizer, max_sequence_tokens=20).encode(texts, None)


def steps_of(examples: Examples, *, seed: int) -> TrainingSteps:
    labels = torch.arange(len(examples)) + 100
    return TrainingSteps(examples, labels, examples_per_step=8, tokens_per_pack=24, seed=seed)


def test_an_epoch_sees_each_example_once_in_steps_of_even_size(examples: Examples) -> None:
    steps = steps_of(examples, seed=5)
    assert steps.steps_per_epoch == 5
    for epoch in (0, 1):
        sizes = [len(steps.rows(5 * epoch + i)) for i in range(5)]
        assert sorted(sizes) == [6, 6, 7, 7, 7]
        rows = [r for i in range(5) for r in steps.rows(5 * epoch + i)]
        assert sorted(rows) == list(range(33))


def test_the_order_depends_on_seed_and_epoch_and_on_nothing_else(examples: Examples) -> None:
    steps = steps_of(examples, seed=5)
    first = [steps.rows(i) for i in range(10)]
    assert first[:5] != first[5:]
    assert first[0] != steps_of(examples, seed=6).rows(0)
    resumed = steps_of(examples, seed=5)
    assert [resumed.rows(i) for i in (7, 2, 7)] == [first[7], first[2], first[7]]


def test_labels_and_rows_stay_with_their_sequences(examples: Examples) -> None:
    alone = sequences(examples)
    batches = steps_of(examples, seed=5).batches(3)
    assert len(batches) > 1
    for batch in batches:
        rows = batch.rows_N.tolist()
        assert batch.labels_N.tolist() == [r + 100 for r in rows]
        packed = unpack(batch.inputs.input_ids_T, batch.inputs.starts_N1)
        assert [s.tolist() for s in packed] == [alone[r] for r in rows]


def test_every_example_is_read_once_when_a_model_is_judged(examples: Examples) -> None:
    alone = sequences(examples)
    seen: list[int] = []
    for rows, batch in evaluation_packs(examples, tokens_per_pack=30):
        packed = unpack(batch.input_ids_T, batch.starts_N1)
        assert [s.tolist() for s in packed] == [alone[r] for r in rows]
        seen += rows
    assert sorted(seen) == list(range(33))


def oracle_of(tokenizer: Tokenizer) -> BertTokenizerFast:
    return BertTokenizerFast(
        tokenizer_object=Tokenizer.from_str(tokenizer.to_str()),
        **{f"{n}_token": f"[{n.upper()}]" for n in ("pad", "unk", "cls", "sep", "mask")},
    )


@pytest.mark.parametrize("overlap", [0, 1, 2])
def test_windows_of_a_text_are_those_of_transformers(tokenizer: Tokenizer, overlap: int) -> None:
    texts = ["a b c d e f g h", "a b", "h g f e d", "a b c d", "a b c d e f g h a b c d e f g"]
    examples = ExampleTokenizer(tokenizer, max_sequence_tokens=6, overlap_tokens=overlap).encode(
        texts, None
    )
    expected = oracle_of(tokenizer)(
        texts, truncation=True, max_length=6, stride=overlap, return_overflowing_tokens=True
    )
    assert sequences(examples) == expected["input_ids"]
    assert examples.owners_N.tolist() == expected["overflow_to_sample_mapping"]
    assert (examples.num_cut, examples.tokens_cut, examples.num_windowed) == (0, 0, 3)


def test_windows_of_a_pair_move_over_its_second_text(tokenizer: Tokenizer) -> None:
    """Where the first leaves no room for that, the pair is cut."""
    firsts, seconds = ["a b", "a", "a b c d e"], ["c d e f g h a", "b", "c d e f"]
    examples = ExampleTokenizer(tokenizer, max_sequence_tokens=9, overlap_tokens=2).encode(
        firsts, seconds
    )
    oracle = oracle_of(tokenizer)
    expected = oracle(
        *(firsts[:2], seconds[:2]),
        truncation="only_second",
        max_length=9,
        stride=2,
        return_overflowing_tokens=True,
    )
    cut = oracle(firsts[2], seconds[2], truncation="longest_first", max_length=9)
    assert sequences(examples) == [*expected["input_ids"], cut["input_ids"]]
    assert examples.owners_N.tolist() == [*expected["overflow_to_sample_mapping"], 2]
    assert examples.segment_ids_T is not None
    segments = unpack(examples.segment_ids_T, examples.starts_N1)
    assert [s.tolist() for s in segments] == [*expected["token_type_ids"], cut["token_type_ids"]]
    assert (examples.num_cut, examples.tokens_cut, examples.num_windowed) == (1, 3, 1)


@given(length=st.integers(1, 60), limit=st.integers(5, 12), overlap=st.integers(0, 5))
def test_windows_hold_every_token_in_its_order(
    tokenizer: Tokenizer, length: int, limit: int, overlap: int
) -> None:
    overlap = min(overlap, (limit - 2) // 2)
    text = " ".join("abcdefgh"[i * i % 7] for i in range(length))
    windows = sequences(
        ExampleTokenizer(tokenizer, max_sequence_tokens=limit, overlap_tokens=overlap).encode(
            [text], None
        )
    )
    whole = sequences(ExampleTokenizer(tokenizer, max_sequence_tokens=99).encode([text], None))[0]
    joined = windows[0][1:-1]
    for window in windows[1:]:
        inner = window[1:-1]
        assert len(window) <= limit
        assert inner[:overlap] == joined[len(joined) - overlap :]
        assert len(inner) > overlap
        joined += inner[overlap:]
    assert joined == whole[1:-1]
