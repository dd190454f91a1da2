"""From files of questions to what fine-tuning learns from and is judged by."""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from torch import Tensor

from bertsmith.data.checkup.grammar import number_of
from bertsmith.data.config import TableConfig
from bertsmith.data.examples import Examples, TrainingSteps
from bertsmith.data.questions.files import QuestionReader, form_of, read_questions
from bertsmith.data.questions.question import Question
from bertsmith.data.questions.windows import (
    FRAME_TOKENS,
    QuestionTokenizer,
    QuestionWindows,
    most_question_tokens,
)
from bertsmith.data.scores import HASH_BYTES
from bertsmith.data.tokenizer import TextTokenizer
from bertsmith.data.windows import WindowConfig, overlap_of
from bertsmith.errors import UserError
from bertsmith.hf import read_config
from bertsmith.model.config import EncoderConfig
from bertsmith.recipes.config import FinetuneConfig
from bertsmith.recipes.model_folder import fitting_tokenizer, longest_example
from bertsmith.tasks.config import DecideConfig
from bertsmith.tasks.questions import Answering


@dataclass(frozen=True, kw_only=True)
class QuestionPart:
    """The questions that are learned from, or those that are judged by."""

    path: Path
    table: Sequence[Question]
    windows: QuestionWindows

    @property
    def examples(self) -> Examples:
        """A window each."""
        return self.windows.examples

    @property
    def places_R2(self) -> Tensor:
        """What is to be learned of each window."""
        return self.windows.places_R2


@dataclass(frozen=True, kw_only=True)
class QuestionTables:
    """What the files are, for people, and what follows from them."""

    kind: Answering
    lines: tuple[str, ...]
    num_leaked: int
    """Questions to judge by whose context stands in the training part too."""

    labels: tuple[str, ...] = ()
    """A token's two scores have no names."""

    def describe(self) -> list[str]:
        """What a person should know before training, a line each."""
        return list(self.lines)


@dataclass(frozen=True, kw_only=True)
class QuestionData:
    """The task, tokenised."""

    tables: QuestionTables
    train: QuestionPart
    dev: QuestionPart
    steps: TrainingSteps
    longest: int
    """Most tokens of a window."""

    overlap_tokens: int
    """That the windows of a longer context share, at least."""

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


def is_about_questions(config: FinetuneConfig) -> bool:
    """Whether answers are to be found: as is asked, or as the form of the data shows.

    Raises:
        UserError: The data cannot be read, or is of another form than is asked for.
    """
    if config.task not in ("auto", "questions"):
        return False
    return form_of(Path(config.data), is_asked=config.task == "questions") is not None


