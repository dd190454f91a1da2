"""Fine-tuning, evaluation and prediction of answers, from files to what is written."""

import csv
import json
import math
import os
import random
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from bertsmith.cli import run as command
from bertsmith.data.questions.question import GoldAnswer, Question
from bertsmith.data.questions.windows import QuestionTokenizer
from bertsmith.data.tokenizer import load_tokenizer
from bertsmith.data.windows import WindowConfig
from bertsmith.errors import UserError
from bertsmith.metrics.answers import score_answer
from bertsmith.model.config import HeadConfig, LoraConfig
from bertsmith.recipes.config import EvaluateConfig, FinetuneConfig, MergeConfig, PredictConfig
from bertsmith.recipes.evaluate import evaluate
from bertsmith.recipes.finetune import finetune, main
from bertsmith.recipes.merge import merge_folders
from bertsmith.recipes.predict import predict
from bertsmith.recipes.questions.run import QuestionRun
from bertsmith.tasks.config import AnswerConfig, DecideConfig, LossConfig
from bertsmith.train.config import OptimConfig

WORDS = ("good", "bad", "film", "the", *"abcdefghij")
LONGEST = 32


def squad(
    path: Path, *, num: int = 12, words: int = 10, impossible: bool = False, seed: int = 0
) -> Path:
    """Contexts of random words, and a question on two of each one's."""
    draw = random.Random(seed)
    paragraphs = []
    for i in range(num):
        said = [draw.choice(WORDS).title() for _ in range(words)]
        context = " ".join(said)
        qas: list[dict[str, Any]] = []
        for k in range(2):
            at = draw.randrange(words)
            answer = " ".join(said[at : at + 1 + k])
            start = len(" ".join(said[:at])) + (at > 0)
            gold = {"text": answer, "answer_start": start}
            qas.append({"id": f"{i}-{k}", "question": f"the {said[at]}?", "answers": [gold]})
        if impossible:
            more = {"id": f"{i}-x", "question": "z z?", "answers": [], "is_impossible": True}
            qas = [{**one, "is_impossible": False} for one in qas] + [more]
        paragraphs.append({"context": context, "qas": qas})
    path.write_text(json.dumps({"version": "x", "data": [{"paragraphs": paragraphs}]}))
    return path


def settings(model: Path, data: Path, output: Path, **more: Any) -> FinetuneConfig:
    values: dict[str, Any] = {
        "steps": 6,
        "examples_per_step": 8,
        "eval_every_steps": 3,
        "patience": None,
        "precision": "fp32",
        "device": "cpu",
        "optim": OptimConfig(learning_rate=5e-3, warmup_share=0.0),
    }
    return FinetuneConfig(model=str(model), data=str(data), output=str(output), **(values | more))


def answers_by_hand(
    run: Path, data: Path, *, overlap: int, most: int
) -> dict[str, tuple[str, float, float]]:
    """The best answer to each question, its score and that of none, by transformers' model."""
    model = transformers.AutoModelForQuestionAnswering.from_pretrained(run / "model").eval()
    tokenizer = load_tokenizer(run / "model").tokenizer
    found = {}
    for paragraph in json.loads(data.read_text())["data"][0]["paragraphs"]:
        context = paragraph["context"]
        pieces = tokenizer.encode(context, add_special_tokens=False)
        for qa in paragraph["qas"]:
            asked = tokenizer.encode(qa["question"], add_special_tokens=False).ids
            room = LONGEST - 3 - len(asked)
            last = len(pieces) - room
            starts = [0] if last <= 0 else [*range(0, last, room - overlap), last]
            best, nothing = (-math.inf, (0, 0)), math.inf
            for start in starts:
                inside = pieces.ids[start : start + room]
                ids = [2, *asked, 3, *inside, 3]
                types = [0] * (len(asked) + 2) + [1] * (len(inside) + 1)
                with torch.no_grad():
                    said = model(
                        input_ids=torch.tensor([ids]), token_type_ids=torch.tensor([types])
                    )
                first, final = said.start_logits[0].double(), said.end_logits[0].double()
                nothing = min(nothing, float(first[0] + final[0]))
                before = len(asked) + 2
                for i in range(len(inside)):
                    for j in range(i, min(i + most, len(inside))):
                        score = float(first[before + i] + final[before + j])
                        if score > best[0]:
                            at = (pieces.offsets[start + i][0], pieces.offsets[start + j][1])
                            best = (score, at)
            found[qa["id"]] = (context[slice(*best[1])], best[0], nothing)
    return found


