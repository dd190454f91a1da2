"""The model card: a README.md that says what a model was made of and how to use it."""

import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from bertsmith.report.run_folder import write_text


@dataclass(frozen=True, kw_only=True)
class ModelCard:
    """What the card says."""

    title: str
    task: str
    """The pipeline that runs it: fill-mask or text-classification."""

    summary: str
    """A sentence on what it is."""

    data: Mapping[str, str]
    settings: Mapping[str, str]
    results: Mapping[str, str]
    versions: Mapping[str, str]
    repeat: str
    """Command that makes it again."""

    example: str
    """A text for the usage example."""

    fits_transformers: bool = True
    """False if bertsmith alone computes the model."""

    use: str | None = None
    """How the model is used, in Markdown; None: by the pipeline of its task."""

    more: Mapping[str, str] = field(default_factory=dict)
    """Sections of Markdown by heading."""


def write_card(folder: Path, card: ModelCard) -> None:
    """Write `README.md` with the header that model hubs read."""
    parts = [
        "---",
        f"library_name: {'transformers' if card.fits_transformers else 'bertsmith'}",
        f"pipeline_tag: {card.task}",
        "tags: [bert, bertsmith]",
        "---",
        "",
        f"# {card.title}",
        "",
        card.summary,
        "",
        "## Use",
        "",
        *_usage(card),
        "",
    ]
    for heading, values in (
        ("Data", card.data),
        ("Settings", card.settings),
        ("Results", card.results),
        ("Versions", card.versions),
    ):
        parts += [f"## {heading}", "", "| what | value |", "| --- | --- |"]
        parts += [f"| {_cell(name)} | {_cell(value)} |" for name, value in values.items()]
        parts.append("")
    for heading, text in card.more.items():
        parts += [f"## {heading}", "", text, ""]
    parts += ["## Repeat", "", "```", card.repeat, "```", ""]
    write_text(folder / "README.md", "\n".join(parts))


def _usage(card: ModelCard) -> list[str]:
    if card.use is not None:
        return [card.use]
    if card.fits_transformers:
        return [
            "```python",
            "from transformers import pipeline",
            f'pipeline("{card.task}", model="model")({card.example!r})',
            "```",
        ]
    command = f"echo {shlex.quote(card.example)} | bertsmith predict --model model"
    return [
        "transformers cannot compute this model's head; bertsmith does:",
        "",
        "```",
        command,
        "```",
    ]


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")
