"""Fine-tuning, evaluation and prediction of tags, from files to answers."""

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from hypothesis import given
from hypothesis import strategies as st

from bertsmith.data.config import TableConfig
from bertsmith.data.tagging.windows import WindowTokenizer
from bertsmith.data.tokenizer import load_tokenizer
from bertsmith.errors import UserError
from bertsmith.model.config import LoraConfig
from bertsmith.recipes.config import EvaluateConfig, FinetuneConfig, MergeConfig, PredictConfig
from bertsmith.recipes.evaluate import evaluate
from bertsmith.recipes.finetune import finetune
from bertsmith.recipes.merge import merge_folders
from bertsmith.recipes.predict import predict
from bertsmith.recipes.tagging.task import open_tagger
from bertsmith.tasks.config import LossConfig
from bertsmith.train.config import OptimConfig

SENTENCE = [("the", "O"), ("good", "B-G"), ("film", "I-G"), ("a", "O"), ("bad", "B-B"), ("x", "O")]


def conll(path: Path, *, num: int = 24, length: int = 6) -> Path:
    lines = []
    for i in range(num):
        words = [SENTENCE[(i + j) % 6] for j in range(length)]
        words[0] = (words[0][0], words[0][1].replace("I-", "B-"))
        lines += [f"{word}\t{tag}" for word, tag in words] + [""]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def train(
    tmp_path: Path,
    model: Path,
    *,
    lora: LoraConfig | None = None,
    loss: LossConfig | None = None,
    steps: int,
) -> Path:
    tmp_path.mkdir(exist_ok=True)
    data = conll(tmp_path / "train.conll")
    summary = finetune(
        FinetuneConfig(
            model=str(model),
            data=str(data),
            eval=str(data),
            output=str(tmp_path / "run"),
            steps=steps,
            examples_per_step=8,
            eval_every_steps=50,
            patience=None,
            hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
            precision="fp32",
            device="cpu",
            lora=lora or LoraConfig(),
            loss=loss or LossConfig(),
            optim=OptimConfig(learning_rate=1e-2, warmup_share=0.0),
        )
    )
    assert summary.status == "completed"
    return tmp_path / "run"


def test_a_model_learns_tags_and_the_answers_are_those_of_the_pipeline(
    tmp_path: Path, tiny_encoder_folder: Path
) -> None:
    run = train(tmp_path, tiny_encoder_folder, steps=150)
    found = evaluate(
        EvaluateConfig(
            model=str(run),
            data=str(tmp_path / "train.conll"),
            bootstrap=5,
            errors=str(tmp_path / "errors.csv"),
            precision="fp32",
            device="cpu",
        )
    )
    assert found.metrics.by_name()["span_f1"] > 0.95
    assert set(found.intervals) == set(found.metrics.by_name())
    text = "The good film, a bad x"
    (tmp_path / "in.txt").write_text(text + "\n", encoding="utf-8")
    output = tmp_path / "out.jsonl"
    predict(
        PredictConfig(
            model=str(run),
            data=str(tmp_path / "in.txt"),
            output=str(output),
            precision="fp32",
            device="cpu",
        )
    )
    row = json.loads(output.read_text(encoding="utf-8"))
    pipeline = transformers.pipeline(
        "token-classification", model=str(run / "model"), aggregation_strategy="simple"
    )
    theirs = [(one["entity_group"], one["start"], one["end"]) for one in pipeline(text)]
    assert theirs
    assert [(e["label"], e["start"], e["end"]) for e in row["entities"]] == theirs
    assert all(e["text"] == text[e["start"] : e["end"]] for e in row["entities"])


