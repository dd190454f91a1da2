"""`bertsmith pretrain`: learns, leaves a whole folder, resumes exactly, refuses what cannot be."""

import dataclasses
import hashlib
import json
import math
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import torch
import transformers
import yaml

from bertsmith.checkpoint.commit import NotWrittenError
from bertsmith.checkpoint.config import SaveConfig
from bertsmith.checkpoint.folder import read_state, write_checkpoint
from bertsmith.data.config import MaskingConfig, PackingConfig
from bertsmith.data.tokenizer import bert_tokenizer, write_tokenizer
from bertsmith.errors import UserError
from bertsmith.hf import load_masked_lm, save_model
from bertsmith.model.config import EncoderConfig
from bertsmith.model.heads import MaskedLM, initialize
from bertsmith.parallel.config import ParallelConfig
from bertsmith.recipes import pretrain as module
from bertsmith.recipes.config import PretrainConfig
from bertsmith.recipes.pretrain import main, pretrain
from bertsmith.recipes.pretrain_run import PretrainRun
from bertsmith.report.run_lock import hold_run_lock
from bertsmith.train.config import EvalConfig, GuardConfig, OptimConfig
from bertsmith.train.guard import BadStepError
from bertsmith.train.step import StepReport, train_step
from bertsmith.train.validation import MaskedScores

SPECIALS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
WORDS = [f"w{i}" for i in range(45)]
SHAPE = {
    "model_type": "bert",
    "vocab_size": 50,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 32,
    "max_position_embeddings": 32,
}


def write_prepared(folder: Path, *, words: list[str] = WORDS, valid_documents: int = 12) -> Path:
    """A folder as data/shards.py describes it: each document has three words of its own."""
    rng = np.random.default_rng(0)
    (folder / "tokenizer").mkdir(parents=True)
    tokenizer = bert_tokenizer({t: i for i, t in enumerate([*SPECIALS, *words])}, lowercase=True)
    write_tokenizer(folder / "tokenizer", tokenizer)
    files: dict[str, dict[str, Any]] = {}
    for split, number in (("train", 120), ("valid", valid_documents)):
        documents = [
            5 + 3 * rng.integers(15) + rng.integers(3, size=n) for n in rng.integers(4, 40, number)
        ]
        tokens = np.concatenate([np.zeros(0, np.int64), *documents]).astype("<u2")
        offsets = np.cumsum([0, *(len(d) for d in documents)]).astype("<i8")
        places = np.stack([np.zeros(number), np.arange(1, number + 1)], 1).astype("<u4")
        words_bits = np.packbits(np.ones(len(tokens), np.uint8), bitorder="little")
        (folder / split).mkdir()
        kinds = {"tokens": tokens, "offsets": offsets, "words": words_bits, "places": places}
        for kind, values in kinds.items():
            content = values.tobytes()
            (folder / split / f"{kind}-00000.bin").write_bytes(content)
            digest = hashlib.sha256(content).hexdigest()
            files[f"{split}/{kind}-00000.bin"] = {"bytes": len(content), "sha256": digest}
    manifest = {
        "schema": 1,
        "tokenizer": {"fingerprint": tokenizer.vocab.fingerprint},
        "token_dtype": "uint16",
        "words": {"version": 1, "chinese": "characters"},
        "shards": {"train": 1, "valid": 1},
        "inputs": [{"path": "text.txt"}],
        "files": files,
    }
    (folder / "manifest.json").write_text(json.dumps(manifest))
    return folder


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_prepared(tmp_path_factory.mktemp("prepared") / "data")


