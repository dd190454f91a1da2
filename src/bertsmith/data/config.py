"""How text and tables are read, cut and hidden. Imports neither torch nor numpy."""

from dataclasses import dataclass
from fractions import Fraction
from typing import Literal, get_args

MaskingSchedule = Literal["covering", "independent"]
MaskingUnit = Literal["token", "word", "span"]
MaskingFate = Literal["unit", "token"]
ShareSchedule = Literal["constant", "linear", "two_stage"]
Objective = Literal["mlm", "mlm+nsp", "mlm+sop"]
"""What pretraining asks: hidden tokens, and maybe whether a second segment comes next (BERT's) or
two segments stand in order (ALBERT's)."""

SHORTEST_PAIR = 5
"""Tokens of the shortest sequence of two segments: [CLS] x [SEP] x [SEP]."""


def has_pairs(objective: Objective) -> bool:
    """Whether sequences are two segments, of which one more thing is asked."""
    return objective != "mlm"


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
    """What masked-language modelling hides (Devlin et al. 2019, section 3.1); docs/masking.md."""

    share: float = 0.15
    """Exact share of ordinary tokens to predict, over 0 and under 1."""

    schedule: MaskingSchedule = "covering"
    """covering: without replacement over epochs, so that any 1 / share epochs in a row predict
    every token, and all are predicted as often. independent: drawn anew in every epoch."""

    unit: MaskingUnit = "token"
    """What is predicted together: a token, a whole word, or a span of words (SpanBERT's)."""

    fate: MaskingFate = "unit"
    """Whether the tokens of a word or span become [MASK], noise or stay all alike, or each by
    itself."""

    rare_boost: float = 0.0
    """Predicts rare tokens more often at the cost of frequent ones: chance ~ frequency^-rare_boost,
    within bounds, at the same share. 0: all alike."""

    share_schedule: ShareSchedule = "constant"
    """How the share moves from epoch to epoch. constant: not at all. linear: from `share` to
    `share_end` in `share_epochs`. two_stage: `share` for `share_epochs`, then `share_end`."""

    share_end: float | None = None
    """The later share of linear and two_stage."""

    share_epochs: int | None = None
    """Epochs after which it is reached."""

    hide_share: float = 0.8
    """Of the predicted tokens, how many become [MASK]."""

    noise_share: float = 0.1
    """Of the predicted tokens, how many become a random ordinary token; the rest stay."""

    def __post_init__(self) -> None:
        """Reject shares that hide nothing or everything, and halves of a schedule."""
        for name, share in (("share", self.share), ("share_end", self.share_end)):
            if share is not None and not 0.0 < share < 1.0:
                raise ValueError(f"{name} is {share}; it must lie between 0 and 1, exclusive")
        for name, kinds in (
            ("schedule", MaskingSchedule),
            ("unit", MaskingUnit),
            ("fate", MaskingFate),
            ("share_schedule", ShareSchedule),
        ):
            if getattr(self, name) not in get_args(kinds):
                raise ValueError(
                    f"{name} is {getattr(self, name)!r}; it must be one of "
                    f"{', '.join(get_args(kinds))}"
                )
        if min(self.hide_share, self.noise_share) < 0 or self.hide_share + self.noise_share > 1:
            raise ValueError(
                f"hide_share {self.hide_share} and noise_share {self.noise_share} must be at "
                "least 0 and together at most 1"
            )
        if not 0.0 <= self.rare_boost <= 2.0:
            raise ValueError(f"rare_boost is {self.rare_boost}; it must be from 0 (none) to 2")
        is_given = [self.share_end is not None, self.share_epochs is not None]
        if is_given != [self.share_schedule != "constant"] * 2:
            raise ValueError(
                f"share_schedule {self.share_schedule} goes with share_end and share_epochs: "
                "give both to linear and two_stage, and neither to constant"
            )
        if self.share_epochs is not None and self.share_epochs < 1:
            raise ValueError(f"share_epochs is {self.share_epochs}; it must be at least 1")

    def share_in(self, epoch: int) -> Fraction:
        """The share of an epoch, counted from 0; exactly the decimal number that was given."""
        first = Fraction(repr(self.share))
        if self.share_end is None or self.share_epochs is None:
            return first
        end = Fraction(repr(self.share_end))
        done = min(Fraction(epoch, self.share_epochs), Fraction(1))
        if self.share_schedule == "two_stage":
            return first if done < 1 else end
        return first + (end - first) * done

    @property
    def largest_share(self) -> float:
        """Of all epochs."""
        return max(self.share, self.share_end or 0.0)

    @property
    def is_classic(self) -> bool:
        """Whether each pack draws its tokens for itself, knowing no documents (Devlin et al.)."""
        return self.schedule == "independent" and self.unit == "token" and self.rare_boost == 0.0


@dataclass(frozen=True, kw_only=True)
class WindowConfig:
    """How tagged sentences that are longer than the model reads are read: in windows."""

    overlap_tokens: int | None = None
    """Tokens that a window shares with the one before, at least. None: a quarter of a window."""

    def __post_init__(self) -> None:
        """Reject what is none."""
        if self.overlap_tokens is not None and self.overlap_tokens < 0:
            raise ValueError(f"overlap_tokens is {self.overlap_tokens}; it must not be negative")


@dataclass(frozen=True, kw_only=True)
class TableConfig:
    """Where the columns of a labelled table are; None means found by name."""

    text_column: str | None = None
    """Column with the text."""

    pair_column: str | None = None
    """Column with the second text of a pair."""

    label_column: str | None = None
    """Column with the label."""

    label_columns: list[str] | None = None
    """Columns of one label each, which hold 1 where a text has it and 0 where not."""

    label_separator: str | None = None
    """What stands between the labels of a text in one column, such as |. None: | or , or ; if the
    table shows it."""

    columns: list[str] | None = None
    """Names of the columns of a CSV or TSV file that has no header line, e.g. [label, text]."""

    quoting: Literal["auto", "standard", "none"] = "auto"
    """Whether a double quote opens a quoted field. auto: yes in CSV, no in TSV (GLUE's way)."""

    bad_rows: Literal["error", "skip"] = "error"
    """What to do with a row that cannot be used: stop and name it, or skip and count."""

    def __post_init__(self) -> None:
        """Reject labels that are said to be in two places."""
        if self.label_columns is not None:
            if self.label_column is not None:
                raise ValueError("label_columns are given and label_column too; keep one of them")
            if len(self.label_columns) < 2:
                raise ValueError(
                    f"label_columns is {self.label_columns}; name at least two columns, or one "
                    "with label_column"
                )
        if self.label_separator is not None and not self.label_separator:
            raise ValueError("label_separator is empty; leave it out, or give a sign such as |")