@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing:FutureWarning")
def test_adapters_are_written_for_peft_and_merged_into_the_model(
    tmp_path: Path, tiny_encoder_folder: Path
) -> None:
    peft = pytest.importorskip("peft")
    run = train(tmp_path, tiny_encoder_folder, lora=LoraConfig(rank=2), steps=4)
    about = json.loads((run / "adapter" / "adapter_config.json").read_text())
    assert about["task_type"] == "TOKEN_CLS"
    whole = transformers.AutoModelForTokenClassification.from_pretrained(run / "model").eval()
    base = transformers.AutoModelForTokenClassification.from_pretrained(
        tiny_encoder_folder, num_labels=whole.config.num_labels
    )
    adapted = peft.PeftModel.from_pretrained(base, str(run / "adapter")).eval()
    ids = torch.tensor([[2, 7, 40, 12, 3]])
    with torch.no_grad():
        torch.testing.assert_close(
            adapted(input_ids=ids).logits, whole(input_ids=ids).logits, atol=1e-5, rtol=1e-5
        )
    # The base with the adapter is what model/ is, for every verb.
    data = str(tmp_path / "train.conll")
    merged = merge_folders(
        MergeConfig(
            model=str(tiny_encoder_folder), adapter=str(run), output=str(tmp_path / "merged")
        )
    )
    ways: list[dict[str, Any]] = [
        {"model": str(run)},
        {"model": str(merged)},
        {"model": str(tiny_encoder_folder), "adapter": str(run)},
    ]
    scores, rows = [], []
    for number, way in enumerate(ways):
        found = evaluate(EvaluateConfig(**way, data=data, precision="fp32", device="cpu"))
        scores.append(found.metrics.by_name())
        output = tmp_path / f"out{number}.jsonl"
        adapters = [way["adapter"]] if "adapter" in way else []
        predict(
            PredictConfig(
                model=way["model"],
                adapter=adapters,
                data=data,
                output=str(output),
                precision="fp32",
                device="cpu",
            )
        )
        rows.append([json.loads(line)["tags"] for line in output.read_text().splitlines()])
    assert rows[0] == rows[1] == rows[2]
    assert scores[1] == pytest.approx(scores[0], rel=1e-5)
    assert scores[2] == pytest.approx(scores[0], rel=1e-5)
    with pytest.raises(UserError, match="of tags, answers and embeddings give one"):
        predict(
            PredictConfig(
                model=str(tiny_encoder_folder),
                adapter=[str(run), str(run)],
                data=data,
                output=str(tmp_path / "none.jsonl"),
            )
        )


def test_tags_can_weigh_and_a_weight_for_a_tag_that_nobody_has_is_refused(
    tmp_path: Path, tiny_encoder_folder: Path
) -> None:
    """A tag that weighs all but nothing is never said."""
    run = train(tmp_path, tiny_encoder_folder, loss=LossConfig(class_weights={"O": 1e-6}), steps=60)
    tagger = open_tagger(str(run), max_sequence_tokens=None, precision="fp32", device="cpu")
    words = [word for word, _ in SENTENCE]
    scores_WC = tagger.logits_WC(tagger.tokenizer.encode([words]), tokens_per_pack=64)
    said = {tagger.labels[i] for i in scores_WC.argmax(1).tolist()}
    assert said <= {"B-G", "I-G", "B-B", "I-B"}
    with pytest.raises(UserError, match=r"class_weights: there is no label 'B-X'; the labels are"):
        train(
            tmp_path / "x", tiny_encoder_folder, loss=LossConfig(class_weights={"B-X": 2}), steps=1
        )


def test_a_long_sentence_is_read_in_windows_whose_scores_are_those_built_by_hand(
    tmp_path: Path, tiny_encoder_folder: Path
) -> None:
    run = train(tmp_path, tiny_encoder_folder, steps=4)
    tagger = open_tagger(str(run), max_sequence_tokens=12, precision="fp32", device="cpu")
    words = [SENTENCE[i % 6][0] for i in range(25)]  # a piece each
    scores_WC = tagger.logits_WC(tagger.tokenizer.encode([words]), tokens_per_pack=64)
    theirs = transformers.AutoModelForTokenClassification.from_pretrained(run / "model").eval()
    tokenizer = load_tokenizer(run / "model").tokenizer
    starts = [0, 8, 15]  # room for 10 pieces, overlap 2, the last one ends with the sentence
    for i in range(25):
        start = min(starts, key=lambda s: (abs(i - (s + 4.5)), s))
        ids = [tokenizer.token_to_id(word) for word in words[start : start + 10]]
        with torch.no_grad():
            logits = theirs(input_ids=torch.tensor([[2, *ids, 3]])).logits
        torch.testing.assert_close(scores_WC[i], logits[0, i - start + 1], atol=1e-5, rtol=1e-5)


