"""Long documents are cut evenly and nothing of them is lost."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from bertsmith.data.pieces import Pieces
from small_corpus import ListCorpus


@given(lengths=st.lists(st.integers(0, 400), min_size=1, max_size=20), longest=st.integers(3, 64))
def test_the_pieces_of_a_document_are_the_document(lengths: list[int], longest: int) -> None:
    corpus = ListCorpus(lengths)
    pieces = Pieces(corpus, max_sequence_tokens=longest)
    numbers = np.arange(pieces.num_pieces)
    ids_T, starts = pieces.lay(numbers)
    assert np.array_equal(np.diff(starts), pieces.lengths_S)
    assert int(pieces.lengths_S.max(initial=0)) <= longest
    documents = pieces.documents_of(numbers)
    for document in range(len(lengths)):
        mine = [n for n in numbers if documents[n] == document]
        assert mine == list(pieces.pieces_of(document))
        sequences = [ids_T[starts[n] : starts[n + 1]] for n in mine]
        assert all(s[0] == 2 and s[-1] == 3 for s in sequences)  # [CLS], [SEP]
        inner = [s[1:-1] for s in sequences]
        whole = np.concatenate(inner) if inner else np.zeros(0, np.int64)
        assert np.array_equal(whole, corpus.document(document))
        sizes = [len(i) for i in inner]
        assert not sizes or max(sizes) - min(sizes) <= 1
        assert len(sizes) == -(-lengths[document] // (longest - 2))  # the fewest that fit