@pytest.mark.parametrize(("words", "impossible"), [(6, False), (40, True)])
def test_from_files_to_answers_as_transformers_and_every_span_give_them(
    tmp_path: Path, tiny_encoder_folder: Path, words: int, impossible: bool
) -> None:
    data = squad(tmp_path / "train.json", words=words, impossible=impossible)
    dev = squad(tmp_path / "dev.json", words=words, impossible=impossible, num=5, seed=1)
    run = tmp_path / "run"
    more = {"eval": str(dev), "answer": AnswerConfig(max_tokens=4)}
    summary = finetune(settings(tiny_encoder_folder, data, run, **more))
    assert summary.status == "completed"
    assert summary.train_examples == (36 if impossible else 24)
    asked = EvaluateConfig(
        model=str(run),
        data=str(dev),
        bootstrap=5,
        errors=str(tmp_path / "errors.csv"),
        precision="fp32",
        device="cpu",
    )
    found = evaluate(asked)
    assert found.metrics.by_name() == pytest.approx(summary.metrics, abs=1e-6)
    assert set(found.intervals) == set(summary.metrics)
    about = json.loads((run / "model" / "bertsmith.json").read_text())
    assert about["max_answer_tokens"] == 4
    threshold = about["null_threshold"]
    assert (threshold is not None) == impossible

    hand = answers_by_hand(run, dev, overlap=about["overlap_tokens"], most=4)
    options: dict[str, Any] = {"model": str(run), "data": str(dev), "precision": "fp32"}
    predict(PredictConfig(**options, output=str(tmp_path / "out.jsonl"), device="cpu"))
    predict(PredictConfig(**options, output=str(tmp_path / "out.json"), device="cpu"))
    rows = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    by_id = json.loads((tmp_path / "out.json").read_text())
    assert [row["id"] for row in rows] == list(hand) == list(by_id)
    golds = {}
    for paragraph in json.loads(dev.read_text())["data"][0]["paragraphs"]:
        for qa in paragraph["qas"]:
            golds[qa["id"]] = [one["text"] for one in qa["answers"]]
    f1s, exact = [], []
    for row in rows:
        text, best, nothing = hand[row["id"]]
        says_nothing = threshold is not None and nothing - best > threshold
        assert row["answer"] == by_id[row["id"]] == ("" if says_nothing else text)
        assert ("no_answer" in row) == impossible
        assert 0.0 <= row["score"] <= 1.0
        if not says_nothing:
            assert row["end"] - row["start"] == len(text)
        score = score_answer(row["answer"], golds[row["id"]])
        f1s.append(score.f1)
        exact.append(score.exact_match)
    assert summary.metrics["f1"] == pytest.approx(sum(f1s) / len(f1s))
    assert summary.metrics["exact_match"] == pytest.approx(sum(exact) / len(exact))
    with (tmp_path / "errors.csv").open(newline="") as file:
        wrong = list(csv.DictReader(file))
    assert len(wrong) == exact.count(0.0)
    assert list(wrong[0]) == ["id", "question", "prediction", "answers", "f1", "context"]
    assert [float(row["f1"]) for row in wrong] == sorted(float(row["f1"]) for row in wrong)


def question(context: str, answer: str, *, asked: str = "the film") -> Question:
    gold = GoldAnswer(answer, context.index(answer))
    return Question(id="1", place="here", question=asked, context=context, answers=(gold,))


