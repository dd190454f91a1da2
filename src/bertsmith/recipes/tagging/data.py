"""From files of tagged sentences to what fine-tuning learns from and is judged by."""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from bertsmith.data.config import TableConfig
from bertsmith.data.examples import Examples
from bertsmith.data.scores import HASH_BYTES
from bertsmith.data.tagging.schemes import Found, in_iob2, tag_names
from bertsmith.data.tagging.sentences import Sentence, TaggedFile, form_of, read_tagged
from bertsmith.data.tagging.windows import (
    FRAME_TOKENS,
    TaggingSteps,
    Windows,
    WindowTokenizer,
)
from bertsmith.data.tokenizer import TextTokenizer
from bertsmith.data.windows import WindowConfig, overlap_of
from bertsmith.errors import UserError
from bertsmith.hf import read_config
from bertsmith.model.objectives import CrossEntropy
from bertsmith.recipes.config import FinetuneConfig
from bertsmith.recipes.model_folder import fitting_tokenizer, longest_example
from bertsmith.tasks.classification import cross_entropy_of
from bertsmith.tasks.config import DecideConfig
from bertsmith.tasks.tagging import Tagging


@dataclass(frozen=True, kw_only=True)
class TaggedPart:
    """The sentences that are learned from, or those that are judged by."""

    path: Path
    table: Sequence[Sentence]
    windows: Windows
    tags_W: Tensor
    """Tag id of each word, int64."""

    @property
    def examples(self) -> Examples:
        """A window each."""
        return self.windows.examples


@dataclass(frozen=True, kw_only=True)
class TaggedTables:
    """What the files are, for people, and what follows from them."""

    kind: Tagging
    labels: tuple[str, ...]
    objective: CrossEntropy
    """The loss, its weights taken from the words to learn from."""

    lines: tuple[str, ...]
    num_leaked: int
    """Sentences to judge by that stand in the training part too."""

    def describe(self) -> list[str]:
        """What a person should know before training, a line each."""
        return list(self.lines)


@dataclass(frozen=True, kw_only=True)
class TaggingData:
    """The task, tokenised."""

    tables: TaggedTables
    train: TaggedPart
    dev: TaggedPart
    steps: TaggingSteps
    longest: int
    """Most tokens of a window."""

    overlap_tokens: int
    """That the windows of a longer sentence share, at least."""

    tokenizer: TextTokenizer
    fingerprint: str

    @property
    def longest_example(self) -> int:
        """Tokens of the longest window there is, in either part."""
        return max(int(part.examples.lengths_N.max()) for part in (self.train, self.dev))

    def most_tokens(self, num_examples: int) -> int:
        """Tokens that so many windows to learn from have together, at most."""
        lengths_N = self.train.examples.lengths_N
        return int(lengths_N.topk(min(num_examples, len(lengths_N))).values.sum())


def is_tagging(config: FinetuneConfig) -> bool:
    """Whether words are to be tagged: as is asked, or as the form of the data shows.

    Raises:
        UserError: The data cannot be read, or is of another form than is asked for.
    """
    if config.task not in ("auto", "tokens"):
        return False
    return form_of(Path(config.data), is_asked=config.task == "tokens") is not None


def open_tagging(config: FinetuneConfig, source: Path, *, at_once: int) -> TaggingData:
    """Read, check and tokenise the files.

    Args:
        config: Names them.
        source: Folder of the checkpoint, whose tokenizer is used.
        at_once: Devices that share a step.

    Raises:
        UserError: A file, the tokenizer or a setting does not fit.
    """
    _refuse_what_is_not_for_tags(config)
    shape = read_config(source)
    tokenizer = fitting_tokenizer(source, shape)
    longest = longest_example(
        config.max_sequence_tokens, shape.max_position_embeddings, is_pair=False
    )
    overlap = overlap_of(config.window, longest=longest, num_special=FRAME_TOKENS)
    encoder = WindowTokenizer(tokenizer, max_sequence_tokens=longest, overlap_tokens=overlap)
    file, found = read_found(Path(config.data), config.table, encoder)
    kind = Tagging(has_spans=found.has_spans)
    labels = tag_names(found)
    if len(labels) < 2:
        raise UserError(f"{file.path}: every word has the tag {labels[0]!r}; nothing to learn")
    lines = [
        f"task: tokens, {'as --task says' if config.task == 'tokens' else _why(file)}",
        *describe_file(file, found),
    ]
    train: Sequence[Sentence] = found.sentences
    dev: Sequence[Sentence]
    if config.eval is None:
        learned, held = hashed_parts(
            found.sentences, share=config.holdout_share, seed=config.seed, path=file.path
        )
        train, dev, dev_path = learned, held, file.path
    else:
        dev_path = Path(config.eval)
        dev_file, dev_found = read_found(dev_path, config.table, encoder)
        dev = dev_found.sentences
        lines += describe_file(dev_file, dev_found)
    train_part = encode_part(train, labels, encoder, path=file.path, known_from=config.data)
    dev_part = encode_part(dev, labels, encoder, path=dev_path, known_from=config.data)
    where = f"held out of it, {kind.holdout_said}" if config.eval is None else str(dev_path)
    known = {sentence.words for sentence in train}
    num_leaked = sum(sentence.words in known for sentence in dev)
    lines += [
        f"training: {len(train):,} sentences, {len(train_part.tags_W):,} words of {file.path}",
        f"judging: {len(dev):,} sentences, {len(dev_part.tags_W):,} words, {where}",
        f"tags: {len(labels)}"
        + (f", of {len(labels) // 2} types of spans" if kind.has_spans else ""),
    ]
    for name, part in (("training", train_part), ("judging", dev_part)):
        lines += describe_odd_words(name, part.windows)
    if num_leaked:
        lines.append(
            f"warning: {num_leaked:,} of the {len(dev):,} sentences to judge by stand in the "
            "training part too; the scores flatter"
        )
    objective = cross_entropy_of(config.loss, train_part.tags_W, labels)
    return TaggingData(
        tables=TaggedTables(
            kind=kind,
            labels=labels,
            objective=objective,
            lines=tuple(lines),
            num_leaked=num_leaked,
        ),
        train=train_part,
        dev=dev_part,
        steps=TaggingSteps(
            train_part.windows,
            train_part.tags_W,
            examples_per_step=config.examples_per_step,
            tokens_per_pack=config.tokens_per_pack,
            seed=config.seed,
            at_once=at_once,
            weights_W=objective.weights(train_part.tags_W),
        ),
        longest=longest,
        overlap_tokens=overlap,
        tokenizer=tokenizer,
        fingerprint=_fingerprint(train, dev),
    )