def open_questions(config: FinetuneConfig, source: Path, *, at_once: int) -> QuestionData:
    """Read, check and tokenise the files.

    Args:
        config: Names them.
        source: Folder of the checkpoint, whose tokenizer is used.
        at_once: Devices that share a step.

    Raises:
        UserError: A file, the tokenizer or a setting does not fit.
    """
    _refuse_what_is_not_for_answers(config)
    shape = read_config(source)
    tokenizer = fitting_tokenizer(source, shape)
    longest = longest_window(config.max_sequence_tokens, shape, where=source)
    overlap = overlap_of_windows(config.window, longest)
    encoder = QuestionTokenizer(tokenizer, max_sequence_tokens=longest, overlap_tokens=overlap)
    path = Path(config.data)
    reader, questions = read_questions(path, config.table)
    if not any(one.answers for one in questions):
        raise UserError(f"{path}: no question has an answer; there is nothing to learn")
    kind = Answering(has_impossible=any(not one.answers for one in questions))
    why = (
        "as --task says"
        if config.task == "questions"
        else f"because {path} has the form of {reader.form}; --task sets another"
    )
    lines = [f"task: questions, {why}", *describe_skipped(reader)]
    if config.eval is None:
        train, dev = hashed_parts(
            questions, share=config.holdout_share, seed=config.seed, path=path
        )
        dev_path, where = path, f"held out of it, {kind.holdout_said}"
    else:
        dev_path, train = Path(config.eval), questions
        dev_reader, dev = read_questions(dev_path, config.table)
        lines += describe_skipped(dev_reader)
        where = str(dev_path)
    train_part, num_unreadable = _part_to_learn(train, encoder, path=path)
    dev_part = encode_part(dev, encoder, path=dev_path)
    known = {one.context for one in train_part.table}
    num_leaked = sum(one.context in known for one in dev)
    lines += [
        f"training: {describe_questions(train_part)} of {path}",
        f"judging: {describe_questions(dev_part)}, {where}",
        *_warnings(train_part, dev_part, kind, num_unreadable, num_leaked),
    ]
    return QuestionData(
        tables=QuestionTables(kind=kind, lines=tuple(lines), num_leaked=num_leaked),
        train=train_part,
        dev=dev_part,
        steps=TrainingSteps(
            train_part.examples,
            train_part.places_R2,
            examples_per_step=config.examples_per_step,
            tokens_per_pack=config.tokens_per_pack,
            seed=config.seed,
            at_once=at_once,
        ),
        longest=longest,
        overlap_tokens=overlap,
        tokenizer=tokenizer,
        fingerprint=_fingerprint(train_part.table, dev),
    )


def as_answering(config: FinetuneConfig, kind: Answering) -> FinetuneConfig:
    """The config with what `auto` came to.

    Raises:
        UserError: The task has not the metric that is asked for.
    """
    monitor = kind.monitor if config.monitor == "auto" else config.monitor
    if monitor not in kind.monitors:
        raise UserError(
            f"--monitor {monitor}: these questions have no such metric; take one of "
            f"{', '.join(kind.monitors)}"
        )
    return replace(config, task=kind.name, monitor=monitor)


def longest_window(asked: int | None, shape: EncoderConfig, *, where: Path) -> int:
    """Most tokens of a window.

    Args:
        asked: By the user; None: as many as the model takes.
        shape: Of the model.
        where: Its folder.

    Raises:
        UserError: The model has too few positions, or one token type only.
    """
    if shape.type_vocab_size < 2:
        raise UserError(f"{where}: has one token type, so it cannot tell question and text apart")
    return longest_example(asked, shape.max_position_embeddings, is_pair=True)


def overlap_of_windows(config: WindowConfig, longest: int) -> int:
    """Tokens that windows share, at least, however long their question is.

    Raises:
        UserError: Windows would not move on, or hardly.
    """
    num_special = FRAME_TOKENS + most_question_tokens(longest)
    return overlap_of(config, longest=longest, num_special=num_special)


def encode_part(
    questions: Sequence[Question], encoder: QuestionTokenizer, *, path: Path
) -> QuestionPart:
    """Tokenise questions."""
    return QuestionPart(
        path=path, table=questions, windows=encoder.windows(encoder.read(questions))
    )


def _part_to_learn(
    questions: Sequence[Question], encoder: QuestionTokenizer, *, path: Path
) -> tuple[QuestionPart, int]:
    """As `encode_part`, without questions of whose answer the tokenizer leaves nothing.

    They would teach that there is none. How many they are is told.

    Raises:
        UserError: No question is left.
    """
    read = encoder.read(questions)
    kept = [i for i, one in enumerate(questions) if read[i].answer is not None or not one.answers]
    if not kept:
        raise UserError(f"{path}: the model's tokenizer leaves nothing of any answer")
    part = QuestionPart(
        path=path,
        table=[questions[i] for i in kept],
        windows=encoder.windows([read[i] for i in kept]),
    )
    return part, len(questions) - len(kept)