@given(
    lengths=st.lists(st.integers(1, 60), min_size=1, max_size=4),
    overlap=st.integers(0, 9),
)
def test_every_word_is_read_once_at_its_first_piece(
    tiny_tokenizer_folder: Path, lengths: list[int], overlap: int
) -> None:
    tokenizer = load_tokenizer(tiny_tokenizer_folder)
    encoder = WindowTokenizer(tokenizer, max_sequence_tokens=12, overlap_tokens=overlap)
    letters = "abcdefghijklmnopqrstuvwxyz"
    sentences = [[letters[(i + n) % 26] + "x" * (i % 3) for i in range(n)] for n in lengths]
    windows = encoder.encode(sentences)
    packs = windows.packs(tokens_per_pack=40)
    tags_W = torch.arange(sum(lengths))
    seen = []
    flat = [word for words in sentences for word in words]
    for rows in packs:
        batch, words_M = windows.batch(rows, tags_W)
        assert batch.targets_M.tolist() == words_M.tolist()
        assert bool((batch.positions_M.diff() > 0).all())
        firsts = [tokenizer.tokenizer.token_to_id(flat[i][0]) for i in words_M.tolist()]
        assert batch.inputs.input_ids_T[batch.positions_M].tolist() == firsts
        seen += words_M.tolist()
    assert sorted(seen) == list(range(sum(lengths)))
    assert int(windows.examples.lengths_N.max()) <= 12


def test_a_word_of_which_the_tokenizer_leaves_nothing_is_read_as_unknown(
    tiny_tokenizer_folder: Path,
) -> None:
    encoder = WindowTokenizer(
        load_tokenizer(tiny_tokenizer_folder), max_sequence_tokens=12, overlap_tokens=2
    )
    windows = encoder.encode([["a", "\u200d", "b"]])
    assert windows.num_unreadable == 1
    assert windows.examples.input_ids_T.tolist()[2] == 1
    assert windows.positions_W.tolist() == [1, 2, 3]


def test_a_tag_that_training_lacks_is_named(tmp_path: Path, tiny_encoder_folder: Path) -> None:
    data = conll(tmp_path / "train.conll")
    (tmp_path / "dev.conll").write_text("a\tB-NEW\nb\tI-NEW\n\n", encoding="utf-8")
    with pytest.raises(UserError, match=r"dev.conll:1: the tag 'B-NEW' does not occur"):
        finetune(
            FinetuneConfig(
                model=str(tiny_encoder_folder),
                data=str(data),
                eval=str(tmp_path / "dev.conll"),
                output=str(tmp_path / "run"),
                device="cpu",
            )
        )


def test_rows_to_tag_come_from_a_named_column_and_bad_ones_can_be_left_out(
    tmp_path: Path, tiny_encoder_folder: Path
) -> None:
    run = train(tmp_path, tiny_encoder_folder, steps=2)

    def tagged(name: str, content: str, **table: Any) -> tuple[int, list[list[str]]]:
        (tmp_path / name).write_text(content, encoding="utf-8")
        output = tmp_path / "out.jsonl"
        summary = predict(
            PredictConfig(
                model=str(run),
                data=str(tmp_path / name),
                output=str(output),
                table=TableConfig(**table),
                precision="fp32",
                device="cpu",
                overwrite=True,
            )
        )
        rows = [json.loads(line)["tokens"] for line in output.read_text().splitlines()]
        assert summary.num_rows == len(rows)
        return summary.skipped_rows, rows

    table = "id,body\n1,good film\n2,the ox\n"
    assert tagged("a.csv", table, text_column="body") == (0, [["good", "film"], ["the", "ox"]])
    lines = '{"tokens": ["good", "film"]}\n{"tokens": ["a", " "]}\n{"text": 3}\n{"text": "ox"}\n'
    assert tagged("a.jsonl", lines, bad_rows="skip") == (2, [["good", "film"], ["ox"]])
    with pytest.raises(UserError, match=r"a\.jsonl:2: a token is empty .*--table\.bad_rows skip"):
        tagged("a.jsonl", lines)


