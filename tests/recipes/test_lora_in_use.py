"""`evaluate`, `predict` and `merge` read adapters of ours and of peft, and refuse what is wrong."""

import csv
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from bertsmith import cli
from bertsmith.errors import UserError
from bertsmith.model.config import LoraConfig
from bertsmith.recipes.config import EvaluateConfig, FinetuneConfig, MergeConfig, PredictConfig
from bertsmith.recipes.evaluate import evaluate
from bertsmith.recipes.finetune import finetune
from bertsmith.recipes.merge import merge_folders
from bertsmith.recipes.predict import predict
from bertsmith.train.config import OptimConfig

pytestmark = pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing:FutureWarning")

MakeClassifier = Callable[..., Path]
TEXTS = ["good film the ox", "bad zebra", "the film the film ox good", "bad the ox"]


def write_table(file: Path, count: int) -> Path:
    lines = ["text,label"]
    lines += [f"{TEXTS[i % 4]},{('pos', 'neg')[i % 2]}" for i in range(count)]
    file.write_text("\n".join(lines))
    return file


def train(base: Path, output: Path, table: Path, *, seed: int = 0) -> Path:
    finetune(
        FinetuneConfig(
            model=str(base), data=str(table), output=str(output), epochs=1, precision="fp32",
            lora=LoraConfig(rank=2), optim=OptimConfig(learning_rate=2e-2), seed=seed,
        )
    )  # fmt: skip
    return output


def of_peft(base: Path, folder: Path, *, seed: int = 0, **more: Any) -> Any:
    """An adapter with random numbers that peft has made and saved; and the model."""
    torch.manual_seed(seed)
    model = AutoModelForSequenceClassification.from_pretrained(base, num_labels=2)
    values: dict[str, Any] = {"task_type": "SEQ_CLS", "r": 3, "lora_alpha": 5} | more
    values.setdefault("target_modules", ["query", "dense"])
    adapted = peft.get_peft_model(model, peft.LoraConfig(**values))
    for parameter in adapted.parameters():
        if parameter.requires_grad:
            torch.nn.init.normal_(parameter, std=0.3)
    adapted.save_pretrained(folder)
    return adapted.eval()


def predicted(tmp_path: Path, base: Path, *adapters: Path) -> list[dict[str, str]]:
    table = tmp_path / "texts.txt"
    table.write_text("\n".join(TEXTS))
    output = tmp_path / "out.csv"
    predict(
        PredictConfig(
            model=str(base), data=str(table), output=str(output), precision="fp32",
            adapter=[str(adapter) for adapter in adapters], overwrite=True,
        )
    )  # fmt: skip
    with output.open(newline="") as file:
        return list(csv.DictReader(file))


def expected(model: Any, tokenizer: Path) -> torch.Tensor:
    inputs = AutoTokenizer.from_pretrained(tokenizer)(TEXTS, padding=True, return_tensors="pt")
    with torch.no_grad():
        chances: torch.Tensor = model(**inputs).logits.softmax(1)
    return chances


QUERY_AND_DENSE = r"(.*\.)?layer\.\d+\..*(query|dense)"


@pytest.mark.parametrize("targets", [QUERY_AND_DENSE, "all-linear", ["query", "value"]])
def test_an_adapter_that_peft_wrote_gives_its_probabilities(
    tmp_path: Path, make_classifier: MakeClassifier, targets: Any
) -> None:
    base = make_classifier(labels=("neg", "pos"))
    model = of_peft(base, tmp_path / "theirs", target_modules=targets)
    rows = predicted(tmp_path, base, tmp_path / "theirs")
    found = [[float(r["probability_neg"]), float(r["probability_pos"])] for r in rows]
    torch.testing.assert_close(torch.tensor(found), expected(model, base), rtol=0, atol=2e-6)
    out = merge_folders(
        MergeConfig(
            model=str(base), adapter=str(tmp_path / "theirs"), output=str(tmp_path / "merged")
        )
    )
    merged = AutoModelForSequenceClassification.from_pretrained(out).eval()
    assert merged.config.id2label == {0: "neg", 1: "pos"}
    torch.testing.assert_close(expected(merged, out), expected(model, base), rtol=0, atol=2e-6)


def test_an_adapter_of_some_layers_and_an_encoder_that_brings_its_pooler(
    tmp_path: Path, tiny_encoder_folder: Path
) -> None:
    more: dict[str, Any] = {"layers_to_transform": [1], "target_modules": ["query", "key"]}
    theirs = tmp_path / "theirs"
    model = of_peft(tiny_encoder_folder, theirs, modules_to_save=["classifier", "pooler"], **more)
    rows = predicted(tmp_path, tiny_encoder_folder, theirs)
    found = [[float(r["probability_LABEL_0"]), float(r["probability_LABEL_1"])] for r in rows]
    torch.testing.assert_close(
        torch.tensor(found), expected(model, tiny_encoder_folder), rtol=0, atol=2e-6
    )
    of_peft(tiny_encoder_folder, tmp_path / "headless", **more)
    with pytest.raises(UserError, match=r"headless: brings no pooler along and .*encoder has none"):
        predicted(tmp_path, tiny_encoder_folder, tmp_path / "headless")


