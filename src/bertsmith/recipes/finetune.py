"""`bertsmith finetune`: a checkpoint and a labelled table in, a classifier out.

The wiring, from top to bottom. `model/` always holds the best weights so far: it is written
whenever a judgement beats all before it, and never in part.
"""

import hashlib
import itertools
import json
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from bertsmith.batch import LabelledBatch
from bertsmith.data.examples import ExampleTokenizer, TrainingSteps
from bertsmith.data.tokenizer import TextTokenizer
from bertsmith.errors import EXIT_INTERRUPTED, UserError
from bertsmith.hf import load_classifier, read_config, recover_model
from bertsmith.model.compact import CompactVocabulary
from bertsmith.model.config import EncoderConfig
from bertsmith.recipes.classifier import (
    describe_head,
    fitting_tokenizer,
    longest_example,
    model_folder,
)
from bertsmith.recipes.config import FinetuneConfig
from bertsmith.recipes.finetune_run import FinetuneRun, FinetuneSummary, TaskData, loop_config
from bertsmith.recipes.resume import checkpoint_to_resume
from bertsmith.recipes.task_data import TaskTables, encode_part, read_task_tables
from bertsmith.report.metrics_log import MetricsLog
from bertsmith.report.progress import Speaker, TrainingDisplay
from bertsmith.report.run_folder import (
    check_inputs_stay,
    check_run_folder,
    open_run_folder,
    write_config,
)
from bertsmith.train.checkpoint import (
    RunState,
    load_moments,
    read_state,
)
from bertsmith.train.interruption import catch_signals
from bertsmith.train.loop import train
from bertsmith.train.memory_reuse import reuse_freed_memory
from bertsmith.train.optim import AdamW, group_parameters
from bertsmith.train.precision import choose_compute
from bertsmith.train.step import NonFiniteLossError


def main(config: FinetuneConfig) -> int:
    """Fine-tune, and print the model's folder."""
    summary = finetune(config)
    if summary.status == "interrupted":
        return EXIT_INTERRUPTED
    print(Path(config.output) / "model")
    return 0


def finetune(config: FinetuneConfig) -> FinetuneSummary:
    """Train a classifier of texts or pairs.

    Raises:
        UserError: The model, a table, the output or a value cannot be used; or the loss is not
            finite, in which case the best model and the last checkpoint stand.
    """
    check_run_folder(config.output, resume=config.resume, overwrite=config.overwrite)
    if not config.resume:
        inputs = {"model": config.model, "data": config.data, "eval": config.eval}
        check_inputs_stay(config.output, inputs)
    recover_model(Path(config.output) / "model")
    compute = choose_compute(config.precision, config.device)
    if compute.device.type == "cpu":
        reuse_freed_memory()
    source = model_folder(config.model)
    data = open_task(config, source)
    lines: list[str] = []
    checkpoint = checkpoint_to_resume(Path(config.output), config, data.fingerprint, lines.append)
    model, report = load_classifier(
        checkpoint or source,
        labels=data.tables.labels,
        norm=config.head.norm,
        seed=config.seed,
        hidden_dropout_prob=config.hidden_dropout_prob,
        attention_probs_dropout_prob=config.attention_probs_dropout_prob,
    )
    model.to(compute.device)
    vocabulary = CompactVocabulary(model.encoder, data.train.examples.input_ids_T)
    optimizer = AdamW(group_parameters(model, config.optim), config.optim)
    state = RunState()
    if checkpoint is not None:
        state = with_best_on_disk(read_state(checkpoint)[0], Path(config.output))
        load_moments(checkpoint, optimizer, updates=state.updates)
    lines.append(str(report) if checkpoint is None else f"resumed from {checkpoint}")
    lines += describe_head(config.head)

    folder = open_run_folder(config.output, resume=config.resume, overwrite=config.overwrite)
    speaker = Speaker(folder)
    for line in lines:
        speaker.say(line)
    write_config(folder, config)
    run = FinetuneRun(config, folder, speaker, compute, model, optimizer, data, vocabulary, state)
    run.say_banner()
    with (
        MetricsLog(folder, steps_done=state.step) as metrics,
        TrainingDisplay(speaker) as display,
        catch_signals() as interruption,
    ):
        run.start_log(metrics, display)
        try:
            outcome = train(
                model,
                optimizer,
                steps=lambda start: packs_from(data.steps, vocabulary, start),
                config=loop_config(config, data.steps),
                compute=compute,
                state=state,
                hooks=run,
                interruption=interruption,
            )
        except Exception as error:
            with suppress(UserError):  # a full disk: the first error is the one to tell
                run.summarize("failed", run.state)
            if isinstance(error, NonFiniteLossError):
                raise UserError(explain_non_finite(error, data)) from error
            raise
        return run.conclude(outcome)


