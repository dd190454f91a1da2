"""Estimators of tags and of vectors say what the commands say, and keep scikit-learn's contract."""

import json
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from sklearn.base import clone
from sklearn.model_selection import cross_val_score

import bertsmith
from bertsmith.errors import UserError
from bertsmith.recipes.config import PredictConfig
from bertsmith.recipes.predict import predict

SENTENCES = [["the", "good", "film"], ["the", "bad", "ox"], ["good", "zebra"]] * 16
TAGS = [["O", "B-G", "I-G"], ["O", "B-B", "O"], ["B-G", "O"]] * 16
SPANS = [
    {"text": "the good film", "entities": [{"start": 4, "end": 13, "label": "G"}]},
    {"text": "the bad, ox", "entities": [{"start": 4, "end": 7, "label": "B"}]},
]
PAIRS = [("good film", "film good"), ("bad ox", "ox bad"), ("the zebra", "zebra the")] * 12


def fast(kind: type[Any], folder: Path, **more: Any) -> Any:
    values = {"epochs": 40, "learning_rate": 1e-2, "examples_per_step": 16, "precision": "fp32"}
    return kind(str(folder), **(values | more))


def told_by_the_command(model: str, rows: list[dict[str, Any]], folder: Path) -> list[Any]:
    data, output = folder / "in.jsonl", folder / "out.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    predict(
        PredictConfig(
            model=model, data=str(data), output=str(output), precision="fp32", overwrite=True
        )
    )
    return [json.loads(line) for line in output.read_text().splitlines()]


def test_words_are_tagged_as_by_the_command(encoder_folder: Path, tmp_path: Path) -> None:
    tagger = fast(bertsmith.WordTagger, encoder_folder).fit(
        SENTENCES, TAGS, eval_set=(SENTENCES, TAGS)
    )
    assert tagger.classes_ == ["O", "B-B", "I-B", "B-G", "I-G"]
    assert tagger.score(SENTENCES, TAGS) > 0.9
    rows = [{"tokens": words} for words in SENTENCES[:3]]
    told = told_by_the_command(tagger.model_folder_, rows, tmp_path)
    assert tagger.predict(SENTENCES[:3]) == [row["tags"] for row in told]
    text = "the good film, the bad"
    (told,) = told_by_the_command(tagger.model_folder_, [{"text": text}], tmp_path)
    (spans,) = tagger.predict([text])
    assert spans == told["entities"] != []
    assert all(text[one["start"] : one["end"]] == one["text"] for one in spans)
    again = pickle.loads(pickle.dumps(tagger))
    assert again.predict(SENTENCES[:3]) == tagger.predict(SENTENCES[:3])
    assert clone(tagger).get_params() == tagger.get_params()
    tagger.save(tmp_path / "kept")
    loaded = bertsmith.WordTagger.load(tmp_path / "kept").set_params(precision="fp32")
    assert loaded.predict(SENTENCES[:3]) == tagger.predict(SENTENCES[:3])
    with pytest.raises(UserError, match="gives no embeddings"):
        bertsmith.SentenceEmbedder.load(tmp_path / "kept")


def test_spans_come_from_a_table_and_scores_from_folds(encoder_folder: Path) -> None:
    table = pd.DataFrame(SPANS * 20)
    tagger = fast(bertsmith.WordTagger, encoder_folder).fit(table, eval_set=table)
    assert tagger.score(table) > 0.9
    (found,) = tagger.predict(table["text"][:1])
    assert [(one["start"], one["end"], one["label"]) for one in found] == [(4, 13, "G")]
    folds = cross_val_score(
        fast(bertsmith.WordTagger, encoder_folder, epochs=1), SENTENCES, TAGS, cv=2
    )
    assert len(folds) == 2
    assert np.isfinite(folds).all()


@pytest.mark.parametrize(
    ("sentences", "tags", "said"),
    [
        (["ab"], [[{"start": 0, "end": 9, "label": "x"}]], "rows to learn from, line 1: the span"),
        ([["a", "b"]], [["O"]], "tags, row 0: there are 2 words and 1 tags"),
        ([["a", " "]], [["O", "O"]], "sentences, row 0: ' ' is no word"),
        ([["a"]], None, "tags are missing"),
        (pd.DataFrame({"words": [["a"]]}), None, "no column 'tags' or"),
        ([["a"]], [["O"], ["O"]], "1 sentences and 2 lists of tags"),
        ([["a", "b"]], [["O", None]], "tags, row 0: None is no word and no whole number"),
        ([["a", "\ud800"]], [["O", "O"]], "sentences, row 0: holds half a surrogate pair"),
    ],
)
def test_what_is_no_tagging_is_told_by_row(
    encoder_folder: Path, sentences: Any, tags: Any, said: str
) -> None:
    with pytest.raises(UserError, match=said):
        fast(bertsmith.WordTagger, encoder_folder).fit(sentences, tags)


def test_vectors_are_those_of_the_command(encoder_folder: Path, tmp_path: Path) -> None:
    embedder = fast(bertsmith.SentenceEmbedder, encoder_folder, epochs=4).fit(PAIRS, eval_set=PAIRS)
    texts = ["good film", "ox"]
    vectors = embedder.transform(texts)
    assert vectors.dtype == np.float32
    np.testing.assert_allclose(np.linalg.norm(vectors, axis=1), 1.0, atol=1e-5)
    rows = [{"text": text} for text in texts]
    told = told_by_the_command(embedder.model_folder_, rows, tmp_path)
    np.testing.assert_allclose([row["embedding"] for row in told], vectors, atol=1e-6)
    assert embedder.transform([]).shape == (0, vectors.shape[1])
    assert embedder.score(PAIRS[:3]) == embedder.score(
        pd.DataFrame(PAIRS[:3], columns=["a", "b"]).rename(columns={"a": "text1", "b": "text2"})
    )


def test_scores_of_pairs_are_learned_from_a_table_or_a_list(encoder_folder: Path) -> None:
    table = pd.DataFrame(
        {
            "sentence1": ["good", "bad", "ox"] * 12,
            "sentence2": ["film", "ox", "ox"] * 12,
            "score": [3.0, 1.0, 5.0] * 12,
        }
    )
    embedder = fast(bertsmith.SentenceEmbedder, encoder_folder, epochs=8)
    embedder.fit(table, eval_set=([("good", "film"), ("ox", "ox"), ("bad", "ox")], [3, 5, 1]))
    assert embedder.summary_.metrics.keys() >= {"spearman", "pearson"}
    assert embedder.score(table) > 0.8
    with pytest.raises(UserError, match="give tuples of two texts"):
        embedder.fit(["good"])


def test_values_of_numpy_and_broken_texts(encoder_folder: Path) -> None:
    spans = [[{"start": np.int64(4), "end": np.int64(6), "label": "A"}]] * 8
    tagger = fast(bertsmith.WordTagger, encoder_folder, epochs=1).fit(["the ox"] * 8, spans)
    for broken in ("\ud800", ["\ud800"]):
        with pytest.raises(UserError, match="sentences, row 0: holds half a surrogate pair"):
            tagger.predict([broken])