def test_files_to_tag_that_are_no_text_and_tags_that_are_no_words(
    tmp_path: Path, tiny_encoder_folder: Path
) -> None:
    run = train(tmp_path, tiny_encoder_folder, steps=2)
    (tmp_path / "a.conll").write_bytes(b"good\nfilm\n\n\xff\n")
    asked = PredictConfig(
        model=str(run),
        data=str(tmp_path / "a.conll"),
        output=str(tmp_path / "out.jsonl"),
        precision="fp32",
        device="cpu",
    )
    with pytest.raises(UserError, match=r"a\.conll:4: .*is not UTF-8"):
        predict(asked)
    skipping = replace(asked, table=TableConfig(bad_rows="skip"))
    assert predict(skipping).skipped_rows == 1
    (row,) = (tmp_path / "out.jsonl").read_text().splitlines()
    assert json.loads(row)["tokens"] == ["good", "film"]
    good = '{"tokens": ["the", "ox"], "tags": ["O", "B-A"]}\n'
    for bad, said in (
        ('{"tokens": ["the", "ox"], "tags": [null, "B-A"]}', "the tag null is neither a word nor"),
        ('{"tokens": ["the", "ox"], "tags": [true, "B-A"]}', "the tag true is neither a word nor"),
        ('{"text": "the ox", "entities": [{"start": 4, "end": 6, "label": "\\ud800"}]}', "half a"),
        ('{"text": "the ox", "entities": null}\n{"text": "ox", "entities": 3}', r":2: the spans"),
    ):
        data = tmp_path / "bad.jsonl"
        data.write_text(bad + "\n" + good * (4 if "tokens" in bad else 0))
        with pytest.raises(UserError, match=said):
            finetune(
                FinetuneConfig(
                    model=str(tiny_encoder_folder),
                    data=str(data),
                    output=str(tmp_path / "none"),
                    task="tokens",
                )
            )


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"overlap_tokens": -5}, "overlap_tokens is -5"),
        ({"max_sequence_tokens": math.inf}, "max_sequence_tokens is inf"),
        ({"max_sequence_tokens": 999}, "max_sequence_tokens is 999, and the model has"),
        ({"task": "questions"}, "task is 'questions', and the model is one of tokens"),
    ],
)
def test_a_damaged_file_beside_the_model_is_named(
    tmp_path: Path, tiny_encoder_folder: Path, change: dict[str, Any], said: str
) -> None:
    run = train(tmp_path, tiny_encoder_folder, lora=LoraConfig(rank=2), steps=1)
    for folder in ("model", "adapter"):
        file = run / folder / "bertsmith.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | change))
    with pytest.raises(UserError, match=rf"model/bertsmith\.json: .*{said}"):
        evaluate(EvaluateConfig(model=str(run), data=str(tmp_path / "train.conll")))
    if "999" not in said:
        merged = MergeConfig(
            model=str(tiny_encoder_folder), adapter=str(run), output=str(tmp_path / "merged")
        )
        with pytest.raises(UserError, match=rf"adapter/bertsmith\.json: .*{said}"):
            merge_folders(merged)
        assert not (tmp_path / "merged").exists()
    inside = MergeConfig(
        model=str(tiny_encoder_folder), adapter=str(run), output=str(run / "adapter" / "x")
    )
    with pytest.raises(UserError, match="lies in --adapter"):
        merge_folders(inside)
