"""How text and tables are read, cut and hidden. Imports neither torch nor numpy."""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, kw_only=True)
class PackingConfig:
    """How sequences share a pack, the unit of one forward and backward pass."""

    tokens_per_pack: int = 4096
    """Most tokens in one pack. Belongs to the recipe: packs, masks and dropout follow from it."""

    max_sequence_tokens: int = 512
    """Longest sequence, special tokens included; longer documents are cut into pieces that each
    get their own special tokens, none dropped."""

    def __post_init__(self) -> None:
        """Reject what no pack can hold."""
        if self.max_sequence_tokens < 3:  # [CLS] x [SEP]
            raise ValueError(
                f"max_sequence_tokens is {self.max_sequence_tokens}; it must be at least 3"
            )
        if self.tokens_per_pack < self.max_sequence_tokens:
            raise ValueError(
                f"tokens_per_pack {self.tokens_per_pack} is below max_sequence_tokens "
                f"{self.max_sequence_tokens}; the longest sequence would fit no pack"
            )


@dataclass(frozen=True, kw_only=True)
class MaskingConfig:
    """What masked-language modelling hides (Devlin et al. 2019, section 3.1)."""

    share: float = 0.15
    """Exact share of ordinary tokens to predict, over 0 and under 1."""

    hide_share: float = 0.8
    """Of the predicted tokens, how many become [MASK]."""

    noise_share: float = 0.1
    """Of the predicted tokens, how many become a random ordinary token; the rest stay."""

    def __post_init__(self) -> None:
        """Reject shares that hide nothing or everything."""
        if not 0.0 < self.share < 1.0:
            raise ValueError(f"share is {self.share}; it must lie between 0 and 1, exclusive")
        if min(self.hide_share, self.noise_share) < 0 or self.hide_share + self.noise_share > 1:
            raise ValueError(
                f"hide_share {self.hide_share} and noise_share {self.noise_share} must be at "
                "least 0 and together at most 1"
            )


@dataclass(frozen=True, kw_only=True)
class TableConfig:
    """Where the columns of a labelled table are; None means found by name."""

    text_column: str | None = None
    """Column with the text."""

    pair_column: str | None = None
    """Column with the second text of a pair."""

    label_column: str | None = None
    """Column with the label."""

    columns: list[str] | None = None
    """Names of the columns of a CSV or TSV file that has no header line, e.g. [label, text]."""

    quoting: Literal["auto", "standard", "none"] = "auto"
    """Whether a double quote opens a quoted field. auto: yes in CSV, no in TSV (GLUE's way)."""

    bad_rows: Literal["error", "skip"] = "error"
    """What to do with a row that cannot be used: stop and name it, or skip and count."""