@pytest.fixture
def config(tmp_path: Path, prepared: Path) -> PretrainConfig:
    """Twelve steps of a tiny model."""
    (tmp_path / "shape.json").write_text(json.dumps(SHAPE))
    return PretrainConfig(
        data=str(prepared),
        model=str(tmp_path / "shape.json"),
        output=str(tmp_path / "run"),
        steps=12,
        tokens_per_step=256,
        packing=PackingConfig(tokens_per_pack=128, max_sequence_tokens=32),
        masking=MaskingConfig(share=0.3),
        optim=OptimConfig(learning_rate=3e-3),
        save=SaveConfig(every_steps=5, every_minutes=None, keep_last=2),
        eval=EvalConfig(every_steps=6, max_tokens=500),
        precision="fp32",
        device="cpu",
        log_every_steps=4,
    )


def change(config: PretrainConfig, **changes: Any) -> PretrainConfig:
    return dataclasses.replace(config, **changes)


def metrics_of(config: PretrainConfig) -> list[dict[str, Any]]:
    text = (Path(config.output) / "metrics.jsonl").read_text()
    return [json.loads(line) for line in text.splitlines()]


def tree(folder: Path) -> dict[str, bytes]:
    """Every file's content."""
    return {str(p): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def test_a_run_learns_and_leaves_a_whole_folder(
    config: PretrainConfig, capsys: pytest.CaptureFixture[str]
) -> None:
    config = change(config, steps=120, optim=OptimConfig(learning_rate=2e-2))
    assert main(config) == 0
    folder = Path(config.output)
    assert capsys.readouterr().out == f"{folder / 'model'}\n"
    summary = json.loads((folder / "summary.json").read_text())
    assert (summary["status"], summary["steps"], summary["seed"]) == ("completed", 120, 0)
    assert summary["valid_loss"] < 3.3 < np.log(45)  # guessing costs ln 45 = 3.81
    assert summary["valid_perplexity"] == pytest.approx(np.exp(summary["valid_loss"]))
    assert 0.0 <= summary["valid_accuracy"] <= 1.0
    assert summary["real_tokens_per_second"] > 0.0
    assert summary["peak_memory_bytes"] > 1e6
    assert {"train_loss", "seconds", "versions", "real_tokens"} <= summary.keys()
    for name in ("README.md", "log.txt", "run.yaml", "model/tokenizer.json"):
        assert (folder / name).stat().st_size > 0, name
    assert list((folder / "tensorboard").iterdir())
    assert not [p for p in folder.rglob("*") if ".tmp" in p.name or p.name.startswith(".")]
    saved = sorted(int(p.name.split("-")[1]) for p in (folder / "checkpoints").iterdir())
    # A save that falls due while the one before is still being written waits for its end, so
    # a slow disk moves the first of the two; the last is always that of the last step.
    assert len(saved) == 2
    assert saved[0] < saved[1] == 120

    lines = metrics_of(config)
    steps = [line for line in lines if "grad_norm" in line]
    assert [line["step"] for line in steps] == [1, *range(4, 121, 4)]
    wanted = {"step", "loss", "learning_rate", "grad_norm", "real_tokens", "seconds"}
    assert all(wanted <= line.keys() for line in steps)
    scored = [line for line in lines if "valid_loss" in line]
    assert [line["step"] for line in scored] == list(range(6, 121, 6))
    assert scored[-1]["valid_loss"] == summary["valid_loss"]


def test_transformers_loads_the_model_and_the_checkpoints(config: PretrainConfig) -> None:
    pretrain(config)
    ours, _ = load_masked_lm(Path(config.output) / "model", seed=0)
    for where in ("model", "checkpoints/step-12"):
        folder = str(Path(config.output) / where)
        theirs = transformers.BertForMaskedLM.from_pretrained(folder)
        torch.testing.assert_close(
            theirs.cls.predictions.transform.dense.weight, ours.transform.weight, rtol=0, atol=0
        )
        tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
        assert tokenizer("w3 w4")["input_ids"] == [2, 8, 9, 3]


def test_run_yaml_repeats_the_run_to_the_bit(config: PretrainConfig, tmp_path: Path) -> None:
    pretrain(config)
    values = yaml.safe_load((Path(config.output) / "run.yaml").read_text())
    for key, kind in (
        ("packing", PackingConfig),
        ("masking", MaskingConfig),
        ("optim", OptimConfig),
        ("save", SaveConfig),
        ("guard", GuardConfig),
        ("eval", EvalConfig),
        ("parallel", ParallelConfig),
    ):
        values[key] = kind(**values[key])
    again = PretrainConfig(**values | {"output": str(tmp_path / "again")})
    pretrain(again)
    files = [Path(c.output) / "model" / "model.safetensors" for c in (config, again)]
    assert files[0].read_bytes() == files[1].read_bytes()


def compute_bf16_anywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU without bf16 instructions too, where it is emulated: slow, and right."""
    monkeypatch.setattr("bertsmith.train.precision.cpu_computes_bf16", lambda: True)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_interrupted_and_resumed_equals_never_stopped(
    config: PretrainConfig,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    precision: Any,
    capsys: pytest.CaptureFixture[str],
) -> None:
    compute_bf16_anywhere(monkeypatch)
    config = change(config, precision=precision)
    straight = change(config, output=str(tmp_path / "straight"))
    whole = pretrain(straight)

    interrupt_after(7, monkeypatch)
    assert main(config) == 75
    first = json.loads((Path(config.output) / "summary.json").read_text())
    assert (first["status"], first["steps"]) == ("interrupted", 7)
    assert "run.yaml --resume" in capsys.readouterr().err.replace("\n", "")
    assert not (Path(config.output) / "model").exists()

    monkeypatch.undo()
    compute_bf16_anywhere(monkeypatch)
    summary = pretrain(change(config, resume=True, device="auto", log_every_steps=4))
    assert (summary.status, summary.steps) == ("completed", 12)
    assert summary.real_tokens == whole.real_tokens
    assert summary.valid_loss == whole.valid_loss
    for name in ("model/model.safetensors", "checkpoints/step-12/training_state.safetensors"):
        paths = [Path(c.output) / name for c in (straight, config)]
        assert paths[0].read_bytes() == paths[1].read_bytes(), name
    rows = [
        [(line["step"], line.get("loss"), line.get("valid_loss")) for line in metrics_of(c)]
        for c in (straight, config)
    ]
    assert rows[0] == rows[1]


def interrupt_after(step: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C once so many steps are done."""
    import signal

    report_step = PretrainRun.on_report

    def report(self: PretrainRun, report: StepReport, state: Any, progress: float) -> None:
        report_step(self, report, state, progress)
        if state.step == step:
            signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(PretrainRun, "on_report", report)


def test_resuming_a_run_that_is_done_changes_no_weight_and_keeps_its_scores(
    config: PretrainConfig,
) -> None:
    before = pretrain(config)
    model = (Path(config.output) / "model" / "model.safetensors").read_bytes()
    after = pretrain(change(config, resume=True))
    assert (Path(config.output) / "model" / "model.safetensors").read_bytes() == model
    assert (after.steps, after.valid_loss) == (before.steps, before.valid_loss)
    assert after.real_tokens_per_second is not None
    assert after.train_loss is not None


def test_a_damaged_newest_checkpoint_is_passed_over_and_said(
    config: PretrainConfig, capsys: pytest.CaptureFixture[str]
) -> None:
    whole = pretrain(config)
    # By number: a save that waits for the one before may fall a step later than 5 or 10.
    folders = (Path(config.output) / "checkpoints").glob("step-*")
    *_, before, newest = sorted(folders, key=lambda folder: int(folder.name[5:]))
    damaged = newest / "model.safetensors"
    content = bytearray(damaged.read_bytes())
    content[len(content) // 2] ^= 1
    damaged.write_bytes(content)
    summary = pretrain(change(config, resume=True))
    assert (summary.steps, summary.valid_loss) == (12, whole.valid_loss)
    said = capsys.readouterr().err
    assert "step-12: model.safetensors is damaged" in said
    assert f"resumed from {before}" in said


def test_a_folder_with_a_run_is_refused_or_replaced_or_gone_on_with_as_told(
    config: PretrainConfig,
) -> None:
    pretrain(config)
    before = tree(Path(config.output))
    with pytest.raises(UserError, match="holds another run; name a new folder"):
        pretrain(config)
    with pytest.raises(UserError, match=r"optim\.learning_rate was 0\.003, is 0\.1"):
        pretrain(change(config, resume=True, optim=OptimConfig(learning_rate=0.1)))
    with pytest.raises(UserError, match="no-such-model"):  # refused before anything is replaced
        pretrain(change(config, overwrite=True, model="./no-such-model"))
    assert tree(Path(config.output)) == before
    summary = pretrain(change(config, overwrite=True, steps=3))
    assert summary.steps == 3
    assert [line["step"] for line in metrics_of(config) if "loss" in line] == [1, 3]


def test_other_data_is_refused_on_resume(config: PretrainConfig, tmp_path: Path) -> None:
    pretrain(config)
    other = write_prepared(tmp_path / "other", words=list(reversed(WORDS)))
    with pytest.raises(
        UserError,
        match=r"cannot resume step-12: the training data has changed.*override data tokeni",
    ):
        pretrain(change(config, resume=True, data=str(other)))


def test_a_run_is_not_replaced_while_it_holds_what_is_read(config: PretrainConfig) -> None:
    pretrain(config)
    before = tree(Path(config.output))
    for changes in (
        {"model": str(Path(config.output) / "model")},
        {"output": str(Path(config.output) / "..")},
    ):
        with pytest.raises(UserError, match=r"holds --(model|data)|holds files that are no run"):
            pretrain(change(config, overwrite=True, **changes))
    assert tree(Path(config.output)) == before


def test_files_that_are_no_run_are_never_touched(config: PretrainConfig) -> None:
    Path(config.output).mkdir()
    (Path(config.output) / "thesis.txt").write_text("years of work")
    for flags in ({}, {"overwrite": True}, {"resume": True}):
        with pytest.raises(UserError, match="holds files that are no run"):
            pretrain(change(config, **flags))
    assert (Path(config.output) / "thesis.txt").read_text() == "years of work"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"steps": None}, r"give one of --steps, --tokens, --epochs, --minutes \(given: none\)"),
        ({"tokens": 5}, r"given: --steps, --tokens"),
        ({"steps": 0}, "--steps 0: a budget is more than 0"),
        ({"steps": None, "minutes": float("nan")}, "a budget is more than 0"),
        ({"data": "no/such/folder"}, "no/such/folder"),
        ({"model": "bert-tinny", "data": None}, "bert-tinny"),
        (
            {"packing": PackingConfig(tokens_per_pack=128, max_sequence_tokens=64)},
            "max_sequence_tokens 64: the model has 32 positions",
        ),
        ({"checkpointing": "every:3"}, "--checkpointing every:3: the model has 2 blocks"),
        ({"checkpointing": "budget:0.1"}, r"--checkpointing budget:0\.1: .* give budget:0\.\d+ or"),
    ],
)
def test_what_cannot_be_is_refused_and_nothing_is_written(
    config: PretrainConfig, changes: dict[str, Any], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    given = {k: v for k, v in changes.items() if k != "data" or v is not None}
    with pytest.raises(UserError, match=message):
        pretrain(change(config, **given))
    assert not Path(config.output).exists()


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("tokens_per_step", 0),
        ("tokens_per_step", 1),
        ("log_every_steps", 0),
        ("seed", -1),
        ("hidden_dropout_prob", 1.0),
        ("checkpointing", "sometimes"),
    ],
)
def test_values_out_of_range_are_named(config: PretrainConfig, name: str, value: object) -> None:
    with pytest.raises(ValueError, match=name):
        change(config, **{name: value})


