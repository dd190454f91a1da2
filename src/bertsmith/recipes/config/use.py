"""What the verbs are told that use a fine-tuned model: `evaluate`, `predict` and `merge`."""

from dataclasses import dataclass, field

from bertsmith.data.config import TableConfig
from bertsmith.recipes.config.values import Device, check_at_least_one
from bertsmith.train.config import Precision


@dataclass(frozen=True, kw_only=True)
class UseConfig:
    """The part that evaluating and predicting share."""

    table: TableConfig = field(default_factory=TableConfig)

    max_sequence_tokens: int | None = None
    """Longest example, longer ones are cut; None: as in fine-tuning, windows included."""

    tokens_per_pack: int = 8192
    """Most tokens in one forward pass."""

    escape_formulas: bool = True
    """Put an apostrophe before CSV text that a spreadsheet program would run (= + - @ first)."""

    precision: Precision = "auto"
    """auto: bf16 where the hardware computes it fast, else fp32."""

    device: Device = "auto"
    """auto: the GPU if there is one."""

    def __post_init__(self) -> None:
        """Reject values out of range, before anything is loaded."""
        check_at_least_one(self, "tokens_per_pack")


@dataclass(frozen=True, kw_only=True)
class EvaluateConfig(UseConfig):
    """Score a fine-tuned model on a labelled table."""

    model: str
    """Folder of a fine-tuned model; with an adapter, of the base that it was trained on."""

    data: str
    """Labelled table."""

    adapter: str | None = None
    """Folder of a LoRA adapter to merge into the model: of a run, or of peft."""

    json: bool = False
    """Print one JSON object instead of tables."""

    bootstrap: int = 0
    """Tables to draw from the rows for confidence intervals (Efron 1979), such as 1000; 0: none."""

    seed: int = 0
    """What the bootstrap draws follows from it."""

    errors: str | None = None
    """CSV file to write the rows to that the model got wrong, worst first."""

    errors_rows: int = 1000
    """Most rows of that file."""

    overwrite: bool = False
    """Replace an `errors` file that exists."""

    def __post_init__(self) -> None:
        """Reject values out of range, before anything is loaded."""
        super().__post_init__()
        check_at_least_one(self, "errors_rows")
        if self.bootstrap < 0 or self.seed < 0:
            name = "bootstrap" if self.bootstrap < 0 else "seed"
            raise ValueError(f"{name} is {getattr(self, name)}; it must not be negative")


@dataclass(frozen=True, kw_only=True)
class PredictConfig(UseConfig):
    """Label the texts of a file or of standard input, in their order."""

    model: str
    """Folder of a fine-tuned model; with adapters, of the base that they were trained on."""

    data: str = "-"
    """Table, or plain text with one text a line (.txt); - reads lines from standard input."""

    adapter: list[str] = field(default_factory=list)
    """Folders of LoRA adapters to merge into the model: of runs, or of peft. Of several each gives
    columns of its own, which carry its name."""

    output: str = "-"
    """CSV or JSONL file to write, by its ending; - writes CSV to standard output. Tags and answers
    go into JSONL (.jsonl, or -), answers also into SQuAD's form of predictions (.json), embeddings
    into .npy or .jsonl."""

    overwrite: bool = False
    """Replace an output file that exists."""


@dataclass(frozen=True, kw_only=True)
class MergeConfig:
    """Merge a LoRA adapter into its base: a model folder that needs no adapter."""

    model: str
    """Folder or hub name of the base."""

    adapter: str
    """Folder of the adapter: of a run, or of peft."""

    output: str
    """Model folder to write."""

    overwrite: bool = False
    """Replace a model that is there."""
