"""Adapters through `finetune`: learned, saved as peft and transformers read them, resumed."""

import os
import signal
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from bertsmith.checkpoint.config import SaveConfig
from bertsmith.errors import UserError
from bertsmith.model.config import LORA_TARGETS, HeadConfig, LoraConfig
from bertsmith.parallel.config import ParallelConfig
from bertsmith.recipes.config import FinetuneConfig
from bertsmith.recipes.finetune import finetune, main
from bertsmith.recipes.texts.run import TextRun
from bertsmith.train.config import GuardConfig, OptimConfig
from bertsmith.train.guard import BadStepError
from bertsmith.train.step import train_step

pytestmark = pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing:FutureWarning")
"""What peft asks of the transformers that it is tested with."""

TEXTS = ["good film the ox", "bad zebra", "the film the film ox good"]
WORDS = ["film", "the", "ox", "zebra"]


@pytest.fixture
def table(tmp_path: Path) -> Path:
    """Texts that are positive where "good" stands in them."""
    file = tmp_path / "train.csv"
    lines = ["text,label"]
    for i in range(160):
        words = [WORDS[i % 4], ("bad", "good")[i % 2], *WORDS[: i % 5]]
        lines.append(f"{' '.join(words)},{('neg', 'pos')[i % 2]}")
    file.write_text("\n".join(lines))
    return file


def settings(model: Path, data: Path, output: Path, **more: Any) -> FinetuneConfig:
    lora: dict[str, Any] = {"rank": 4} | more.pop("lora", {})
    values: dict[str, Any] = {"epochs": 2, "examples_per_step": 16, "precision": "fp32"} | more
    optim = OptimConfig(learning_rate=values.pop("rate", 2e-2), **values.pop("parts", {}))
    return FinetuneConfig(
        model=str(model),
        data=str(data),
        output=str(output),
        optim=optim,
        lora=LoraConfig(**lora),
        **values,
    )


def transformers_logits(folder: Path, tokenizer: Path, **more: Any) -> torch.Tensor:
    model = AutoModelForSequenceClassification.from_pretrained(folder, **more).eval()
    return logits_of(model, tokenizer)


def logits_of(model: Any, tokenizer: Path) -> torch.Tensor:
    inputs = AutoTokenizer.from_pretrained(tokenizer)(TEXTS, padding=True, return_tensors="pt")
    with torch.no_grad():
        logits: torch.Tensor = model(**inputs).logits
    return logits


@pytest.mark.parametrize(
    "targets", [("query", "value"), ("key", "attention_out", "inner"), LORA_TARGETS]
)
def test_adapters_learn_and_both_folders_open_with_equal_scores(
    tmp_path: Path, tiny_encoder_folder: Path, table: Path, targets: tuple[str, ...]
) -> None:
    run = tmp_path / "run"
    config = settings(
        tiny_encoder_folder, table, run, epochs=6, lora={"targets": list(targets), "dropout": 0.1}
    )
    assert finetune(config).metrics["accuracy"] > 0.9
    found = transformers_logits(run / "model", run / "model")
    base = AutoModelForSequenceClassification.from_pretrained(tiny_encoder_folder, num_labels=2)
    adapted = peft.PeftModel.from_pretrained(base, run / "adapter").eval()
    torch.testing.assert_close(logits_of(adapted, run / "model"), found, rtol=1e-5, atol=1e-5)
    num_adapted = sum("lora_A" in name for name, _ in adapted.named_parameters())
    assert num_adapted == 2 * len(targets)

    before, after = (
        load_file(p / "model.safetensors") for p in (tiny_encoder_folder, run / "model")
    )
    parts = {
        "query": "attention.self.query", "key": "attention.self.key",
        "value": "attention.self.value", "attention_out": "attention.output.dense",
        "inner": "intermediate.dense", "inner_out": "output.dense",
    }  # fmt: skip
    changed = {
        f"bert.encoder.layer.{i}.{parts[target]}.weight" for i in range(2) for target in targets
    }
    for name, values in before.items():
        ours = name if name.startswith("bert.") else f"bert.{name}"
        assert after[ours].equal(values) == (ours not in changed), ours


@pytest.mark.parametrize("stop_after", [3, 8])
def test_a_run_that_was_stopped_and_resumed_equals_one_that_was_not(
    tmp_path: Path,
    tiny_encoder_folder: Path,
    table: Path,
    monkeypatch: pytest.MonkeyPatch,
    stop_after: int,
) -> None:
    more = {"lora": {"dropout": 0.1}, "parts": {"layer_decay": 0.8}}
    finetune(settings(tiny_encoder_folder, table, tmp_path / "straight", **more))
    original = TextRun.on_report

    def stop(run: TextRun, report: Any, state: Any, progress: float) -> None:
        original(run, report, state, progress)
        if state.step == stop_after:
            os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(TextRun, "on_report", stop)
    assert main(settings(tiny_encoder_folder, table, tmp_path / "stopped", **more)) == 75
    monkeypatch.setattr(TextRun, "on_report", original)
    finetune(settings(tiny_encoder_folder, table, tmp_path / "stopped", **more, resume=True))
    for file in ("model/model.safetensors", "adapter/adapter_model.safetensors"):
        one, two = (load_file(tmp_path / name / file) for name in ("straight", "stopped"))
        assert one.keys() == two.keys()
        assert all(one[key].equal(two[key]) for key in one), file
    checkpoint = next((tmp_path / "stopped" / "checkpoints").glob("step-*"))
    assert not (checkpoint / "adapter_config.json").exists()
    transformers_logits(checkpoint, checkpoint)


