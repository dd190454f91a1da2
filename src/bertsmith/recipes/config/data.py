"""What the verbs are told that read raw data: `doctor` and `prepare`."""

from dataclasses import dataclass, field
from typing import Literal

from bertsmith.data.config import TableConfig
from bertsmith.recipes.config.values import check_at_least_one


@dataclass(frozen=True, kw_only=True)
class DoctorConfig:
    """Look data over before anything is trained on it: what is wrong, where, what to do."""

    data: str
    """Labelled table, pairs of texts to embed, tagged sentences (.conll, or lists of tokens and
    tags), questions on texts (SQuAD's .json, or a question a row), or a file or folder of texts."""

    eval: str | None = None
    """File to judge by: what has leaked into `data`, and labels that `data` lacks, are told."""

    kind: Literal["auto", "table", "pairs", "tagged", "questions", "text"] = "auto"
    """What the data is. auto: as endings and columns say; pairs: two texts a row and no label."""

    tokenizer: str | None = None
    """Hugging Face folder or hub name whose tokenizer measures lengths and finds unknown tokens;
    None: lengths are in words."""

    table: TableConfig = field(default_factory=TableConfig)

    documents: Literal["paragraph", "line"] = "paragraph"
    """A document of a .txt file: the text between blank lines, or a line."""

    json: bool = False
    """Print one JSON object instead of a table."""


@dataclass(frozen=True, kw_only=True)
class PrepareConfig:
    """Turn text into a tokenizer and token shards that pretraining reads."""

    output: str
    """Folder to write."""

    input: list[str] = field(default_factory=list)
    """Files, folders or globs: .txt, .jsonl or .parquet, plain, .gz or .zst."""

    documents: Literal["paragraph", "line"] = "paragraph"
    """A document of a .txt file: the text between blank lines, or a line."""

    text_field: str = "text"
    """Field of .jsonl files, column of .parquet files."""

    bad_bytes: Literal["error", "skip"] = "error"
    """What to do with a document that is not UTF-8: stop and name it, or skip and count it."""

    tokenizer: str | None = None
    """Hugging Face folder or hub name whose tokenizer to use; None: train one on the text."""

    vocab_size: int = 8192
    """Tokens of the trained tokenizer, five special ones included; fewer if the text is small."""

    chinese_words: Literal["auto", "jieba", "characters"] = "auto"
    """Where words begin in Chinese text, for masking by words: as jieba says (extra zh), or at each
    character. auto: jieba if it is installed, else characters; a folder keeps what it has."""

    lowercase: bool = True
    """Trained tokenizer without case and accents (uncased), or with both (cased)."""

    min_frequency: int = 2
    """How often two neighbours must occur in the text to become a token."""

    tokenizer_sample_mb: int = 50
    """Most text to train the tokenizer on, in 10^6 characters, taken evenly from all the input."""

    valid_share: float = 0.01
    """Share of documents held out for validation, chosen by their hash: adding text moves none.
    At least one is held out, unless the share is 0."""

    workers: int | None = None
    """Processes; None: as many as there are CPUs to use."""

    shard: str | None = None
    """i/n: do only the i-th of n parts of the work, on this machine; all must see the same input.
    Afterwards, join them."""

    join: list[str] = field(default_factory=list)
    """Folders in which all n shards have been done; instead of input, they make the output."""

    overwrite: bool = False
    """Replace what was prepared in `output` from other text or with other options."""

    def __post_init__(self) -> None:
        """Reject values out of range, before anything is read."""
        if not 32 <= self.vocab_size <= 1 << 24:
            raise ValueError(f"vocab_size is {self.vocab_size}; it must be from 32 to {1 << 24}")
        if not 0.0 <= self.valid_share < 1.0:
            raise ValueError(f"valid_share is {self.valid_share}; it must be at least 0, under 1")
        if self.chinese_words not in ("auto", "jieba", "characters"):
            raise ValueError(
                f"chinese_words is {self.chinese_words!r}; it must be auto, jieba or characters"
            )
        check_at_least_one(self, "min_frequency", "tokenizer_sample_mb", "workers")
        if self.shard is not None:
            left, _, right = self.shard.partition("/")
            if not (left.isdecimal() and right.isdecimal() and 1 <= int(left) <= int(right)):
                raise ValueError(f"shard is {self.shard!r}; it must be i/n, from 1/n to n/n")
