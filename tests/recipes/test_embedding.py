"""Sentence embeddings from a small table to vectors, and what is refused on the way."""

import csv
import json
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModel, AutoTokenizer

from bertsmith.data.config import TableConfig
from bertsmith.errors import UserError
from bertsmith.model.config import LoraConfig
from bertsmith.recipes.config import EvaluateConfig, FinetuneConfig, MergeConfig, PredictConfig
from bertsmith.recipes.evaluate import evaluate
from bertsmith.recipes.finetune import finetune
from bertsmith.recipes.merge import merge_folders
from bertsmith.recipes.predict import predict
from bertsmith.tasks.config import EmbeddingConfig
from bertsmith.train.config import OptimConfig

WORDS = ("good", "bad", "film", "ox", "the")


def write_pairs(path: Path, count: int, *, scored: bool, seed: int = 0) -> Path:
    """Pairs of texts of the same words in another order; scored ones share some words."""
    draw = random.Random(seed)
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["text", "text_b", *(["score"] if scored else [])])
        for _ in range(count):
            first = draw.sample(WORDS, 3)
            second = draw.sample(WORDS, 3) if scored else draw.sample(first, 3)
            shared = len(set(first) & set(second))
            writer.writerow(
                [" ".join(first), " ".join(second), *([f"{shared - 1}"] if scored else [])]
            )
    return path


def settings(model: Path, data: Path, output: Path, **more: Any) -> FinetuneConfig:
    optim = OptimConfig(learning_rate=2e-3, beta2=0.999)
    values: dict[str, Any] = {"epochs": 6, "examples_per_step": 8, "precision": "fp32"} | more
    return FinetuneConfig(
        model=str(model),
        data=str(data),
        output=str(output),
        task="embedding",
        optim=optim,
        **values,
    )


@pytest.mark.parametrize("pooling", ["mean", "cls"])
@pytest.mark.parametrize("scored", [False, True])
@pytest.mark.filterwarnings("ignore")
def test_from_pairs_to_vectors_as_in_sentence_transformers(
    tmp_path: Path, tiny_encoder_folder: Path, scored: bool, pooling: Any
) -> None:
    sentence_transformers = pytest.importorskip("sentence_transformers")
    data = write_pairs(tmp_path / "train.csv", 80, scored=scored)
    dev = write_pairs(tmp_path / "dev.csv", 20, scored=scored, seed=1)
    output = tmp_path / "run"
    summary = finetune(
        settings(
            tiny_encoder_folder,
            data,
            output,
            eval=str(dev),
            embedding=EmbeddingConfig(pooling=pooling),
        )
    )
    assert summary.metrics["spearman" if scored else "mean_reciprocal_rank"] > 0.2
    found = evaluate(EvaluateConfig(model=str(output), data=str(dev), precision="fp32"))
    assert found.metrics.by_name() == pytest.approx(summary.metrics, abs=1e-5)

    texts = ["good film", "the bad ox the bad ox", "ox"]
    (tmp_path / "texts.txt").write_text("\n".join(texts) + "\n")
    for ending in ("npy", "jsonl"):
        asked = PredictConfig(
            model=str(output),
            data=str(tmp_path / "texts.txt"),
            output=str(tmp_path / f"out.{ending}"),
            precision="fp32",
        )
        assert predict(asked).num_rows == 3
    matrix = np.load(tmp_path / "out.npy")
    pairs = PredictConfig(model=str(output), data=str(dev), output=str(tmp_path / "pairs.npy"))
    assert predict(pairs).unread_column == "text_b"
    second = replace(pairs, table=TableConfig(text_column="text_b"), overwrite=True)
    assert predict(second).unread_column is None
    lines = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert [line["text"] for line in lines] == texts
    np.testing.assert_allclose([line["embedding"] for line in lines], matrix, atol=1e-6)
    theirs = sentence_transformers.SentenceTransformer(str(output / "model"), device="cpu")
    np.testing.assert_allclose(theirs.encode(texts), matrix, atol=1e-5)
    AutoModel.from_pretrained(output / "model")
    # What it was trained with is what a next training takes up.
    again = finetune(settings(output / "model", data, tmp_path / "again", eval=str(dev), steps=1))
    assert again.steps == 1
    modes = json.loads((tmp_path / "again/model/1_Pooling/config.json").read_text())
    assert modes[f"pooling_mode_{'mean_tokens' if pooling == 'mean' else 'cls_token'}"]