def test_several_adapters_over_one_base_have_columns_of_their_own(
    tmp_path: Path, tiny_encoder_folder: Path
) -> None:
    table = write_table(tmp_path / "train.csv", 64)
    a = train(tiny_encoder_folder, tmp_path / "a", table)
    b = train(tiny_encoder_folder, tmp_path / "b", table, seed=1)
    both = predicted(tmp_path, tiny_encoder_folder, a / "adapter", b)
    for name, folder in (("a", a), ("b", b)):
        alone = predicted(tmp_path, folder / "model")
        for row, wanted in zip(both, alone, strict=True):
            assert row[f"prediction_{name}"] == wanted["prediction"]
            for label in ("neg", "pos"):
                assert float(row[f"probability_{name}_{label}"]) == pytest.approx(
                    float(wanted[f"probability_{label}"]), abs=2e-6
                )
    assert both[0]["probability_a_neg"] != both[0]["probability_b_neg"]
    scores = [
        evaluate(
            EvaluateConfig(model=str(model), data=str(table), adapter=adapter, precision="fp32")
        ).metrics.by_name()["loss"]
        for model, adapter in ((tiny_encoder_folder, str(a)), (a / "model", None))
    ]
    assert scores[0] == pytest.approx(scores[1], rel=1e-5)
    with pytest.raises(UserError, match="two are named 'a', after their folders"):
        predicted(tmp_path, tiny_encoder_folder, a, a / "adapter")


def test_an_adapter_for_another_base_is_refused(
    tmp_path: Path, tiny_encoder_folder: Path, make_classifier: MakeClassifier
) -> None:
    run = train(tiny_encoder_folder, tmp_path / "run", write_table(tmp_path / "train.csv", 64))
    other = make_classifier(labels=("neg", "pos"), seed=7)
    says = r"adapter: is an adapter for another base than .*classifier-7; name .*/encoder$"
    with pytest.raises(UserError, match=says):
        predicted(tmp_path, other, run)
    wide = of_peft(other, tmp_path / "wide")
    del wide
    file = tmp_path / "wide" / "adapter_model.safetensors"
    tensors = load_file(file)
    name = next(key for key in tensors if key.endswith("query.lora_B.weight"))
    save_file(tensors | {name: torch.zeros(24, 3)}, file)
    with pytest.raises(UserError, match="wide: is an adapter for another base"):
        predicted(tmp_path, other, tmp_path / "wide")


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"use_dora": True}, "use_dora is true; bertsmith reads LoRA adapters with use_dora False"),
        ({"use_rslora": True}, "use_rslora is true"),
        ({"bias": "lora_only"}, 'bias is "lora_only"'),
        ({"rank_pattern": {"query": 2}}, 'rank_pattern is {"query": 2}'),
        ({"alpha_pattern": {"query": 2}}, "alpha_pattern is"),
        ({"fan_in_fan_out": True}, "fan_in_fan_out is true"),
        ({"peft_type": "IA3"}, 'peft_type is "IA3"'),
        ({"init_lora_weights": "pissa"}, 'init_lora_weights is "pissa"'),
        ({"r": 4}, "says rank 4 and adapter_model.safetensors has others"),
        ({"r": "many"}, "is no LoRA config"),
    ],
)
def test_what_an_adapter_does_besides_is_refused_by_its_key(
    tmp_path: Path, make_classifier: MakeClassifier, change: dict[str, Any], says: str
) -> None:
    base = make_classifier(labels=("neg", "pos"))
    of_peft(base, tmp_path / "theirs")
    file = tmp_path / "theirs" / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | change))
    with pytest.raises(UserError, match=says):
        predicted(tmp_path, base, tmp_path / "theirs")


def test_an_adapter_for_tags_beside_one_for_texts_is_refused(
    tmp_path: Path, tiny_encoder_folder: Path
) -> None:
    texts, tags = tmp_path / "texts", tmp_path / "tags"
    of_peft(tiny_encoder_folder, texts, modules_to_save=["classifier", "pooler"])
    of_peft(tiny_encoder_folder, tags, task_type="TOKEN_CLS", target_modules=["query"])
    with pytest.raises(UserError, match="tags: is for a task of another form"):
        predicted(tmp_path, tiny_encoder_folder, texts, tags)


def test_folders_that_are_no_adapters_are_named(
    tmp_path: Path, make_classifier: MakeClassifier
) -> None:
    base = make_classifier(labels=("neg", "pos"))
    with pytest.raises(UserError, match=r"classifier-0: is no adapter, it holds no adapter_config"):
        predicted(tmp_path, base, base)
    of_peft(base, tmp_path / "theirs", target_modules=["query", "word_embeddings"])
    with pytest.raises(UserError, match=r"no place for: .*word_embeddings.lora_embedding_A"):
        predicted(tmp_path, base, tmp_path / "theirs")
    (tmp_path / "theirs" / "adapter_model.safetensors").unlink()
    with pytest.raises(UserError, match="pickled weights are not read"):
        predicted(tmp_path, base, tmp_path / "theirs")


def test_merge_replaces_no_folder_unasked(
    tmp_path: Path, make_classifier: MakeClassifier, capsys: pytest.CaptureFixture[str]
) -> None:
    base = make_classifier(labels=("neg", "pos"))
    of_peft(base, tmp_path / "theirs")
    argv = ["merge", "--model", str(base), "--adapter", str(tmp_path / "theirs"), "--output"]
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("do not lose me")
    assert cli.run([*argv, str(tmp_path / "mine")]) == 2
    assert "holds files that are no model" in capsys.readouterr().err
    assert cli.run([*argv, str(base), "--overwrite"]) == 2
    assert "holds --model" in capsys.readouterr().err
    assert cli.run([*argv, str(tmp_path / "out")]) == 0
    assert capsys.readouterr().out.strip() == str(tmp_path / "out")
    assert cli.run([*argv, str(tmp_path / "out")]) == 2
    assert "holds a model" in capsys.readouterr().err
    assert cli.run([*argv, str(tmp_path / "out"), "--overwrite"]) == 0