def hashed_parts(
    questions: Sequence[Question], *, share: float, seed: int, path: Path
) -> tuple[list[Question], list[Question]]:
    """Split questions into those to learn from and those held out, by a hash of their context.

    All questions on a context lie on the same side.

    Raises:
        UserError: A single context.
    """
    counts: dict[str, int] = {}
    for one in questions:
        counts[one.context] = counts.get(one.context, 0) + 1
    if len(counts) < 2:
        raise UserError(
            f"{path}: no question can be held out to judge by: all are on a single context; give "
            "more, or a file with --eval"
        )

    def key(context: str) -> bytes:
        return hashlib.blake2b(f"{seed}/{context}".encode(), digest_size=HASH_BYTES).digest()

    held: set[str] = set()
    num_held = 0
    for context in sorted(counts, key=key):
        if len(held) + 1 == len(counts) or num_held >= max(1, round(share * len(questions))):
            break
        held.add(context)
        num_held += counts[context]
    learned = [one for one in questions if one.context not in held]
    return learned, [one for one in questions if one.context in held]


def describe_skipped(reader: QuestionReader) -> list[str]:
    """What a person should know of questions that were left out; no line for none."""
    if not reader.num_skipped:
        return []
    return [
        f"questions of {reader.path} that were skipped: {reader.num_skipped:,}; the first: "
        f"{reader.first_skipped}"
    ]


def describe_questions(part: QuestionPart) -> str:
    """How many they are, and on how many texts."""
    contexts = len({one.context for one in part.table})
    without = sum(not one.answers for one in part.table)
    more = f", {without:,} without an answer" if without else ""
    return f"{number_of(len(part.table), 'question')} on {number_of(contexts, 'context')}{more}"


def _warnings(
    train: QuestionPart, dev: QuestionPart, kind: Answering, num_unreadable: int, num_leaked: int
) -> list[str]:
    lines = []
    for name, part in (("training", train), ("judging", dev)):
        if part.windows.num_cut:
            lines.append(
                f"{name}: {part.windows.num_cut:,} questions are longer than a window leaves room "
                "for, and lose their end"
            )
    if num_unreadable:
        lines.append(
            f"warning: of the answers to {num_unreadable:,} questions the tokenizer leaves nothing;"
            " they are not learned from"
        )
    if not kind.has_impossible and any(not one.answers for one in dev.table):
        lines.append(
            "warning: some questions to judge by have no answer, and those to learn from all have "
            "one: the model will never say that there is none"
        )
    if num_leaked:
        lines.append(
            f"warning: {num_leaked:,} of the {len(dev.table):,} questions to judge by are on "
            "contexts that stand in the training part too; the scores flatter"
        )
    return lines


def _refuse_what_is_not_for_answers(config: FinetuneConfig) -> None:
    if config.head.norm != "none":
        raise UserError("--head.norm: is for heads on whole texts, and this task is questions")
    if not config.loss.is_plain:
        raise UserError("--loss: is for labels of whole texts, and this task is questions")
    if config.window.merge != WindowConfig().merge:
        raise UserError("--window.merge: is for labels of whole texts, and this task is questions")
    if config.decide != DecideConfig():
        raise UserError(
            "--decide: is for labels of whole texts, and this task is questions; when there is no "
            "answer is decided by itself, as is best on the questions to judge by"
        )
    refuse_columns(config.table)


def refuse_columns(config: TableConfig) -> None:
    """Refuse what is said of a table's columns, for keys are those of SQuAD.

    Raises:
        UserError: Something is.
    """
    if config != TableConfig(bad_rows=config.bad_rows):
        raise UserError(
            "--table: of a file of questions only bad_rows can be said; its keys are id, question, "
            "context and answers"
        )


def _fingerprint(train: Sequence[Question], dev: Sequence[Question]) -> str:
    """sha256 of all that is learned from and judged by."""
    digest = hashlib.sha256()
    for part in (train, dev):
        for one in part:
            content = [one.question, one.context, one.answers]
            digest.update(json.dumps(content, separators=(",", ":")).encode())
        digest.update(b"\n")
    return digest.hexdigest()