def test_a_budget_in_tokens_ends_with_the_step_that_spends_it(config: PretrainConfig) -> None:
    summary = pretrain(change(config, steps=None, tokens=500))
    assert 500 <= summary.real_tokens < 500 + 256


@pytest.mark.parametrize("epochs", [0.01, 1.0, 1.5])
def test_a_budget_in_epochs_is_so_many_passes(config: PretrainConfig, epochs: float) -> None:
    summary = pretrain(change(config, steps=None, epochs=epochs))
    in_an_epoch = module.open_data(config).stream.steps_in_epoch(0)
    assert summary.steps == max(np.ceil(epochs * in_an_epoch), 1)
    assert summary.epochs == pytest.approx(epochs, abs=1.0 / in_an_epoch)


def test_a_budget_in_minutes_ends_in_time_with_a_rate_near_zero(config: PretrainConfig) -> None:
    summary = pretrain(change(config, steps=None, minutes=0.03, eval=EvalConfig(max_tokens=500)))
    assert summary.status == "completed"
    assert 1.8 <= summary.seconds < 10.0
    lines = [line for line in metrics_of(config) if "learning_rate" in line]
    assert lines[-1]["learning_rate"] < 0.25 * 3e-3


def test_a_model_from_a_checkpoint_goes_on_from_its_weights(
    config: PretrainConfig, tmp_path: Path, prepared: Path
) -> None:
    first = pretrain(change(config, steps=40))
    more = change(config, model=str(Path(config.output) / "model"), output=str(tmp_path / "more"))
    summary = pretrain(change(more, steps=1, optim=OptimConfig(learning_rate=0.0)))
    assert first.valid_loss is not None
    assert summary.valid_loss == pytest.approx(first.valid_loss, abs=1e-6)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (list(reversed(WORDS)), r"its tokenizer is not the data's \(44 tokens differ"),
        ([*WORDS, "more"], "50"),
    ],
)
def test_a_tokenizer_that_does_not_fit_the_checkpoint_is_refused(
    config: PretrainConfig, tmp_path: Path, words: list[str], message: str, prepared: Path
) -> None:
    shape = EncoderConfig(**{k: v for k, v in SHAPE.items() if k != "model_type"})  # type: ignore[arg-type]
    model = MaskedLM(shape)
    initialize(model, config=shape, seed=0)
    has_tokenizer = len(words) == 45
    save_model(
        tmp_path / "model",
        model,
        tokenizer_folder=prepared / "tokenizer" if has_tokenizer else None,
    )
    other = write_prepared(tmp_path / "other", words=words)
    with pytest.raises(UserError, match=message):
        pretrain(change(config, model=str(tmp_path / "model"), data=str(other)))