def test_a_bad_step_that_is_gone_back_from_ends_as_one_that_was_passed_over(
    tmp_path: Path, tiny_encoder_folder: Path, table: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ends = []
    for policy in ("rollback", "skip"):
        tried = [0]

        def step(*args: Any, tried: list[int] = tried, **more: Any) -> Any:
            if more["step"] == 7 and not tried[0]:
                tried[0] = 1
                raise BadStepError(step=7, pack=0, what="loss", how="is not finite")
            return train_step(*args, **more)

        config = settings(
            tiny_encoder_folder,
            table,
            tmp_path / policy,
            steps=10,
            patience=None,
            save=SaveConfig(every_steps=3, every_minutes=None, keep_last=9),
            guard=GuardConfig(non_finite=policy),
        )
        with monkeypatch.context() as patch:
            patch.setattr("bertsmith.train.loop.train_step", step)
            finetune(config)
        assert tried == [1]
        ends.append(load_file(tmp_path / policy / "adapter" / "adapter_model.safetensors"))
    assert all(ends[0][key].equal(ends[1][key]) for key in ends[0])


@pytest.mark.parametrize("checkpointing", ["full", "selective", "every:2"])
def test_checkpointing_changes_no_weight(
    tmp_path: Path, tiny_encoder_folder: Path, table: Path, checkpointing: str
) -> None:
    for name in ("none", checkpointing):
        finetune(
            settings(
                tiny_encoder_folder, table, tmp_path / f"run-{name}",
                checkpointing=name, epochs=1, lora={"dropout": 0.1, "targets": list(LORA_TARGETS)},
            )
        )  # fmt: skip
    files = [tmp_path / f"run-{n}" / "model/model.safetensors" for n in ("none", checkpointing)]
    assert files[0].read_bytes() == files[1].read_bytes()


def test_passes_of_any_size_give_the_same_adapter(
    tmp_path: Path, tiny_encoder_folder: Path, table: Path
) -> None:
    """Its dropout goes by a token's place in the step, not in the pass."""
    found = []
    for micro_batch in ("auto", 24):
        run = tmp_path / f"run-{micro_batch}"
        lora = {"dropout": 0.3, "targets": list(LORA_TARGETS)}
        finetune(
            settings(
                tiny_encoder_folder, table, run, micro_batch=micro_batch, epochs=1, lora=lora,
                rate=1e-3,
            )
        )  # fmt: skip
        found.append(load_file(run / "adapter" / "adapter_model.safetensors"))
    for name, values in found[0].items():
        torch.testing.assert_close(found[1][name], values, rtol=1e-4, atol=1e-5)


def test_a_base_that_has_changed_is_refused_in_resuming(
    tmp_path: Path, tiny_encoder_folder: Path, table: Path
) -> None:
    finetune(settings(tiny_encoder_folder, table, tmp_path / "run", epochs=1))
    file = tiny_encoder_folder / "model.safetensors"
    tensors = load_file(file)
    tensors["bert.encoder.layer.0.intermediate.dense.weight"] += 1.0
    save_file(tensors, file)
    with pytest.raises(UserError, match=r"trained on other weights than .*encoder holds now"):
        finetune(settings(tiny_encoder_folder, table, tmp_path / "run", epochs=1, resume=True))
    with pytest.raises(UserError, match=r"lora\.rank was 4, is 0"):
        finetune(
            settings(
                tiny_encoder_folder, table, tmp_path / "run", epochs=1, resume=True,
                lora={"rank": 0},
            )
        )  # fmt: skip


def test_a_rank_beyond_the_width_is_refused(
    tmp_path: Path, tiny_encoder_folder: Path, table: Path
) -> None:
    config = settings(tiny_encoder_folder, table, tmp_path / "run", lora={"rank": 17})
    with pytest.raises(UserError, match=r"--lora.rank 17: is more than the model's width 16"):
        finetune(config)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"lora": {"rank": -1}}, "rank is -1; it must be at least 1, or 0"),
        ({"lora": {"rank": 0, "alpha": 8.0}}, "rank is 0, so there are no adapters for the other"),
        ({"lora": {"alpha": 0.0}}, "alpha is 0.0; it must be over 0"),
        ({"lora": {"dropout": 1.0}}, "dropout is 1.0"),
        ({"lora": {"targets": ["querry"]}}, "targets names 'querry'; give some of query, key"),
        ({"lora": {"targets": []}}, "targets is empty"),
        ({"lora": {"targets": ["key", "key"]}}, "targets names one twice"),
        ({"freeze": "0"}, "freeze is '0', and with lora.rank 4 the whole encoder is frozen"),
        ({"head": HeadConfig(norm="layer")}, "head.norm is layer"),
        ({"parallel": ParallelConfig(strategy="fsdp")}, "parallel.strategy is fsdp"),
    ],
)
def test_what_does_not_go_with_adapters_is_refused_at_once(
    change: dict[str, Any], says: str
) -> None:
    with pytest.raises(ValueError, match=says):
        settings(Path("m"), Path("d"), Path("o"), **change)