@pytest.mark.filterwarnings("ignore")
def test_adapters_of_an_embedder_are_for_peft_and_for_sentence_transformers(
    tmp_path: Path, tiny_encoder_folder: Path
) -> None:
    sentence_transformers = pytest.importorskip("sentence_transformers")
    peft = pytest.importorskip("peft")
    data = write_pairs(tmp_path / "train.csv", 40, scored=False)
    run = tmp_path / "run"
    lora = LoraConfig(rank=2, targets=["query", "value", "inner_out"])
    finetune(settings(tiny_encoder_folder, data, run, eval=str(data), epochs=2, lora=lora))
    assert json.loads((run / "adapter/adapter_config.json").read_text())["task_type"] == (
        "FEATURE_EXTRACTION"
    )
    merged = merge_folders(
        MergeConfig(
            model=str(tiny_encoder_folder), adapter=str(run), output=str(tmp_path / "merged")
        )
    )
    texts = ["good film", "the bad ox the bad ox", "ox"]
    (tmp_path / "texts.txt").write_text("\n".join(texts) + "\n")

    def embedded(model: Path, *adapters: str) -> Any:
        output = tmp_path / "out.npy"
        predict(
            PredictConfig(
                model=str(model),
                adapter=list(adapters),
                data=str(tmp_path / "texts.txt"),
                output=str(output),
                precision="fp32",
                overwrite=True,
            )
        )
        return np.load(output)

    matrix = embedded(run)
    assert np.abs(matrix - embedded_before(tiny_encoder_folder, texts)).max() > 1e-3
    np.testing.assert_allclose(embedded(tiny_encoder_folder, str(run)), matrix, atol=1e-5)
    np.testing.assert_allclose(embedded(merged), matrix, atol=1e-5)
    found = [
        evaluate(
            EvaluateConfig(model=str(model), adapter=adapter, data=str(data), precision="fp32")
        ).metrics.by_name()
        for model, adapter in ((run, None), (tiny_encoder_folder, str(run)))
    ]
    assert found[1] == pytest.approx(found[0], abs=1e-5)

    tokenizer = AutoTokenizer.from_pretrained(run / "model")
    inputs = tokenizer(texts, padding=True, return_tensors="pt")
    base = AutoModel.from_pretrained(tiny_encoder_folder)
    theirs = peft.PeftModel.from_pretrained(base, str(run / "adapter")).eval()
    with torch.no_grad():
        hidden = theirs(**inputs).last_hidden_state
    mask = inputs["attention_mask"][:, :, None]
    pooled = torch.nn.functional.normalize((hidden * mask).sum(1) / mask.sum(1), dim=1)
    np.testing.assert_allclose(pooled.numpy(), matrix, atol=1e-5)
    for folder in (run / "adapter", merged):
        opened = sentence_transformers.SentenceTransformer(str(folder), device="cpu")
        np.testing.assert_allclose(opened.encode(texts), matrix, atol=1e-5)


def embedded_before(folder: Path, texts: list[str]) -> Any:
    """Mean of the hidden states of a folder's own encoder, of length 1."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    inputs = tokenizer(texts, padding=True, return_tensors="pt")
    with torch.no_grad():
        hidden = AutoModel.from_pretrained(folder).eval()(**inputs).last_hidden_state
    mask = inputs["attention_mask"][:, :, None]
    mean = (hidden * mask).sum(1) / mask.sum(1)
    return torch.nn.functional.normalize(mean, dim=1).numpy()


@pytest.mark.parametrize(
    ("rows", "more", "said"),
    [
        ("text,text_b\na b,c\nd, \n", {}, r"t\.csv:3 .*the text is empty \(column 'text_b'\)"),
        ("text\na b\nd\n", {}, "there is no second text"),
        (
            "text,text_b,score\na,b,1\nc,d,7\n",
            {"embedding": EmbeddingConfig(score_range="0,5")},
            r"t\.csv:3 .*the score 7 is outside of 0 to 5",
        ),
        ("text,text_b,score\na,b,1\nc,d,nan\n", {}, r"t\.csv:3 .*the score 'nan' is no number"),
        ("text,text_b,score\na,b,2\nc,d,2\n", {}, "every row has the score 2"),
        ("text,text_b\na,b\nc,d\n", {"monitor": "spearman"}, "has no such metric"),
    ],
)
def test_bad_pairs_are_refused_with_their_place(
    tmp_path: Path, tiny_encoder_folder: Path, rows: str, more: dict[str, Any], said: str
) -> None:
    (tmp_path / "t.csv").write_text(rows)
    with pytest.raises(UserError, match=said):
        finetune(settings(tiny_encoder_folder, tmp_path / "t.csv", tmp_path / "run", **more))


@pytest.mark.parametrize(
    ("beside", "said"), [("score", "of the score"), ("negative", "of the negatives")]
)
def test_a_table_to_judge_by_without_what_is_learned_is_refused(
    tmp_path: Path, tiny_encoder_folder: Path, beside: str, said: str
) -> None:
    (tmp_path / "t.csv").write_text(f"text,text_b,{beside}\na,b,1\nc,d,2\n")
    (tmp_path / "dev.csv").write_text("text,text_b\na,b\n")
    eval_table = str(tmp_path / "dev.csv")
    with pytest.raises(UserError, match=rf"dev\.csv: no column {said}"):
        finetune(
            settings(tiny_encoder_folder, tmp_path / "t.csv", tmp_path / "run", eval=eval_table)
        )


def test_a_step_of_one_pair_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="the negatives of a pair are the others of its step"):
        settings(tmp_path, tmp_path / "t.csv", tmp_path / "run", examples_per_step=1)


def test_ranks_are_those_of_hand_arithmetic() -> None:
    from bertsmith.metrics.embedding import retrieval_metrics

    anchors = torch.tensor([[1.0, 0.0], [0.0, 1.0], [1.0, 0.0]])
    seconds = torch.tensor([[0.6, 0.8], [0.8, 0.6], [1.0, 0.0]])
    ids = torch.tensor([[0, 3], [1, 4], [2, 5]])
    found = retrieval_metrics(anchors, seconds, ids, scale=1.0)
    # Places 3, 2 and 1: 0.6 after 1.0 and 0.8; 0.6 after 0.8; 1.0 first.
    assert found.mean_reciprocal_rank == pytest.approx((1 / 3 + 1 / 2 + 1) / 3)
    assert found.recall == {1: pytest.approx(1 / 3), 5: 1.0, 10: 1.0}
    # With the same anchor, the second text of row 2 is right for row 0 as well: place 1.
    twins = torch.tensor([[0, 3], [1, 4], [0, 5]])
    assert retrieval_metrics(anchors, seconds, twins, scale=1.0).recall[1] == pytest.approx(2 / 3)
