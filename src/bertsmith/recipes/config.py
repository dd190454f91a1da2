"""The whole configuration of each verb: what the command line and the YAML file can say.

Composed of the parts' own configs; this file only joins them. Imports neither torch nor numpy.
"""

import math
from dataclasses import dataclass, field
from typing import Literal, get_args

from bertsmith.checkpoint.config import SaveConfig
from bertsmith.data.config import (
    SHORTEST_PAIR,
    MaskingConfig,
    Objective,
    PackingConfig,
    TableConfig,
    has_pairs,
)
from bertsmith.data.windows import WindowConfig
from bertsmith.model.checkpointing import parse_checkpointing
from bertsmith.model.config import HeadConfig, LoraConfig
from bertsmith.model.parts import HEAD, read_parts
from bertsmith.parallel.config import ParallelConfig
from bertsmith.tasks.config import (
    AnswerConfig,
    DecideConfig,
    EmbeddingConfig,
    LossConfig,
    TaskName,
    known_monitors,
    known_tasks,
)
from bertsmith.train.config import EvalConfig, GuardConfig, OptimConfig, Precision

Device = Literal["auto", "cpu", "cuda"]


@dataclass(frozen=True, kw_only=True)
class PretrainConfig:
    """Train an encoder on prepared text by masked-language modelling."""

    data: str
    """Folder that `bertsmith prepare` wrote."""

    model: str
    """A preset (bert-tiny, mini, small, medium, base, large), a config.json, a checkpoint folder
    or a Hugging Face hub name."""

    output: str
    """Run folder to write."""

    steps: int | None = None
    """Budget in optimizer steps. Give one of steps, tokens, epochs, minutes."""

    tokens: int | None = None
    """Budget in real tokens."""

    epochs: float | None = None
    """Budget in passes over the data."""

    minutes: float | None = None
    """Budget in minutes of training; the schedule fits the time that is left."""

    tokens_per_step: int = 8192
    """Real tokens behind one optimizer step: whole packs, as many as fit."""

    micro_batch: int | Literal["auto"] = "auto"
    """Most tokens in one forward and backward pass: packs are cut between sequences, which changes
    nothing but rounding. auto: whole packs, or a half, a quarter, ... of one: the largest that is
    planned to fit, tried before the first step. Whatever it is, it is halved where it does not fit
    after all."""

    hidden_dropout_prob: float | None = None
    """Overrides the model's dropout on the residual stream."""

    attention_probs_dropout_prob: float | None = None
    """Overrides the model's dropout on attention."""

    objective: Objective = "mlm"
    """What is learned. mlm: to name hidden tokens. mlm+nsp: also whether a second segment comes
    next in the text or is of another document (BERT). mlm+sop: also whether two segments stand in
    order or swapped (ALBERT)."""

    packing: PackingConfig = field(default_factory=PackingConfig)
    masking: MaskingConfig = field(default_factory=MaskingConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    save: SaveConfig = field(default_factory=SaveConfig)
    guard: GuardConfig = field(default_factory=GuardConfig)
    eval: EvalConfig = field(default_factory=EvalConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)

    freeze: str | None = None
    """Parts that stay as they are, such as embeddings,0-5 (layers count from 0). What lies below
    the lowest trained part keeps nothing for the backward pass."""

    checkpointing: str = "none"
    """What blocks keep for the backward pass: less memory for more time, the same result.
    none: all. selective: half. full: one tensor a block. every:N: each N-th block is as in full.
    budget:X: at most the share X of none, picked by block."""

    precision: Precision = "auto"
    """auto: bf16 where the hardware computes it fast, else fp32."""

    device: Device = "auto"
    """auto: the GPU if there is one."""

    seed: int = 0
    """Everything random follows from it: order, packs, masks, dropout, new weights."""

    log_every_steps: int = 10
    """Steps between lines of metrics.jsonl."""

    resume: bool = False
    """Go on from the newest checkpoint in `output`; start anew where there is none."""

    resume_override: list[str] = field(default_factory=list)
    """--resume.override on the command line: settings that may differ from the run's own, by key;
    `data` and `tokenizer` name changed data."""

    overwrite: bool = False
    """Replace what another run left in `output`."""

    def __post_init__(self) -> None:
        """Reject values out of range, before anything is loaded."""
        _check_at_least_one(self, "tokens_per_step", "log_every_steps")
        if self.tokens_per_step < self.packing.tokens_per_pack:
            raise ValueError(
                f"tokens_per_step {self.tokens_per_step} is below packing.tokens_per_pack "
                f"{self.packing.tokens_per_pack}; a step has at least one pack, so lower that too"
            )
        _check_objective(self.objective, self.packing)
        _check_training(self)


@dataclass(frozen=True, kw_only=True)
class SearchConfig:
    """What to try for the best settings; an empty list leaves its option as it is given."""

    trials: int = 0
    """Fine-tunings to try; 0: no search. Needs Optuna, the extra `search`."""

    learning_rate: list[float] = field(default_factory=lambda: [1e-5, 5e-4])
    """From and to of optim.learning_rate, drawn by its logarithm."""

    layer_decay: list[float] = field(default_factory=lambda: [0.7, 1.0])
    """From and to of optim.layer_decay."""

    epochs: list[float] = field(default_factory=lambda: [2.0, 3.0, 5.0])
    """Values of epochs."""

    examples_per_step: list[int] = field(default_factory=lambda: [16, 32, 64])
    """Values of examples_per_step."""

    def __post_init__(self) -> None:
        """Reject ranges that are none, before anything is loaded."""
        if self.trials < 0:
            raise ValueError(f"trials is {self.trials}; it must not be negative")
        for name, most in (("learning_rate", math.inf), ("layer_decay", 1.0)):
            ends: list[float] = getattr(self, name)
            is_range = len(ends) <= 2 and ends == sorted(ends)
            if not is_range or not all(0.0 < end <= most and end < math.inf for end in ends):
                raise ValueError(f"{name} is {ends}; it must be [from, to], over 0, or empty")
        for values, name in (
            (self.epochs, "epochs"),
            (self.examples_per_step, "examples_per_step"),
        ):
            if not all(0 < value < math.inf for value in values) or len(set(values)) < len(values):
                raise ValueError(f"{name} is {values}; its values must be over 0, each one once")


@dataclass(frozen=True, kw_only=True)
class FinetuneConfig:
    """Train a model of texts, or of pairs of texts, from a checkpoint and a labelled table."""

    model: str
    """Checkpoint folder (bertsmith's or Hugging Face's) or a hub name."""

    data: str
    """Labelled table: CSV, TSV, JSONL or Parquet, also gzip or zstd; tagged sentences; or questions
    on texts, such as SQuAD's JSON."""

    output: str
    """Run folder to write."""

    eval: str | None = None
    """Labelled table to judge by; None: a part of `data` is held out, each label in proportion."""

    task: TaskName = "auto"
    """classification: one class a text. multilabel: any number of labels. regression: a number.
    tokens: a tag a word, from CoNLL files or lists of tokens and tags. questions: the answer to a
    question in a text, from SQuAD's JSON or a question a row. embedding: a vector a text, from
    pairs. auto: any but the last, as the form and the labels of `data` show, which is said."""

    holdout_share: float = 0.1
    """Share of `data` held out when no eval table is given."""

    epochs: float = 3.0
    """Passes over the data."""

    steps: int | None = None
    """Budget in optimizer steps; overrides epochs."""

    examples_per_step: int = 32
    """Examples behind one optimizer step."""

    max_sequence_tokens: int | None = None
    """Longest example, special tokens included; longer ones are cut, counted and reported, unless
    `window.overlap_tokens` is given too. None: the model's limit, and longer texts are read in
    windows."""

    tokens_per_pack: int = 4096
    """Most tokens in one pack; a step is as many packs as it needs."""

    micro_batch: int | Literal["auto"] = "auto"
    """Most tokens in one forward and backward pass: packs are cut between examples, which changes
    nothing but rounding. auto: whole packs, or a half, a quarter, ... of one: the largest that is
    planned to fit, tried before the first step. Whatever it is, it is halved where it does not fit
    after all."""

    monitor: str = "auto"
    """Metric that picks the best checkpoint and stops early. auto: accuracy; of several labels a
    text average_precision; of numbers spearman; of tags of spans span_f1."""

    patience: int | None = 6
    """Evaluations with neither a better `monitor` nor a lower loss before training stops; None:
    never. At two an epoch six are three epochs."""

    table: TableConfig = field(default_factory=TableConfig)
    window: WindowConfig = field(default_factory=WindowConfig)
    head: HeadConfig = field(default_factory=HeadConfig)
    lora: LoraConfig = field(default_factory=LoraConfig)
    loss: LossConfig = field(default_factory=LossConfig)
    decide: DecideConfig = field(default_factory=DecideConfig)
    answer: AnswerConfig = field(default_factory=AnswerConfig)
    embedding: EmbeddingConfig = field(default_factory=EmbeddingConfig)
    optim: OptimConfig = field(
        default_factory=lambda: OptimConfig(
            learning_rate=1e-4, warmup_share=0.1, beta2=0.999, eps=1e-8
        )
    )
    save: SaveConfig = field(default_factory=SaveConfig)
    guard: GuardConfig = field(default_factory=GuardConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    hidden_dropout_prob: float | None = None
    """Overrides the model's dropout on the residual stream."""

    attention_probs_dropout_prob: float | None = None
    """Overrides the model's dropout on attention."""

    eval_every_steps: int | None = None
    """Steps between evaluations; None: twice an epoch, and at the end."""

    freeze: str | None = None
    """Parts that stay as they are, such as embeddings,0-5 (layers count from 0). What lies below
    the lowest trained part keeps nothing for the backward pass."""

    checkpointing: str = "none"
    """What blocks keep for the backward pass: less memory for more time, the same result.
    none: all. selective: half. full: one tensor a block. every:N: each N-th block is as in full.
    budget:X: at most the share X of none, picked by block."""

    precision: Precision = "auto"
    """auto: bf16 where the hardware computes it fast, else fp32."""

    device: Device = "auto"
    """auto: the GPU if there is one."""

    seed: int = 0
    """Everything random follows from it: order, packs, dropout, the new head."""

    seeds: int = 1
    """Fine-tune with so many seeds, from `seed` on, each in a folder of its own; say mean and
    spread, and keep the best in model/."""

    search: SearchConfig = field(default_factory=SearchConfig)

    keep_models: Literal["best", "all"] = "best"
    """Of `seeds` or `search`: whose weights stay."""

    log_every_steps: int = 10
    """Steps between lines of metrics.jsonl."""

    resume: bool = False
    """Go on from the newest checkpoint in `output`; start anew where there is none."""

    resume_override: list[str] = field(default_factory=list)
    """--resume.override on the command line: settings that may differ from the run's own, by key;
    `data` and `tokenizer` name changed data."""

    overwrite: bool = False
    """Replace what another run left in `output`."""

    def __post_init__(self) -> None:
        """Reject values out of range, before anything is loaded."""
        if self.monitor not in ("auto", *known_monitors()):
            known = ", ".join(known_monitors())
            raise ValueError(f"monitor is {self.monitor!r}; it must be one of auto, {known}")
        if self.task not in known_tasks():
            raise ValueError(f"task is {self.task!r}; it must be one of {', '.join(known_tasks())}")
        if not 0.0 < self.holdout_share < 1.0:
            raise ValueError(f"holdout_share is {self.holdout_share}; it must be over 0, under 1")
        if not 0.0 < self.epochs < math.inf:
            raise ValueError(f"epochs is {self.epochs}; it must be over 0")
        _check_at_least_one(
            self,
            "steps",
            "examples_per_step",
            "tokens_per_pack",
            "patience",
            "eval_every_steps",
            "log_every_steps",
            "seeds",
        )
        if self.seeds > 1 and self.search.trials:
            raise ValueError(f"seeds is {self.seeds} and search.trials is given; give one of them")
        if self.is_several and self.parallel.devices not in (1, "auto"):
            raise ValueError(
                f"devices is {self.parallel.devices}; seeds and search.trials train on one device"
            )
        _check_training(self)
        if self.lora.is_on:
            _check_lora(self)
        if self.task == "embedding":
            _check_embedding(self)
        if self.micro_batch != "auto" and self.head.norm == "batch":
            raise ValueError(
                "micro_batch cannot be set with head.norm batch, whose statistics are those of a "
                "whole pack; set tokens_per_pack"
            )

    @property
    def is_several(self) -> bool:
        """Whether it asks for several runs, of `seeds` or of `search`."""
        return self.seeds > 1 or self.search.trials > 0


@dataclass(frozen=True, kw_only=True)
class EvaluateConfig:
    """Score a fine-tuned model on a labelled table."""

    model: str
    """Folder of a fine-tuned model; with an adapter, of the base that it was trained on."""

    data: str
    """Labelled table."""

    adapter: str | None = None
    """Folder of a LoRA adapter to merge into the model: of a run, or of peft."""

    table: TableConfig = field(default_factory=TableConfig)

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

    escape_formulas: bool = True
    """Put an apostrophe before CSV text that a spreadsheet program would run (= + - @ first)."""

    overwrite: bool = False
    """Replace an `errors` file that exists."""

    max_sequence_tokens: int | None = None
    """Longest example, longer ones are cut; None: as in fine-tuning, windows included."""

    tokens_per_pack: int = 8192
    """Most tokens in one forward pass."""

    precision: Precision = "auto"
    """auto: bf16 where the hardware computes it fast, else fp32."""

    device: Device = "auto"
    """auto: the GPU if there is one."""

    def __post_init__(self) -> None:
        """Reject values out of range, before anything is loaded."""
        _check_at_least_one(self, "tokens_per_pack", "errors_rows")
        if self.bootstrap < 0 or self.seed < 0:
            name = "bootstrap" if self.bootstrap < 0 else "seed"
            raise ValueError(f"{name} is {getattr(self, name)}; it must not be negative")


@dataclass(frozen=True, kw_only=True)
class DoctorConfig:
    """Look data over before anything is trained on it: what is wrong, where, what to do."""

    data: str
    """Labelled table, tagged sentences (.conll, or lists of tokens and tags), questions on texts
    (SQuAD's .json, or a question a row), or a file or folder of texts."""

    eval: str | None = None
    """File to judge by: what has leaked into `data`, and labels that `data` lacks, are told."""

    kind: Literal["auto", "table", "tagged", "questions", "text"] = "auto"
    """What the data is. auto: as endings and columns say."""

    tokenizer: str | None = None
    """Hugging Face folder or hub name whose tokenizer measures lengths and finds unknown tokens;
    None: lengths are in words."""

    table: TableConfig = field(default_factory=TableConfig)

    documents: Literal["paragraph", "line"] = "paragraph"
    """A document of a .txt file: the text between blank lines, or a line."""

    json: bool = False
    """Print one JSON object instead of a table."""


@dataclass(frozen=True, kw_only=True)
class PredictConfig:
    """Label the texts of a file or of standard input, in their order."""

    model: str
    """Folder of a fine-tuned model; with adapters, of the base that they were trained on."""

    data: str = "-"
    """Table, or plain text with one text a line (.txt); - reads lines from standard input."""

    adapter: list[str] = field(default_factory=list)
    """Folders of LoRA adapters to merge into the model: of runs, or of peft. Of several each gives
    columns of its own, which carry its name."""

    output: str = "-"
    """CSV or JSONL file to write, by its ending; - writes CSV to standard output. Answers go into
    JSONL (.jsonl, or -), or into SQuAD's form of predictions (.json)."""

    table: TableConfig = field(default_factory=TableConfig)

    max_sequence_tokens: int | None = None
    """Longest example, longer ones are cut; None: as in fine-tuning, windows included."""

    tokens_per_pack: int = 8192
    """Most tokens in one forward pass."""

    escape_formulas: bool = True
    """Put an apostrophe before CSV text that a spreadsheet program would run (= + - @ first)."""

    overwrite: bool = False
    """Replace an output file that exists."""

    precision: Precision = "auto"
    """auto: bf16 where the hardware computes it fast, else fp32."""

    device: Device = "auto"
    """auto: the GPU if there is one."""

    def __post_init__(self) -> None:
        """Reject values out of range, before anything is loaded."""
        _check_at_least_one(self, "tokens_per_pack")


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


@dataclass(frozen=True, kw_only=True)
class CoverageConfig:
    """Say which positions and tokens a masking will have predicted, without training."""

    data: str
    """Folder that `bertsmith prepare` wrote."""

    epochs: float
    """Passes over the data."""

    objective: Objective = "mlm"
    """As in pretraining: pairs of segments leave one token fewer for text in a sequence."""

    packing: PackingConfig = field(default_factory=PackingConfig)
    masking: MaskingConfig = field(default_factory=MaskingConfig)

    tokens_per_step: int = 8192
    """As in pretraining; matters where the last epoch is not whole."""

    seed: int = 0
    """As in pretraining."""

    sample_tokens: int = 1 << 22
    """About the most tokens to count; of a larger text, those of documents from all over it."""

    plot: str | None = None
    """SVG file to draw the types' predictions over their occurrences in."""

    json: bool = False
    """Print one JSON object instead of text."""

    def __post_init__(self) -> None:
        """Reject values out of range, before anything is loaded."""
        _check_at_least_one(self, "tokens_per_step", "sample_tokens")
        _check_objective(self.objective, self.packing)
        if not 0.0 < self.epochs < math.inf:
            raise ValueError(f"epochs is {self.epochs}; it must be over 0")
        if self.seed < 0:
            raise ValueError(f"seed is {self.seed}; it must not be negative")


@dataclass(frozen=True, kw_only=True)
class FillConfig:
    """Name the words that texts hide as [MASK], with their probabilities."""

    model: str
    """Folder of a pretrained model, its run folder, or a hub name."""

    texts: list[str] = field(default_factory=list)
    """Texts with [MASK]; the first words of the command line."""

    data: str | None = None
    """File of texts instead, one a line; - reads standard input."""

    top_k: int = 5
    """Tokens to name for each [MASK]."""

    json: bool = False
    """Print one JSON object instead of tables."""

    tokens_per_pack: int = 8192
    """Most tokens in one forward pass."""

    precision: Precision = "fp32"
    """fp32 is exact; bf16 and auto are faster where the hardware has them."""

    device: Device = "auto"
    """auto: the GPU if there is one."""

    def __post_init__(self) -> None:
        """Reject values out of range, before anything is loaded."""
        _check_at_least_one(self, "top_k", "tokens_per_pack")


@dataclass(frozen=True, kw_only=True)
class ScoreConfig:
    """Say how likely a pretrained model finds sentences (pseudo-perplexity)."""

    model: str
    """Folder of a pretrained model, its run folder, or a hub name."""

    texts: list[str] = field(default_factory=list)
    """Texts; the first words of the command line."""

    data: str | None = None
    """File of texts instead, one a line; - reads standard input."""

    json: bool = False
    """Print one JSON object instead of a table."""

    tokens_per_pack: int = 8192
    """Most tokens in one forward pass; a text of n tokens is read n times."""

    precision: Precision = "fp32"
    """fp32 is exact; bf16 and auto are faster where the hardware has them."""

    device: Device = "auto"
    """auto: the GPU if there is one."""

    def __post_init__(self) -> None:
        """Reject values out of range, before anything is loaded."""
        _check_at_least_one(self, "tokens_per_pack")


@dataclass(frozen=True, kw_only=True)
class PlanOptions:
    """What a plan is told besides the run that it is of."""

    output: str = ""
    """Not used: a run's own file may be given as --config."""

    device: str = "this"
    """A device by name (h200, h100, a100-80, l4, t4, rtx-4090, ...), an amount of memory (16GiB),
    or this: the GPU of this machine if there is one, else its CPU."""

    flop_per_second: float | None = None
    """What the device computes in training; None: measured here on a CPU, and for a GPU a share of
    its published rate."""

    price_per_hour: float | None = None
    """Of one device, in any currency; gives the cost of the run."""

    json: bool = False
    """Print one JSON object instead of text."""

    def __post_init__(self) -> None:
        """Reject values out of range."""
        rate, price = self.flop_per_second, self.price_per_hour
        if rate is not None and not 0.0 < rate < math.inf:
            raise ValueError(f"flop_per_second is {rate}; it must be over 0")
        if price is not None and not 0.0 <= price < math.inf:
            raise ValueError(f"price_per_hour is {price}; it must not be negative")


@dataclass(frozen=True, kw_only=True)
class PlanPretrainConfig(PlanOptions, PretrainConfig):
    """Say what memory and time a run will need, before either is spent."""

    data: str = ""
    """Folder that `bertsmith prepare` wrote; it is asked for its vocabulary and its tokens. None
    given: the preset's vocabulary."""

    def __post_init__(self) -> None:
        """Reject values out of range."""
        PretrainConfig.__post_init__(self)
        PlanOptions.__post_init__(self)


@dataclass(frozen=True, kw_only=True)
class PlanFinetuneConfig(PlanOptions, FinetuneConfig):
    """Say what memory and time a fine-tuning will need, before either is spent."""

    data: str = ""
    """Not read: --examples says how many there are."""

    examples: int | None = None
    """Examples of the table; None: not known, and the time of the whole run is not said."""

    labels: int = 2
    """Classes."""

    table_rows: int | None = None
    """Different tokens in the texts, whose rows of the token table are trained; None: at most all
    of them."""

    def __post_init__(self) -> None:
        """Reject values out of range."""
        FinetuneConfig.__post_init__(self)
        _check_at_least_one(self, "examples", "labels", "table_rows")
        PlanOptions.__post_init__(self)


@dataclass(frozen=True, kw_only=True)
class SelftestConfig:
    """Prove on this machine that several devices give one device's result."""

    what: Literal["parallel"] = "parallel"
    """What to prove."""

    steps: int = 20
    """Optimizer steps of each small training."""

    parallel: ParallelConfig = field(default_factory=lambda: ParallelConfig(devices="auto"))

    device: Device = "auto"
    """auto: the GPUs if there are any."""

    def __post_init__(self) -> None:
        """Reject values out of range."""
        _check_at_least_one(self, "steps")


@dataclass(frozen=True, kw_only=True)
class DemoConfig:
    """Run the whole path on the docstrings of the installed Python packages; no download."""

    output: str = "demo"
    """Folder to write."""

    minutes: float = 8.0
    """Time for the whole demo, about."""

    seeds: int = 3
    """Fine-tuning runs on each side of the comparison."""

    overwrite: bool = False
    """Replace what another demo left in `output`."""


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
        _check_at_least_one(self, "min_frequency", "tokenizer_sample_mb", "workers")
        if self.shard is not None:
            left, _, right = self.shard.partition("/")
            if not (left.isdecimal() and right.isdecimal() and 1 <= int(left) <= int(right)):
                raise ValueError(f"shard is {self.shard!r}; it must be i/n, from 1/n to n/n")


def _check_at_least_one(config: object, *names: str) -> None:
    for name in names:
        value = getattr(config, name)
        if value is not None and value < 1:
            raise ValueError(f"{name} is {value}; it must be at least 1")


def _check_freeze(freeze: str | None) -> None:
    if freeze is None:
        return
    try:
        parts = read_parts(freeze)
    except ValueError as error:
        raise ValueError(f"freeze is {freeze!r}: {error}") from error
    if HEAD in parts:
        raise ValueError(f"freeze is {freeze!r}; the head is always trained")


def _check_objective(objective: Objective, packing: PackingConfig) -> None:
    """Reject what is none, and sequences too short for two segments."""
    if objective not in get_args(Objective):
        raise ValueError(
            f"objective is {objective!r}; it must be one of {', '.join(get_args(Objective))}"
        )
    if has_pairs(objective) and packing.max_sequence_tokens < SHORTEST_PAIR:
        raise ValueError(
            f"objective {objective} needs packing.max_sequence_tokens of at least {SHORTEST_PAIR}, "
            f"for [CLS] x [SEP] x [SEP]; it is {packing.max_sequence_tokens}"
        )


def _check_embedding(config: FinetuneConfig) -> None:
    if config.head.norm != "none":
        raise ValueError("head.norm is for tasks with scores, not for task embedding")
    if config.examples_per_step < 2:
        raise ValueError(
            "examples_per_step is 1; with task embedding the negatives of a pair are the others of "
            "its step: give 2 at least, better 32 or more"
        )


def _check_lora(config: FinetuneConfig) -> None:
    if config.freeze is not None:
        raise ValueError(
            f"freeze is {config.freeze!r}, and with lora.rank {config.lora.rank} the whole encoder "
            "is frozen; leave one of them out"
        )
    if config.head.norm != "none":
        raise ValueError(
            f"head.norm is {config.head.norm}, which an adapter's file has no place for; leave it "
            "out, or lora.rank"
        )
    if config.parallel.strategy in ("dp", "fsdp"):
        raise ValueError(
            f"parallel.strategy is {config.parallel.strategy}, and with lora.rank it can be ddp "
            "alone: every device holds the base, and nearly no gradients"
        )


def _check_training(config: PretrainConfig | FinetuneConfig) -> None:
    parse_checkpointing(config.checkpointing)
    _check_freeze(config.freeze)
    if config.micro_batch != "auto" and config.micro_batch < 1:
        raise ValueError(f"micro_batch is {config.micro_batch}; it must be at least 1, or auto")
    if config.resume_override and not config.resume:
        raise ValueError("resume_override is given without resume; give --resume too")
    if config.seed < 0:
        raise ValueError(f"seed is {config.seed}; it must not be negative")
    for name in ("hidden_dropout_prob", "attention_probs_dropout_prob"):
        value = getattr(config, name)
        if value is not None and not 0.0 <= value < 1.0:
            raise ValueError(f"{name} is {value}; it must be in [0, 1)")
