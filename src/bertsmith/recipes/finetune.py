"""`bertsmith finetune`: a checkpoint and a labelled table in, a model of texts out.

The wiring, from top to bottom. `model/` always holds the best weights so far: it is written
whenever a judgement beats all before it, and never in part.
"""

import importlib
import itertools
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from bertsmith.batch import StepShare
from bertsmith.data.examples import BatchT, Steps
from bertsmith.errors import UserError
from bertsmith.hf import recover_model
from bertsmith.model.compact import CompactVocabulary, Vocabulary, WholeVocabulary
from bertsmith.model.config import HeadConfig
from bertsmith.model.parts import EMBEDDINGS
from bertsmith.parallel.choice import choose_strategy, devices_at_once, wrap
from bertsmith.parallel.kept_rows import TrainedRows, keep_unused_rows
from bertsmith.parallel.world import World
from bertsmith.recipes import adapters
from bertsmith.recipes.adapters import lora_on
from bertsmith.recipes.block_memory import set_checkpointing
from bertsmith.recipes.config import FinetuneConfig
from bertsmith.recipes.finetune_run import (
    Aside,
    FinetuneSummary,
    loop_config,
)
from bertsmith.recipes.forms import form_of_data
from bertsmith.recipes.model_folder import model_folder
from bertsmith.recipes.planned_run import ground_here, lack_is_told, plan_run
from bertsmith.recipes.planning.shape import Table, finetuning_shape
from bertsmith.recipes.ranks import (
    agreed_checkpoint,
    check_same_start,
    exit_code,
    open_output,
    sole_run,
    started,
    world_of,
)
from bertsmith.recipes.resume import identity_of
from bertsmith.recipes.trained_parts import freeze, is_frozen, plan_trained_parts
from bertsmith.recipes.training import Rig
from bertsmith.report.run_folder import check_inputs_stay, check_run_folder
from bertsmith.report.run_lock import RunLock
from bertsmith.train.interruption import Interruption, catch_signals
from bertsmith.train.memory_reuse import reuse_freed_memory
from bertsmith.train.optim import AdamW, group_parameters
from bertsmith.train.precision import choose_compute


def main(config: FinetuneConfig) -> int:
    """Fine-tune, once or several times, and print the model's folder."""
    if config.is_several:
        verb = "seeds" if config.seeds > 1 else "search"
        code: int = importlib.import_module(f"bertsmith.recipes.{verb}").main(config)
        return code
    return exit_code(config, finetune(config).status)


def finetune(config: FinetuneConfig) -> FinetuneSummary:
    """Train a model of texts or pairs, of the kind that the table shows or the config says.

    Raises:
        UserError: The model, a table, the output or a value cannot be used; or a step's numbers
            went wrong, in which case the best model and the last checkpoint stand.
        KeyboardInterrupt: A signal came before there was anything to save.
    """
    if config.is_several:
        raise UserError(
            "finetune is one run; for --seeds call bertsmith.recipes.seeds.finetune_seeds, for "
            "--search.trials bertsmith.recipes.search.search"
        )
    if config.parallel.strategy == "dp" and config.head.norm == "batch":
        raise UserError(
            "--head.norm batch under --parallel.strategy dp: each GPU would take statistics of its "
            "own; use ddp, where they are those of all"
        )
    with catch_signals() as interruption, world_of(config) as world:
        world.on_main(lambda: check_output(config))
        with sole_run(world, config) as lock, lack_is_told("finetune"):
            return _finetune(config, world, lock, interruption)