def as_tagging(config: FinetuneConfig, kind: Tagging) -> FinetuneConfig:
    """The config with what `auto` came to.

    Raises:
        UserError: The task has not the metric that is asked for.
    """
    monitor = kind.monitor if config.monitor == "auto" else config.monitor
    known = kind.monitors
    if monitor not in known:
        raise UserError(
            f"--monitor {monitor}: these tags have no such metric; take one of {', '.join(known)}"
        )
    return replace(config, task=kind.name, monitor=monitor)


def read_found(
    path: Path, config: TableConfig, encoder: WindowTokenizer
) -> tuple[TaggedFile, Found]:
    """A file of tagged sentences, and its tags in the scheme that is learned."""
    file = read_tagged(path, config, split=encoder.split)
    return file, in_iob2(file.sentences, path=path)


def describe_file(file: TaggedFile, found: Found) -> list[str]:
    """What a person should know of a file."""
    lines = found.describe(file.path)
    if file.num_widened:
        lines.append(
            f"warning: spans of {file.path} that begin or end inside a word: {file.num_widened:,}; "
            "the whole word is taken"
        )
    if file.skipped_rows:
        lines.append(
            f"sentences of {file.path} that were skipped: {file.skipped_rows:,}; the first: "
            f"{file.first_skipped}"
        )
    return lines


def describe_odd_words(name: str, windows: Windows) -> list[str]:
    """What a person should know of words that the tokenizer does not read; no line for none."""
    if not windows.num_unreadable:
        return []
    return [
        f"{name}: of {windows.num_unreadable:,} words the tokenizer leaves nothing; they are "
        "read as unknown"
    ]


def encode_part(
    sentences: Sequence[Sentence],
    labels: Sequence[str],
    encoder: WindowTokenizer,
    *,
    path: Path,
    known_from: str,
) -> TaggedPart:
    """Tokenise sentences and number their tags.

    Raises:
        UserError: A tag is none of the labels.
    """
    ids = {name: i for i, name in enumerate(labels)}
    tags: list[int] = []
    for sentence in sentences:
        for i, tag in enumerate(sentence.tags):
            if tag not in ids:
                shown = ", ".join(labels[:8]) + (", ..." if len(labels) > 8 else "")
                raise UserError(
                    f"{path}:{sentence.lines[i]}: the tag {tag!r} does not occur in {known_from}, "
                    f"which has {shown}"
                )
            tags.append(ids[tag])
    return TaggedPart(
        path=path,
        table=sentences,
        windows=encoder.encode([sentence.words for sentence in sentences]),
        tags_W=torch.tensor(tags),
    )


def hashed_parts(
    sentences: Sequence[Sentence], *, share: float, seed: int, path: Path
) -> tuple[list[Sentence], list[Sentence]]:
    """Split sentences into those to learn from and those held out, by a hash of their words.

    Raises:
        UserError: A single sentence.
    """
    if len(sentences) < 2:
        raise UserError(
            f"{path}: no sentence can be held out to judge by: there is a single one; give more, "
            "or a file with --eval"
        )

    def key(row: int) -> tuple[bytes, int]:
        content = json.dumps([seed, sentences[row].words])
        return hashlib.blake2b(content.encode(), digest_size=HASH_BYTES).digest(), row

    num_held = min(max(1, round(share * len(sentences))), len(sentences) - 1)
    held = set(sorted(range(len(sentences)), key=key)[:num_held])
    learned = [sentence for i, sentence in enumerate(sentences) if i not in held]
    return learned, [sentences[i] for i in sorted(held)]


def _why(file: TaggedFile) -> str:
    return f"because {file.path} has the form of {file.form}; --task sets another"


def _refuse_what_is_not_for_tags(config: FinetuneConfig) -> None:
    if config.head.norm != "none":
        raise UserError("--head.norm: is for heads on whole texts, and this task is tokens")
    if config.window.merge != WindowConfig().merge:
        raise UserError("--window.merge: is for labels of whole texts, and this task is tokens")
    if config.decide != DecideConfig():
        raise UserError("--decide: is for labels of whole texts, and this task is tokens")


def _fingerprint(train: Sequence[Sentence], dev: Sequence[Sentence]) -> str:
    """sha256 of all that is learned from and judged by."""
    digest = hashlib.sha256()
    for part in (train, dev):
        content = [[sentence.words, sentence.tags] for sentence in part]
        digest.update(json.dumps(content, separators=(",", ":")).encode())
    return digest.hexdigest()
