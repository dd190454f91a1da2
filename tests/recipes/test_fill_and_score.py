"""`fill` and `score` give what transformers gives, token by token; mistakes take a line."""

import io
import json
import math
from pathlib import Path

import pytest
import torch
import transformers

from bertsmith.cli import run
from bertsmith.hf import save_model
from bertsmith.model.encoder import Encoder
from bertsmith.model.heads import MaskedLM, initialize
from recipes.conftest import tiny_config

TEXTS = ["the [MASK] film", "[MASK] bad", "good bad ox the film [MASK] [MASK] the", "a [MASK]"]


@pytest.fixture
def folder(tmp_path: Path, tiny_tokenizer_folder: Path) -> Path:
    model = MaskedLM(tiny_config())
    initialize(model, config=tiny_config(), seed=1)
    torch.nn.init.normal_(model.bias, generator=torch.Generator().manual_seed(0))
    save_model(tmp_path / "model", model, tokenizer_folder=tiny_tokenizer_folder)
    return tmp_path / "model"


def test_fill_is_the_pipeline_of_transformers(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["fill", *TEXTS, "--model", str(folder), "--top_k", "7", "--json"]
    assert run([*command, "--tokens_per_pack", "20"]) == 0
    found = json.loads(capsys.readouterr().out)["texts"]
    expected = transformers.pipeline("fill-mask", model=str(folder), top_k=7, device="cpu")(TEXTS)
    assert [filled["text"] for filled in found] == TEXTS
    for filled, theirs in zip(found, expected, strict=True):
        by_mask = theirs if isinstance(theirs[0], list) else [theirs]
        assert len(filled["masks"]) == len(by_mask) == filled["text"].count("[MASK]")
        for guesses, their_guesses in zip(filled["masks"], by_mask, strict=True):
            assert [g["token_id"] for g in guesses] == [g["token"] for g in their_guesses]
            for guess, their_guess in zip(guesses, their_guesses, strict=True):
                assert guess["probability"] == pytest.approx(their_guess["score"], abs=1e-5)
    assert found[0]["masks"][0][0]["text"].startswith("the ")
    assert found[0]["masks"][0][0]["text"].endswith(" film")


def test_pseudo_perplexity_hides_each_token_in_turn(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Salazar et al. 2020, equation 2, with a text at a time in transformers."""
    texts = ["the good film", "[MASK] is no word", "ox"]
    command = ["score", *texts, "--model", str(folder), "--json", "--tokens_per_pack", "25"]
    assert run(command) == 0
    found = json.loads(capsys.readouterr().out)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    model = transformers.BertForMaskedLM.from_pretrained(folder).eval()
    total, count = 0.0, 0
    for text, scored in zip(texts, found["texts"], strict=True):
        ids = tokenizer(text, return_tensors="pt").input_ids
        nats = 0.0
        for place in range(1, ids.shape[1] - 1):
            hidden = ids.clone()
            hidden[0, place] = tokenizer.mask_token_id
            with torch.no_grad():
                chances = model(hidden).logits[0, place].double().log_softmax(-1)
            nats += float(chances[ids[0, place]])
        num_tokens = ids.shape[1] - 2
        assert (scored["text"], scored["tokens"]) == (text, num_tokens)
        assert scored["log_likelihood"] == pytest.approx(nats, rel=1e-5)
        assert scored["pseudo_perplexity"] == pytest.approx(math.exp(-nats / num_tokens), rel=1e-5)
        total, count = total + nats, count + num_tokens
    assert found["tokens"] == count
    assert found["pseudo_perplexity"] == pytest.approx(math.exp(-total / count), rel=1e-5)


def test_tables_and_standard_input(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"the [MASK]\n\ngood [MASK]\n")))
    assert run(["fill", "--data", "-", "--model", str(folder), "--top_k", "2"]) == 0
    printed = capsys.readouterr().out
    assert "the [MASK]" in printed
    assert "probability" in printed
    assert run(["score", "the film", "--model", str(folder)]) == 0
    assert "pseudo-perplexity" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("command", "message"),
    [
        (["fill", "no word"], "text 1: 'no word' hides no word; write [MASK]"),
        (["fill", "[MASK] " * 40], "text 1: has 42 tokens"),
        (["fill"], "give texts, or a file of texts with --data"),
        (["fill", "[MASK]", "--data", "x"], "give texts, or a file"),
        (["fill", "--data", "gone.txt"], "--data gone.txt: cannot be read (No such file"),
        (["fill", "[MASK]", "--top_k", "0"], "top_k is 0; it must be at least 1"),
        (["score", " "], "text 1: ' ' has no tokens to score"),
    ],
)
def test_mistakes_are_one_line(
    folder: Path, command: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run([*command, "--model", str(folder)]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


def test_a_model_without_the_head_is_refused(
    tmp_path: Path, tiny_tokenizer_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    encoder = Encoder(tiny_config())
    initialize(encoder, config=tiny_config(), seed=1)
    save_model(tmp_path / "encoder", encoder, tokenizer_folder=tiny_tokenizer_folder)
    for verb in ("fill", "score"):
        assert run([verb, "[MASK]", "--model", str(tmp_path / "encoder")]) == 2
        assert "holds no masked-LM head" in capsys.readouterr().err
