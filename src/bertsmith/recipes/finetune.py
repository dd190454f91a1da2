"""`bertsmith finetune`: a checkpoint and a labelled table in, a classifier out.

The wiring, from top to bottom. `model/` always holds the best weights so far: it is written
whenever a judgement beats all before it, and never in part.
"""

import hashlib
import itertools
import json
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from bertsmith.batch import LabelledBatch, StepShare
from bertsmith.data.examples import ExampleTokenizer, TrainingSteps
from bertsmith.data.tokenizer import TextTokenizer
from bertsmith.errors import EXIT_INTERRUPTED, UserError
from bertsmith.hf import load_classifier, read_config, recover_model
from bertsmith.model.compact import CompactVocabulary, Vocabulary, WholeVocabulary
from bertsmith.model.config import EncoderConfig
from bertsmith.parallel.choice import choose_strategy, devices_at_once, wrap
from bertsmith.parallel.kept_rows import keep_unused_rows
from bertsmith.parallel.world import World
from bertsmith.recipes.classifier import (
    describe_head,
    fitting_tokenizer,
    longest_example,
    model_folder,
)
from bertsmith.recipes.config import FinetuneConfig
from bertsmith.recipes.finetune_run import FinetuneRun, FinetuneSummary, TaskData, loop_config
from bertsmith.recipes.ranks import (
    agreed_checkpoint,
    is_main_process,
    open_output,
    world_of,
)
from bertsmith.recipes.task_data import TaskTables, encode_part, read_task_tables
from bertsmith.report.devices import BusySampler, devices_of, uses_of
from bertsmith.report.metrics_log import open_metrics
from bertsmith.report.progress import TrainingDisplay
from bertsmith.report.run_folder import (
    check_inputs_stay,
    check_run_folder,
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
    if is_main_process():
        print(Path(config.output) / "model")
    return 0


def finetune(config: FinetuneConfig) -> FinetuneSummary:
    """Train a classifier of texts or pairs.

    Raises:
        UserError: The model, a table, the output or a value cannot be used; or the loss is not
            finite, in which case the best model and the last checkpoint stand.
    """
    if config.parallel.strategy == "dp" and config.head.norm == "batch":
        raise UserError(
            "--head.norm batch under --parallel.strategy dp: each GPU would take statistics of its "
            "own; use ddp, where they are those of all"
        )
    with world_of(config) as world:
        return _finetune(config, world)


def _finetune(config: FinetuneConfig, world: World) -> FinetuneSummary:
    """One rank's run; rank 0 speaks and writes for all."""
    world.on_main(lambda: check_output(config))
    compute = choose_compute(config.precision, config.device, local_rank=world.local_rank)
    if compute.device.type == "cpu":
        reuse_freed_memory()
    source = Path(world.on_main(lambda: str(model_folder(config.model))))
    at_once = devices_at_once(config.parallel, world, device=config.device)
    data = open_task(config, source, at_once=at_once)
    world.check_same("data", {"fingerprint": data.fingerprint})
    lines: list[str] = []
    checkpoint = agreed_checkpoint(world, config, data.fingerprint, lines.append)
    model, report = load_classifier(
        checkpoint or source,
        labels=data.tables.labels,
        norm=config.head.norm,
        seed=config.seed,
        hidden_dropout_prob=config.hidden_dropout_prob,
        attention_probs_dropout_prob=config.attention_probs_dropout_prob,
    )
    model.to(compute.device)
    name = choose_strategy(config.parallel, model, world, say=lines.append)
    used_ids = data.train.examples.input_ids_T
    vocabulary = (
        WholeVocabulary(used_ids) if name == "fsdp" else CompactVocabulary(model.encoder, used_ids)
    )
    strategy = wrap(name, model, world, num_devices=at_once, dtype=compute.dtype)
    optimizer = AdamW(group_parameters(model, config.optim), config.optim)
    if name == "fsdp":
        keep_unused_rows(model.encoder.embeddings.token.weight, used_ids, optimizer)
    state = RunState()
    if checkpoint is not None:
        state = with_best_on_disk(read_state(checkpoint)[0], Path(config.output))
        load_moments(checkpoint, optimizer, updates=state.updates)
    lines.append(str(report) if checkpoint is None else f"resumed from {checkpoint}")
    lines += describe_head(config.head)

    folder = Path(config.output)
    speaker = open_output(world, config)
    for line in lines:
        speaker.say(line)
    run = FinetuneRun(
        config, folder, speaker, compute, strategy, model, optimizer, data, vocabulary, state
    )
    run.say_banner()
    with (
        open_metrics(world, folder, steps_done=state.step) as metrics,
        TrainingDisplay(speaker) as display,
        catch_signals() as interruption,
        BusySampler(devices_of(compute.device, at_once, world)) as sampler,
    ):
        run.start_log(metrics, display)
        try:
            outcome = train(
                strategy,
                optimizer,
                steps=lambda start: shares_from(data.steps, vocabulary, start, world),
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
        return run.conclude(outcome, uses_of(sampler, compute.device, world))


def check_output(config: FinetuneConfig) -> bool:
    """Refuse a folder that may not be written, and put right a model left half-replaced."""
    check_run_folder(config.output, resume=config.resume, overwrite=config.overwrite)
    if not config.resume:
        inputs = {"model": config.model, "data": config.data, "eval": config.eval}
        check_inputs_stay(config.output, inputs)
    recover_model(Path(config.output) / "model")
    return True


def open_task(config: FinetuneConfig, source: Path, *, at_once: int) -> TaskData:
    """Read, check and tokenise the tables.

    Args:
        config: Names them.
        source: Folder of the checkpoint, whose tokenizer is used.
        at_once: Devices that share a step.

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
            at_once=at_once,
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


def shares_from(
    steps: TrainingSteps, vocabulary: Vocabulary, start: int, world: World
) -> Iterator[StepShare[LabelledBatch]]:
    """A rank's packs of step `start` and all after it, for the table that is trained."""
    for step in itertools.count(start):
        share = steps.share(step, rank=world.rank, num_ranks=world.size)
        yield replace(share, packs=[vocabulary.narrowed(batch) for batch in share.packs])


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