def test_an_answer_where_windows_overlap_is_learned_in_both_and_cut_in_none(
    tiny_tokenizer_folder: Path,
) -> None:
    encoder = QuestionTokenizer(
        load_tokenizer(tiny_tokenizer_folder), max_sequence_tokens=13, overlap_tokens=3
    )
    # Two tokens of the question leave room for 8: windows at 0, 5 and 10, the last one at the end.
    context = "a b c d e f g h i j k l m n o p q r"
    for answer, places in {
        "a b": [(4, 5), (0, 0), (0, 0)],
        "f g h": [(9, 11), (4, 6), (0, 0)],
        "e f": [(8, 9), (0, 0), (0, 0)],
        "h i": [(0, 0), (6, 7), (0, 0)],
        "k l": [(0, 0), (9, 10), (4, 5)],
        "r": [(0, 0), (0, 0), (11, 11)],
        "c d e f g h i j k": [(0, 0), (0, 0), (0, 0)],
    }.items():
        windows = encoder.windows(encoder.read([question(context, answer)]))
        assert windows.examples.lengths_N.tolist() == [13, 13, 13]
        assert windows.pieces_R.tolist() == [0, 5, 10]
        assert [tuple(place) for place in windows.places_R2.tolist()] == places
        for row, (first, last) in enumerate(places):
            ids = windows.examples.pack([row]).input_ids_T.tolist()
            segments = windows.examples.pack([row]).segment_ids_T.tolist()
            assert (ids[0], ids[3], ids[-1]) == (2, 3, 3)
            assert segments == [0] * 4 + [1] * 9
            if first:
                shift = int(windows.pieces_R[row]) - 4
                start, end = windows.bounds(0, first + shift, last + shift)
                assert context[start:end] == answer


def test_an_answer_keeps_its_case_and_accents_and_part_of_a_word_takes_its_tokens(
    tiny_tokenizer_folder: Path,
) -> None:
    encoder = QuestionTokenizer(
        load_tokenizer(tiny_tokenizer_folder), max_sequence_tokens=32, overlap_tokens=2
    )
    context = "A Gööd FILM, thé bad."
    windows = encoder.windows(encoder.read([question(context, "Gööd FILM")]))
    first, last = (int(place) - 4 for place in windows.places_R2[0])
    assert context[slice(*windows.bounds(0, first, last))] == "Gööd FILM"
    inside = encoder.windows(encoder.read([question(context, "ba")]))
    first, last = (int(place) - 4 for place in inside.places_R2[0])
    assert context[slice(*inside.bounds(0, first, last))] == "bad"


def test_a_question_that_is_too_long_loses_its_end_and_is_counted(
    tiny_tokenizer_folder: Path,
) -> None:
    encoder = QuestionTokenizer(
        load_tokenizer(tiny_tokenizer_folder), max_sequence_tokens=13, overlap_tokens=1
    )
    windows = encoder.windows(encoder.read([question("a b", "a", asked="a b c d e f g")]))
    assert windows.num_cut == 1
    assert windows.examples.input_ids_T.tolist()[:7] == [2, 5, 6, 7, 8, 9, 3]


def test_an_answer_of_which_the_tokenizer_leaves_nothing_is_not_learned_from(
    tmp_path: Path, tiny_encoder_folder: Path
) -> None:
    data = tmp_path / "train.jsonl"
    rows = [
        {"question": "a", "context": "b \u200d c", "answers": [{"text": t, "answer_start": s}]}
        for t, s in (("b", 0), ("\u200d", 2))
    ]
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = settings(tiny_encoder_folder, data, tmp_path / "run", eval=str(data), steps=1)
    assert finetune(config).train_examples == 1
    log = (tmp_path / "run" / "log.txt").read_text()
    assert "of the answers to 1 questions the tokenizer leaves nothing" in log