def test_data_without_held_out_text_trains_without_scores(
    config: PretrainConfig, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = write_prepared(tmp_path / "small", valid_documents=0)
    summary = pretrain(change(config, data=str(data), steps=3))
    assert (summary.status, summary.valid_loss) == ("completed", None)
    assert "there will be no validation loss" in capsys.readouterr().err


def test_a_nan_stops_the_run_names_documents_and_keeps_the_last_good_checkpoint(
    config: PretrainConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = [0]
    forward = MaskedLM.forward

    def spoiled(self: MaskedLM, *args: Any, **more: Any) -> Any:
        calls[0] += 1
        found = forward(self, *args, **more)
        bad = found._replace(nats=found.nats * torch.nan)
        # The second pack of step 7; the trial before the first step has two passes.
        return bad if calls[0] == 2 + 2 * 6 + 2 else found

    monkeypatch.setattr(MaskedLM, "forward", spoiled)
    with pytest.raises(UserError) as caught:
        pretrain(config)
    line = str(caught.value)
    assert "loss of step 7 is not finite" in line
    assert "step-5" in line
    stream = module.open_data(config).stream
    documents = sorted(set(stream.documents_of(6)[1]))
    assert ", ".join(f"text.txt:{d + 1}" for d in documents[:5]) in line
    summary = json.loads((Path(config.output) / "summary.json").read_text())
    assert (summary["status"], summary["steps"]) == ("failed", 6)
    monkeypatch.undo()
    assert pretrain(change(config, resume=True)).status == "completed"


def fail_to_write(monkeypatch: pytest.MonkeyPatch, *, steps: set[int]) -> None:
    """A disk that is full when checkpoints of some steps are written."""
    write = write_checkpoint

    def written(folder: Path, *, state: Any, **more: Any) -> Path:
        if state.step in steps:
            raise NotWrittenError(f"step-{state.step}: No space left on device")
        return write(folder, state=state, **more)

    monkeypatch.setattr("bertsmith.recipes.run_checkpoints.write_checkpoint", written)


def status_of(config: PretrainConfig) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((Path(config.output) / "run_status.json").read_text())
    return content


def test_a_disk_that_is_full_for_a_while_costs_a_checkpoint_and_is_said(
    config: PretrainConfig, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    fail_to_write(monkeypatch, steps={5, 10})
    assert pretrain(config).status == "completed"
    assert "step-5: No space left on device; there is no earlier one" in capsys.readouterr().err
    assert status_of(config)["status"] == "completed"


@pytest.mark.parametrize(("policy", "steps"), [("stop", {10, 11, 12}), ("continue", {12})])
def test_a_run_whose_disk_stays_full_ends_resumable_from_the_last_good_checkpoint(
    config: PretrainConfig,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    policy: Literal["stop", "continue"],
    steps: set[int],
) -> None:
    straight = change(config, output=str(tmp_path / "straight"))
    pretrain(straight)
    save = SaveConfig(every_steps=5, every_minutes=None, on_disk_error=policy)
    with monkeypatch.context() as patch:
        fail_to_write(patch, steps=steps)
        assert main(change(config, save=save)) == 75
    found = status_of(config)
    assert (found["status"], found["reason"]) == (
        "resumable",
        "what has to be saved could not be written",
    )
    assert (Path(config.output) / found["checkpoint"]).is_dir()
    assert found["command"].endswith("run.yaml --resume")
    assert main(change(config, save=save, resume=True)) == 0
    files = [Path(c.output) / "model" / "model.safetensors" for c in (straight, config)]
    assert files[0].read_bytes() == files[1].read_bytes()


def test_a_disk_on_which_nothing_could_ever_be_saved_is_no_run_to_go_on_with(
    config: PretrainConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    fail_to_write(monkeypatch, steps=set(range(1, 13)))
    with pytest.raises(UserError, match="no checkpoint could be written, so nothing is saved"):
        pretrain(config)
    assert status_of(config)["status"] == "failed"


def test_weights_that_are_not_finite_are_never_saved(
    config: PretrainConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An update that overflows leaves a loss that is finite still."""
    report_step = PretrainRun.on_report

    def break_weights(self: PretrainRun, report: StepReport, state: Any, progress: float) -> None:
        report_step(self, report, state, progress)
        if state.step == 10:
            with torch.no_grad():
                self._model.encoder.embeddings.position.weight[31, 0] = torch.inf

    monkeypatch.setattr(PretrainRun, "on_report", break_weights)
    with pytest.raises(UserError, match="not finite"):
        pretrain(config)
    assert sorted(p.name for p in (Path(config.output) / "checkpoints").iterdir()) == ["step-5"]
    assert status_of(config)["status"] == "failed"
    assert not (Path(config.output) / "model").exists()


def test_a_bad_step_is_gone_back_from_with_its_documents_named(
    config: PretrainConfig,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """And the end is that of a run which passed the step over."""
    ends = []
    for policy in ("rollback", "skip"):
        real, tried = train_step, [0]

        def step(*args: Any, real: Any = real, tried: list[int] = tried, **more: Any) -> Any:
            if more["step"] == 7 and not tried[0]:
                tried[0] = 1
                raise BadStepError(step=7, pack=0, what="loss", how="is not finite")
            return real(*args, **more)

        guarded = change(
            config,
            output=str(tmp_path / policy),
            guard=GuardConfig(non_finite=policy),
        )
        with monkeypatch.context() as patch:
            patch.setattr("bertsmith.train.loop.train_step", step)
            summary = pretrain(guarded)
        said = capsys.readouterr().err
        assert "the loss of step 8 is not finite, on documents " in said.replace("\n", "")
        assert (summary.status, summary.skipped_steps) == ("completed", [8])
        lines = [line["step"] for line in metrics_of(guarded) if "grad_norm" in line]
        assert lines == [1, 4, 12]
        ends.append((Path(guarded.output) / "model" / "model.safetensors").read_bytes())
    assert ends[0] == ends[1]


def test_a_second_run_in_one_folder_is_refused(config: PretrainConfig) -> None:
    with (
        hold_run_lock(Path(config.output), pytest.fail),
        pytest.raises(UserError, match=rf"{os.getpid()}"),
    ):
        pretrain(config)


def test_a_change_is_accepted_by_name_and_said(
    config: PretrainConfig, capsys: pytest.CaptureFixture[str]
) -> None:
    pretrain(config)
    longer = change(config, resume=True, steps=14, optim=OptimConfig(learning_rate=0.1))
    both = r"optim\.learning_rate was 0\.003, is 0\.1; steps was 12, is 14"
    with pytest.raises(UserError, match=both):
        pretrain(longer)
    with pytest.raises(UserError, match=r"--resume\.override optim\.rate: no such key"):
        pretrain(change(longer, resume_override=["optim.rate"]))
    with pytest.raises(UserError, match=r"step-12: steps was 12, is 14; repeat"):
        pretrain(change(longer, resume_override=["optim.learning_rate"]))
    capsys.readouterr()
    named = change(longer, resume_override=["optim.learning_rate", "steps"])
    assert pretrain(named).steps == 14
    assert "in spite of a change: steps was 12, is 14" in capsys.readouterr().err.replace("\n", "")


def test_evaluating_more_often_changes_no_weight(config: PretrainConfig, tmp_path: Path) -> None:
    other = change(config, output=str(tmp_path / "other"), eval=EvalConfig(every_steps=1))
    files = []
    for each in (config, other):
        pretrain(each)
        files.append((Path(each.output) / "model" / "model.safetensors").read_bytes())
    assert files[0] == files[1]


def test_checkpointing_changes_no_weight_and_may_change_when_a_run_goes_on(
    config: PretrainConfig, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = change(config, output=str(tmp_path / "other"), checkpointing="budget:0.5")
    pretrain(config)
    capsys.readouterr()
    pretrain(other)
    said = "checkpointing budget:0.5: block 1 full, block 2 selective; blocks keep at most"
    assert said in capsys.readouterr().err.replace("\n", " ")
    files = [Path(c.output) / "model" / "model.safetensors" for c in (config, other)]
    assert files[0].read_bytes() == files[1].read_bytes()
    pretrain(change(other, resume=True, checkpointing="every:2"))


def test_validation_is_the_same_whatever_the_seed(
    config: PretrainConfig, make_losses: Callable[[PretrainConfig], float]
) -> None:
    assert make_losses(config) == make_losses(change(config, seed=1))


@pytest.fixture
def make_losses() -> Callable[[PretrainConfig], float]:
    """Scores one model on the held-out text of a config."""
    from bertsmith.parallel.world import World
    from bertsmith.train.precision import choose_compute
    from bertsmith.train.validation import score_masked_lm

    def score(config: PretrainConfig) -> float:
        shape = EncoderConfig(**{k: v for k, v in SHAPE.items() if k != "model_type"})  # type: ignore[arg-type]
        model = MaskedLM(shape)
        initialize(model, config=shape, seed=3)
        valid = module.open_data(config).valid
        return score_masked_lm(model, valid, choose_compute("fp32", "cpu"), World()).loss

    return score


def test_a_score_that_is_not_finite_is_never_the_best(
    config: PretrainConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Evaluated after each step; the first score is NaN, the later ones are 2.0 and more."""
    losses = iter([math.nan, *(2.0 + number for number in range(20))])
    monkeypatch.setattr(
        "bertsmith.recipes.pretrain_run.score_masked_lm",
        lambda *args, **more: MaskedScores(loss=next(losses), accuracy=0.0, num_targets=1),
    )
    pretrain(change(config, eval=EvalConfig(every_steps=1)))
    state, _ = read_state(Path(config.output) / "checkpoints" / "step-12")
    assert (state.best_value, state.best_step) == (-2.0, 2)


def test_the_format_that_auto_came_to_is_part_of_the_run(
    config: PretrainConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    auto = change(config, precision="auto")
    monkeypatch.setattr("bertsmith.train.precision.cpu_computes_bf16", lambda: False)
    pretrain(auto)
    monkeypatch.setattr("bertsmith.train.precision.cpu_computes_bf16", lambda: True)
    with pytest.raises(UserError, match="precision was fp32, is bf16"):
        pretrain(change(auto, resume=True))
    pretrain(change(auto, resume=True, precision="fp32"))


def test_how_often_is_scored_may_change_and_on_what_may_not(config: PretrainConfig) -> None:
    pretrain(config)
    again = change(config, resume=True)
    pretrain(change(again, eval=EvalConfig(every_steps=2, max_tokens=500)))
    with pytest.raises(UserError, match=r"eval\.max_tokens was 500, is 64"):
        pretrain(change(again, eval=EvalConfig(max_tokens=64)))


def test_a_run_of_before_masking_covered_goes_on_independently(
    config: PretrainConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its checkpoints know no such key: what it did is kept, said, and written down."""
    classic = change(config, masking=MaskingConfig(share=0.3, schedule="independent"))
    whole = pretrain(change(classic, output=str(tmp_path / "whole")))
    known = module.identity_of  # type: ignore[attr-defined]

    def of_before(*args: Any, **more: Any) -> Any:
        identity = known(*args, **more)
        gone = ("schedule", "unit", "fate", "rare_boost", "share_")
        kept = {
            k: v
            for k, v in identity.config.items()
            if not k.startswith("masking.") or (not k.removeprefix("masking.").startswith(gone))
        }
        return dataclasses.replace(identity, config=kept)

    with monkeypatch.context() as patch:
        patch.setattr(module, "identity_of", of_before)
        pretrain(change(classic, steps=12))
    run = Path(config.output)
    shutil.rmtree(run / "checkpoints" / "step-12")
    with pytest.raises(UserError, match=r"masking\.unit was token, is word"):
        pretrain(change(config, resume=True, masking=MaskingConfig(share=0.3, unit="word")))
    summary = pretrain(change(config, resume=True))
    assert summary.train_loss == whole.train_loss
    assert "goes on with --masking.schedule independent" in (run / "log.txt").read_text().replace(
        "\n", " "
    )
    assert yaml.safe_load((run / "run.yaml").read_text())["masking"]["schedule"] == "independent"


@pytest.mark.parametrize(("share", "what"), [(0.001, "nothing"), (0.9999, "everything")])
def test_a_share_that_hides_nothing_or_everything_in_a_pack_is_refused(
    config: PretrainConfig, share: float, what: str
) -> None:
    with pytest.raises(UserError, match=f"hides {what} in a pack"):
        pretrain(change(config, masking=MaskingConfig(share=share)))
    assert not Path(config.output).exists() or not (Path(config.output) / "model").exists()


def test_validation_hides_the_same_whatever_is_trained(config: PretrainConfig) -> None:
    one = module.open_data(config).valid
    other = module.open_data(change(config, masking=MaskingConfig(share=0.5, unit="span"))).valid
    assert [b.positions_M.tolist() for b in one] == [b.positions_M.tolist() for b in other]
    assert [b.inputs.input_ids_T.tolist() for b in one] == [
        b.inputs.input_ids_T.tolist() for b in other
    ]
