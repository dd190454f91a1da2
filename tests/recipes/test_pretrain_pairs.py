"""`bertsmith pretrain --objective mlm+nsp` and `mlm+sop`: learn, resume, export, refuse."""

import dataclasses
import json
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from bertsmith import cli
from bertsmith.batch import pack, to_padded
from bertsmith.checkpoint.config import SaveConfig
from bertsmith.data.config import MaskingConfig, Objective, PackingConfig
from bertsmith.errors import UserError
from bertsmith.hf import load_classifier, load_masked_lm, load_paired_lm
from bertsmith.recipes import pretrain as module
from bertsmith.recipes.config import PretrainConfig
from bertsmith.recipes.pretrain import main, pretrain
from bertsmith.recipes.pretrain_run import PretrainRun
from bertsmith.train.config import EvalConfig, OptimConfig
from small_world import sentences, write_model_config

PAIRS: tuple[Objective, ...] = ("mlm+nsp", "mlm+sop")


def prepare(folder: Path, text: str) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "text.txt").write_text(text)
    command = ["prepare", "--input", str(folder / "text.txt"), "--output", str(folder / "data")]
    more = ["--documents", "line", "--vocab_size", "150", "--workers", "1"]
    assert cli.run([*command, *more, "--valid_share", "0.2"]) == 0
    return folder / "data"


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    texts = (text for text, _ in sentences(500, seed=0))
    return prepare(tmp_path_factory.mktemp("pairs"), "\n".join(texts))


@pytest.fixture
def config(data: Path, tmp_path: Path) -> PretrainConfig:
    return PretrainConfig(
        data=str(data),
        model=str(write_model_config(tmp_path / "shape.json")),
        output=str(tmp_path / "run"),
        objective="mlm+nsp",
        steps=12,
        tokens_per_step=512,
        packing=PackingConfig(tokens_per_pack=256, max_sequence_tokens=64),
        masking=MaskingConfig(share=0.2),
        optim=OptimConfig(learning_rate=3e-3),
        save=SaveConfig(every_steps=5, every_minutes=None),
        eval=EvalConfig(every_steps=6),
        precision="fp32",
        device="cpu",
        log_every_steps=1,
    )


def change(config: PretrainConfig, **changes: Any) -> PretrainConfig:
    return dataclasses.replace(config, **changes)


def metrics_of(config: PretrainConfig) -> list[dict[str, Any]]:
    text = (Path(config.output) / "metrics.jsonl").read_text()
    return [json.loads(line) for line in text.splitlines()]


def test_a_run_learns_to_tell_pairs_and_says_so(config: PretrainConfig, tmp_path: Path) -> None:
    """Every text begins with one word, so that swapped segments show. Weights start larger than
    usual, as a model so narrow needs them to learn in a second."""
    shape = json.loads(Path(config.model).read_text()) | {"initializer_range": 0.2}
    (tmp_path / "wide-start.json").write_text(json.dumps(shape))
    text = "\n".join(f"begin {text}" for text, _ in sentences(300, seed=0))
    config = change(
        config,
        data=str(prepare(tmp_path / "marked", text)),
        model=str(tmp_path / "wide-start.json"),
        objective="mlm+sop",
        steps=80,
        optim=OptimConfig(learning_rate=1e-2),
        eval=EvalConfig(every_steps=40),
    )
    summary = pretrain(config)
    assert summary.valid_pair_accuracy is not None
    assert summary.valid_pair_loss is not None
    assert summary.valid_pair_accuracy > 0.8
    assert summary.valid_pair_loss < 0.5  # guessing costs ln 2 = 0.693
    assert summary.valid_loss is not None
    scored = [line for line in metrics_of(config) if "valid_loss" in line]
    assert [line["step"] for line in scored] == [40, 80]
    assert scored[-1]["valid_pair_accuracy"] == summary.valid_pair_accuracy
    assert scored[-1]["valid_pair_loss"] == summary.valid_pair_loss
    stored = json.loads((Path(config.output) / "summary.json").read_text())
    assert stored["valid_pair_accuracy"] == summary.valid_pair_accuracy
    assert "pairs judged right" in (Path(config.output) / "README.md").read_text()


def test_the_first_loss_is_that_of_guessing_both(config: PretrainConfig) -> None:
    """ln 300 nats a token of the model's vocabulary, and ln 2 a pair; small weights add little."""
    pretrain(change(config, steps=1))
    first = next(line for line in metrics_of(config) if "loss" in line)
    assert first["loss"] == pytest.approx(5.704 + 0.693, abs=0.1)