@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing:FutureWarning")
def test_adapters_are_written_for_peft_and_merged_into_the_model(
    tmp_path: Path, tiny_encoder_folder: Path
) -> None:
    peft = pytest.importorskip("peft")
    data, run = squad(tmp_path / "train.json"), tmp_path / "run"
    finetune(settings(tiny_encoder_folder, data, run, lora=LoraConfig(rank=2), eval=str(data)))
    about = json.loads((run / "adapter" / "adapter_config.json").read_text())
    assert (about["task_type"], about["modules_to_save"]) == ("QUESTION_ANS", ["qa_outputs"])
    kind = transformers.AutoModelForQuestionAnswering
    whole = kind.from_pretrained(run / "model").eval()
    base = kind.from_pretrained(tiny_encoder_folder)
    adapted = peft.PeftModel.from_pretrained(base, str(run / "adapter")).eval()
    ids = torch.tensor([[2, 7, 40, 3, 12, 9, 3]])
    with torch.no_grad():
        ours, theirs = whole(input_ids=ids), adapted(input_ids=ids)
    torch.testing.assert_close(theirs.start_logits, ours.start_logits, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(theirs.end_logits, ours.end_logits, atol=1e-5, rtol=1e-5)
    # The base with the adapter is what model/ is, for every verb.
    merged = merge_folders(
        MergeConfig(
            model=str(tiny_encoder_folder), adapter=str(run), output=str(tmp_path / "merged")
        )
    )
    found = []
    for number, (model, adapter) in enumerate(
        [(run, None), (merged, None), (tiny_encoder_folder, str(run))]
    ):
        scores = evaluate(
            EvaluateConfig(model=str(model), adapter=adapter, data=str(data), precision="fp32")
        ).metrics.by_name()
        output = tmp_path / f"out{number}.json"
        predict(
            PredictConfig(
                model=str(model),
                adapter=[] if adapter is None else [adapter],
                data=str(data),
                output=str(output),
                precision="fp32",
            )
        )
        found.append((scores, json.loads(output.read_text())))
    for scores, answers in found[1:]:
        assert scores == pytest.approx(found[0][0], abs=1e-5)
        assert answers == found[0][1]


@pytest.mark.parametrize("lora", [LoraConfig(), LoraConfig(rank=2)])
def test_a_run_that_was_stopped_and_resumed_equals_one_that_was_not(
    tmp_path: Path,
    tiny_encoder_folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    lora: LoraConfig,
) -> None:
    data = squad(tmp_path / "train.json", words=30, impossible=True)

    def config(name: str, **more: Any) -> FinetuneConfig:
        return settings(
            tiny_encoder_folder, data, tmp_path / name, lora=lora, holdout_share=0.3, **more
        )

    finetune(config("straight"))
    original = QuestionRun.on_report

    def stop(run: QuestionRun, report: Any, state: Any, progress: float) -> None:
        original(run, report, state, progress)
        if state.step == 4:
            os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(QuestionRun, "on_report", stop)
    assert main(config("stopped")) == 75
    monkeypatch.setattr(QuestionRun, "on_report", original)
    finetune(config("stopped", resume=True))
    one, two = (
        load_file(tmp_path / n / "model" / "model.safetensors") for n in ("straight", "stopped")
    )
    assert all(one[key].equal(two[key]) for key in one)
    abouts = [
        json.loads((tmp_path / n / "model" / "bertsmith.json").read_text())
        for n in ("straight", "stopped")
    ]
    assert abouts[0] == abouts[1]


def test_a_folder_with_such_a_head_goes_on_from_it(
    tmp_path: Path, tiny_encoder_folder: Path
) -> None:
    data = squad(tmp_path / "train.json")
    finetune(settings(tiny_encoder_folder, data, tmp_path / "one", eval=str(data)))
    again = settings(
        tmp_path / "one" / "model",
        data,
        tmp_path / "two",
        eval=str(data),
        steps=1,
        optim=OptimConfig(learning_rate=0.0, warmup_share=0.0),
    )
    finetune(again)
    one, two = (
        load_file(tmp_path / n / "model" / "model.safetensors")["qa_outputs.weight"]
        for n in ("one", "two")
    )
    assert one.equal(two)


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"head": HeadConfig(norm="layer")}, "--head.norm: is for heads on whole texts"),
        ({"loss": LossConfig(focal_gamma=2.0)}, "--loss: is for labels of whole texts"),
        ({"decide": DecideConfig(calibrate=True)}, "--decide: is for labels of whole texts"),
        ({"window": WindowConfig(merge="max")}, "--window.merge: is for labels of whole texts"),
        ({"window": WindowConfig(overlap_tokens=9)}, "--window.overlap_tokens 9 is more than half"),
        ({"monitor": "accuracy"}, "these questions have no such metric; take one of f1, exact"),
        ({"monitor": "no_answer_accuracy"}, "these questions have no such metric"),
        ({"max_sequence_tokens": 4}, "--max_sequence_tokens 4: must be from 5 to 32"),
        ({"task": "tokens"}, "holds no tagged words"),
    ],
)
def test_what_does_not_go_with_questions_is_refused(
    tmp_path: Path, tiny_encoder_folder: Path, more: dict[str, Any], said: str
) -> None:
    data = squad(tmp_path / "train.json")
    with pytest.raises(UserError, match=said):
        finetune(settings(tiny_encoder_folder, data, tmp_path / "run", **more))