def open_task(config: FinetuneConfig, source: Path) -> TaskData:
    """Read, check and tokenise the tables.

    Args:
        config: Names them.
        source: Folder of the checkpoint, whose tokenizer is used.

    Raises:
        UserError: A table, the tokenizer or a setting does not fit.
    """
    tables = read_task_tables(config)
    tokenizer, longest = fit_tokenizer(config, source, tables)
    encoder = ExampleTokenizer(tokenizer.tokenizer, max_sequence_tokens=longest)
    train_part = encode_part(tables.train, tables.labels, encoder)
    return TaskData(
        tables=tables,
        train=train_part,
        dev=encode_part(tables.dev, tables.labels, encoder),
        steps=TrainingSteps(
            train_part.examples,
            train_part.labels_N,
            examples_per_step=config.examples_per_step,
            tokens_per_pack=config.tokens_per_pack,
            seed=config.seed,
        ),
        longest=longest,
        tokenizer=tokenizer,
        fingerprint=fingerprint_of_tables(tables),
    )


def fit_tokenizer(
    config: FinetuneConfig, source: Path, tables: TaskTables
) -> tuple[TextTokenizer, int]:
    """The checkpoint's tokenizer and the longest example, checked against the model.

    Raises:
        UserError: They do not fit the model.
    """
    shape: EncoderConfig = read_config(source)
    is_pair = tables.columns.pair is not None
    if is_pair and shape.type_vocab_size < 2:
        raise UserError(f"{source}: has one token type, so it cannot tell two texts apart")
    longest = longest_example(
        config.max_sequence_tokens, shape.max_position_embeddings, is_pair=is_pair
    )
    return fitting_tokenizer(source, shape), longest


def fingerprint_of_tables(tables: TaskTables) -> str:
    """sha256 of all that is learned from and judged by."""
    digest = hashlib.sha256()
    for table in (tables.train, tables.dev):
        content = [table.texts, table.pairs, table.labels]
        digest.update(json.dumps(content, separators=(",", ":")).encode())
    return digest.hexdigest()


def with_best_on_disk(state: RunState, folder: Path) -> RunState:
    """The state of a resumed run; its best score counts only while its best model is there."""
    if (folder / "model" / "config.json").exists():
        return state
    return replace(state, best_value=None, best_step=None, evaluations_since_best=0)


def packs_from(
    steps: TrainingSteps, vocabulary: CompactVocabulary, start: int
) -> Iterator[Sequence[LabelledBatch]]:
    """The packs of step `start` and all after it, for the narrowed token table."""
    for step in itertools.count(start):
        yield [vocabulary.narrowed(batch) for batch in steps.batches(step)]


def explain_non_finite(error: NonFiniteLossError, data: TaskData) -> str:
    """One line: the step, the rows, and what stands."""
    packs = data.steps.batches(error.step)
    bad = packs if error.pack is None else [packs[error.pack]]
    rows = sorted(int(row) for pack in bad for row in pack.rows_N)
    shown = ", ".join(data.train.table.place(row) for row in rows[:5])
    more = f" and {len(rows) - 5:,} more" if len(rows) > 5 else ""
    return (
        f"the {error.what} of step {error.step + 1} is not finite (NaN or infinite), on {shown}"
        f"{more}; weights were not updated, what was saved before stands; try a lower "
        "--optim.learning_rate"
    )