@pytest.mark.parametrize("objective", PAIRS)
def test_interrupted_and_resumed_equals_never_stopped(
    config: PretrainConfig,
    objective: Objective,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    config = change(config, objective=objective)
    straight = change(config, output=str(tmp_path / "straight"))
    whole = pretrain(straight)
    on_report = PretrainRun.on_report

    def stop_after_seven(self: PretrainRun, report: Any, state: Any, progress: float) -> None:
        on_report(self, report, state, progress)
        if state.step == 7:
            signal.raise_signal(signal.SIGINT)

    with monkeypatch.context() as patch:
        patch.setattr(PretrainRun, "on_report", stop_after_seven)
        assert main(config) == 75
    summary = pretrain(change(config, resume=True))
    assert summary.valid_pair_loss == whole.valid_pair_loss
    for name in ("model/model.safetensors", "checkpoints/step-12/training_state.safetensors"):
        paths = [Path(c.output) / name for c in (straight, config)]
        assert paths[0].read_bytes() == paths[1].read_bytes(), name


def test_another_objective_is_refused_on_resume(config: PretrainConfig) -> None:
    pretrain(change(config, steps=1))
    with pytest.raises(UserError, match=r"objective was mlm\+nsp, is mlm"):
        pretrain(change(config, steps=1, resume=True, objective="mlm"))


def test_a_run_begun_before_there_were_objectives_named_hidden_tokens(
    config: PretrainConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    known = module.identity_of  # type: ignore[attr-defined]

    def of_before(*args: Any, **more: Any) -> Any:
        identity = known(*args, **more)
        kept = {key: value for key, value in identity.config.items() if key != "objective"}
        return dataclasses.replace(identity, config=kept)

    with monkeypatch.context() as patch:
        patch.setattr(module, "identity_of", of_before)
        pretrain(change(config, steps=1, objective="mlm"))
    with pytest.raises(UserError, match=r"objective was mlm, is mlm\+nsp"):
        pretrain(change(config, steps=1, resume=True))
    assert pretrain(change(config, steps=1, resume=True, objective="mlm")).steps == 1


def test_transformers_loads_all_of_the_model_and_gives_its_scores(config: PretrainConfig) -> None:
    pretrain(config)
    generator = torch.Generator().manual_seed(0)
    lengths = (7, 3, 40)
    batch = pack(
        [torch.randint(5, 120, (n,), generator=generator) for n in lengths],
        segments=[(torch.arange(n) > n // 2).long() for n in lengths],
    )
    firsts_N = batch.starts_N1[:-1].long()
    for where in ("model", "checkpoints/step-12"):
        folder = Path(config.output) / where
        theirs, info = transformers.BertForPreTraining.from_pretrained(
            folder, output_loading_info=True
        )
        assert not any(info[key] for key in info), info
        assert theirs.config.architectures == ["BertForPreTraining"]
        ours, report = load_paired_lm(folder, seed=0)
        assert report.new == report.dropped == ()
        grid = theirs.eval()(
            input_ids=to_padded(batch.input_ids_T, batch.starts_N1),
            token_type_ids=to_padded(batch.segment_ids_T, batch.starts_N1),
            attention_mask=to_padded(torch.ones_like(batch.input_ids_T), batch.starts_N1),
        )
        positions_M = torch.tensor([1, 5, 8, 30])
        with torch.no_grad():
            logits_MV = ours.logits_MV(batch, positions_M, dropout_seed=None)
            hidden_ND = ours.encoder(batch, dropout_seed=None, rows_M=firsts_N)
            logits_N2 = ours.relation(torch.tanh(ours.pooler(hidden_ND)))
        real_BS = to_padded(torch.ones_like(batch.input_ids_T), batch.starts_N1).bool()
        expected_MV = grid.prediction_logits[real_BS][positions_M]
        torch.testing.assert_close(logits_MV, expected_MV, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(logits_N2, grid.seq_relationship_logits, rtol=1e-4, atol=1e-5)


def test_fine_tuning_takes_the_pooler_and_filling_needs_it_not(config: PretrainConfig) -> None:
    pretrain(config)
    folder = Path(config.output) / "model"
    trained, _ = load_paired_lm(folder, seed=0)
    classifier, report = load_classifier(folder, labels=["a", "b"])
    assert report.new == ("classifier",)
    assert torch.equal(classifier.pooler.weight, trained.pooler.weight)
    _, report = load_masked_lm(folder, seed=0)
    assert report.new == ()


def test_a_pretrained_model_goes_on_with_pairs(
    config: PretrainConfig, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The head for pairs is new and that is said; masks and scores of hidden tokens are as ever."""
    before = pretrain(change(config, objective="mlm"))
    assert before.valid_pair_accuracy is None
    assert not any("valid_pair_loss" in line for line in metrics_of(config))
    model = str(Path(config.output) / "model")
    capsys.readouterr()
    after = pretrain(
        change(
            config,
            model=model,
            output=str(tmp_path / "more"),
            steps=1,
            optim=OptimConfig(learning_rate=0.0),
        )
    )
    assert "newly initialised: pooler, relation" in capsys.readouterr().err.replace("\n", " ")
    assert after.valid_loss == pytest.approx(before.valid_loss, rel=1e-6)


def test_what_cannot_be_is_refused_in_a_line(
    config: PretrainConfig, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = " ".join(text for text, _ in sentences(60, seed=1))
    one = prepare(tmp_path / "one", f"{text}\n{text[:100]}")
    manifest = json.loads((one / "manifest.json").read_text())
    assert manifest["schema"] == 1
    with pytest.raises(UserError, match=r"wrong next segments come from other documents"):
        pretrain(change(config, data=str(one)))
    shape = json.loads(Path(config.model).read_text()) | {"type_vocab_size": 1}
    (tmp_path / "one-type.json").write_text(json.dumps(shape))
    with pytest.raises(UserError, match="the model has a single token type"):
        pretrain(change(config, model=str(tmp_path / "one-type.json")))
    for words, message in (
        (["--objective", "nsp"], "objective"),
        (["--objective", "mlm+sop", "--packing.max_sequence_tokens", "4"], "at least 5"),
    ):
        capsys.readouterr()
        command = ["pretrain", "--data", "x", "--model", "bert-tiny", "--output", "y"]
        assert cli.run([*command, "--steps", "1", *words]) == 2
        said = capsys.readouterr().err
        assert message in said
        assert len(said.strip().splitlines()) == 1