def test_questions_that_all_have_no_answer_teach_nothing(
    tmp_path: Path, tiny_encoder_folder: Path
) -> None:
    row = {"question": "a", "context": "b", "answers": []}
    (tmp_path / "t.jsonl").write_text(json.dumps(row) + "\n")
    with pytest.raises(UserError, match="no question has an answer; there is nothing to learn"):
        finetune(settings(tiny_encoder_folder, tmp_path / "t.jsonl", tmp_path / "run"))


def test_the_longest_answer_is_said_of_questions_alone(
    tmp_path: Path, tiny_encoder_folder: Path
) -> None:
    (tmp_path / "t.csv").write_text("text,label\na,x\nb,y\n")
    config = settings(tiny_encoder_folder, tmp_path / "t.csv", tmp_path / "run")
    with pytest.raises(UserError, match="--answer: is for questions on texts, which"):
        finetune(replace(config, answer=AnswerConfig(max_tokens=4)))


def test_questions_on_one_context_cannot_be_held_out_from_each_other(
    tmp_path: Path, tiny_encoder_folder: Path
) -> None:
    data = squad(tmp_path / "train.json", num=1)
    with pytest.raises(UserError, match="all are on a single context"):
        finetune(settings(tiny_encoder_folder, data, tmp_path / "run"))


def test_the_commands_tell_mistakes_in_a_line(
    tmp_path: Path, tiny_encoder_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data, run = squad(tmp_path / "train.json"), tmp_path / "run"
    words = ["--steps", "2", "--device", "cpu", "--precision", "fp32"]
    model = ["--model", str(tiny_encoder_folder), "--data", str(data)]
    assert command(["finetune", *model, "--output", str(run), *words]) == 0
    assert "task: questions, because" in capsys.readouterr().err
    (tmp_path / "bad.json").write_text('{"data": [{"paragraphs": [')
    for argv, said in (
        (["evaluate", "--data", str(tmp_path / "bad.json")], "bad.json:1:27: not valid JSON"),
        (["predict", "--data", "-", "--output", str(tmp_path / "o.json")], "come from a file"),
        (["predict", "--data", str(data), "--output", str(tmp_path / "o.csv")], ".jsonl or .json"),
        (
            ["evaluate", "--data", str(data), "--table.text_column", "x"],
            "--table: of a file of que",
        ),
    ):
        assert command([*argv, "--model", str(run)]) == 2
        error = capsys.readouterr().err
        assert said in error
        assert error.count("\n") == 1


def test_broken_weights_and_columns_that_differ_in_case_alone(
    tmp_path: Path, tiny_encoder_folder: Path
) -> None:
    data, run = squad(tmp_path / "train.json"), tmp_path / "run"
    finetune(settings(tiny_encoder_folder, data, run, steps=1, eval=str(data)))
    weights = load_file(run / "model" / "model.safetensors")
    huge = {name: w * 1e30 if name.endswith("weight") else w for name, w in weights.items()}
    save_file(huge, run / "model" / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(UserError, match="gives scores that are not finite"):
        evaluate(EvaluateConfig(model=str(run), data=str(data), precision="fp32"))
    twice = tmp_path / "twice.jsonl"
    twice.write_text('{"question": "a", "Question": "b", "context": "c", "answers": []}\n')
    with pytest.raises(UserError, match="several columns could be 'question'"):
        finetune(settings(tiny_encoder_folder, twice, tmp_path / "none"))


def test_no_answer_is_longer_than_a_window(tmp_path: Path, tiny_encoder_folder: Path) -> None:
    """A limit beyond any window costs nothing, and says what the longest window's would."""
    data = squad(tmp_path / "train.json")
    found = []
    for most in (LONGEST, 10**9):
        run = tmp_path / f"run{most}"
        answer = AnswerConfig(max_tokens=most)
        finetune(settings(tiny_encoder_folder, data, run, steps=1, eval=str(data), answer=answer))
        scores = evaluate(EvaluateConfig(model=str(run), data=str(data), precision="fp32"))
        found.append(scores.metrics.by_name())
    assert found[0] == found[1]