def _finetune(
    config: FinetuneConfig, world: World, lock: RunLock | None, interruption: Interruption
) -> FinetuneSummary:
    """One rank's run; rank 0 speaks and writes for all."""
    compute = choose_compute(config.precision, config.device, local_rank=world.local_rank)
    if compute.device.type == "cpu":
        reuse_freed_memory()
    source = Path(world.on_main(lambda: str(model_folder(config.model))))
    at_once = devices_at_once(config.parallel, world, device=config.device)
    with world.working("the reading of the tables"):
        form = form_of_data(config)
        data = form.open(config, source, at_once=at_once)
    config = form.found_in(config, data, source)
    world.check_same("data", {"fingerprint": data.fingerprint})
    identity = identity_of(
        config,
        "finetune",
        {"data": data.fingerprint, "tokenizer": data.tokenizer.vocab.fingerprint},
        precision=compute.name,
    )
    lines: list[str] = []
    checkpoint, is_changed = agreed_checkpoint(world, config, identity, lines.append)
    model, report = form.load(config, data, source if config.lora.is_on else checkpoint or source)
    lora = lora_on(config, source, model, report, checkpoint)
    model.to(compute.device)
    set_checkpointing(config.checkpointing, model.encoder, compute, say=lines.append)
    freeze(config.freeze, model, num_layers=len(model.encoder.blocks))
    parts = plan_trained_parts(
        config.optim, model, updates_per_epoch=data.steps.steps_per_epoch, say=lines.append
    )
    check_same_start(world, model, checkpoint)
    name = choose_strategy(config.parallel, model, world, say=lines.append)
    if lora is not None and name == "fsdp":
        name = "ddp"
        lines.append("parallel: ddp all the same, since of adapters there is nothing to share out")
    used_ids = data.train.examples.input_ids_T
    is_table_frozen = is_frozen(model, EMBEDDINGS)
    token_table = model.encoder.embeddings.token.weight
    rows = None
    if not is_table_frozen:
        rows = TrainedRows(
            next(name for name, p in model.named_parameters() if p is token_table),
            used_ids,
            num_rows=len(token_table),
        )
    vocabulary = (
        WholeVocabulary(used_ids)
        if name == "fsdp" or is_table_frozen
        else CompactVocabulary(model.encoder, used_ids)
    )
    ground = ground_here(model.encoder, compute, sharing=name, devices=at_once)
    strategy = wrap(name, model, world, dp_devices=at_once, dtype=compute.dtype)
    optimizer = AdamW(group_parameters(model, config.optim, parts), config.optim)
    if name == "fsdp" and not is_table_frozen:
        keep_unused_rows(model.encoder.embeddings.token.weight, used_ids, optimizer)
    state = started(config, checkpoint, optimizer, rows=rows)
    if not world.on_main((Path(config.output) / "model" / "config.json").exists):
        # The best score counts only while its weights are there.
        state = replace(state, best_value=None, best_step=None, evaluations_since_best=0)
    lines.append(str(report) if checkpoint is None else f"resumed from {checkpoint}")
    lines += _describe_head(config.head)
    if lora is not None:
        lines.append(lora.describe(model))
    settings = loop_config(config, data)
    table = Table(
        num_labels=form.num_outputs(data),
        trained_rows=vocabulary.num_rows,
        longest=data.longest_example,
        tokens_of_step=data.most_tokens(config.examples_per_step),
        tokens_to_judge=int(data.dev.examples.lengths_N.sum()),
        has_pooler=lora is not None and "pooler" not in lora.trained,
        reads_words=form.reads_all(data),
    )
    planned = plan_run(
        lambda: finetuning_shape(config, model.encoder.config, ground, table),
        micro_batch=config.micro_batch,
        smallest_tokens=settings.smallest_pass_tokens,
        compute=compute,
        world=world,
        state=state,
    )

    rig = Rig(
        folder=Path(config.output),
        speaker=open_output(world, config, lines, is_changed=is_changed),
        compute=compute,
        strategy=strategy,
        optimizer=optimizer,
        at_once=at_once,
        resumed_from=checkpoint,
        is_changed=is_changed,
        rows=rows,
        parts=parts,
        lock=lock,
        interruption=interruption,
        planned=planned,
    )
    aside = Aside(vocabulary=vocabulary, identity=identity, source=source, lora=lora)
    run = form.run(config, rig, model, data, state, aside=aside)
    return run.carry_out(
        lambda start: shares_from(data.steps, vocabulary, start, world),
        settings,
        lambda tokens: vocabulary.narrowed(form.largest(data, tokens=tokens)),
    )


def check_output(config: FinetuneConfig) -> bool:
    """Refuse a folder that may not be written, and put right a model left half-replaced."""
    check_run_folder(config.output, resume=config.resume, overwrite=config.overwrite)
    if not config.resume:
        inputs = {"model": config.model, "data": config.data, "eval": config.eval}
        check_inputs_stay(config.output, inputs)
    for name in ("model", adapters.FOLDER):
        recover_model(Path(config.output) / name)
    return True


def shares_from(
    steps: Steps[BatchT], vocabulary: Vocabulary, start: int, world: World
) -> Iterator[StepShare[BatchT]]:
    """A rank's packs of step `start` and all after it, for the table that is trained."""
    for step in itertools.count(start):
        share = steps.share(step, rank=world.rank, num_ranks=world.size)
        yield replace(share, packs=[vocabulary.narrowed(batch) for batch in share.packs])


def _describe_head(head: HeadConfig) -> list[str]:
    """What a user should know of a head with a norm before it is trained; no line for none."""
    match head.norm:
        case "batch":
            return [
                "head: batch norm over the sequences of each pack; model/ holds it folded into the "
                "classifier"
            ]
        case "layer":
            return [
                "head: layer norm, which a classifier of transformers has no place for: it will "
                "refuse model/; bertsmith evaluate and predict read it"
            ]
        case _:
            return []
