"""The model card: the header that hubs read, and every value."""

from pathlib import Path

import yaml

from bertsmith.report.card import ModelCard, write_card


def test_a_card_has_the_hubs_header_and_every_value(tmp_path: Path) -> None:
    write_card(
        tmp_path,
        ModelCard(
            title="bert-mini, pretrained on en",
            task="fill-mask",
            summary="A BERT encoder.",
            data={"prepared data": "data/en"},
            settings={"labels": "a|b\nc"},
            results={"validation loss": "2.5"},
            versions={"torch": "2.13"},
            repeat="bertsmith pretrain --config run.yaml",
            example="the [MASK]",
        ),
    )
    text = (tmp_path / "README.md").read_text()
    header = yaml.safe_load(text.split("---")[1])
    assert header["pipeline_tag"] == "fill-mask"
    assert 'pipeline("fill-mask", model="model")(\'the [MASK]\')' in text
    assert "| labels | a\\|b c |" in text  # a bar or a line break would end the table
    assert "| validation loss | 2.5 |" in text
    assert "bertsmith pretrain --config run.yaml" in text


def test_a_model_that_transformers_cannot_compute_is_shown_with_our_command(
    tmp_path: Path,
) -> None:
    card = ModelCard(
        title="a classifier",
        task="text-classification",
        summary="A BERT classifier.",
        data={},
        settings={},
        results={},
        versions={},
        repeat="bertsmith finetune --config run.yaml",
        example="it's a text",
        fits_transformers=False,
    )
    write_card(tmp_path, card)
    text = (tmp_path / "README.md").read_text()
    assert yaml.safe_load(text.split("---")[1])["library_name"] == "bertsmith"
    assert """echo 'it'"'"'s a text' | bertsmith predict --model model""" in text
    assert "from transformers" not in text
