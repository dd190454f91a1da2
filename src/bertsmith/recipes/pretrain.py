"""`bertsmith pretrain`: prepared text in, encoder out. The wiring, from top to bottom.

Nothing is written, and nothing of an older run replaced, before the data, the model and the
settings are known to fit.
"""

import math
from pathlib import Path

from bertsmith.batch import MaskedBatch
from bertsmith.data.config import has_pairs
from bertsmith.data.frequency import corpus_frequencies
from bertsmith.data.held_out import valid_batches, valid_pairs
from bertsmith.data.largest import largest_masked
from bertsmith.data.shards import TokenCorpus, open_shards
from bertsmith.data.stream import PretrainStream, prefetch
from bertsmith.errors import UserError
from bertsmith.parallel.choice import choose_strategy, devices_at_once, wrap
from bertsmith.parallel.world import World
from bertsmith.recipes.block_memory import set_checkpointing
from bertsmith.recipes.config import PretrainConfig
from bertsmith.recipes.masked_lm import make_masked_lm
from bertsmith.recipes.planned_run import ground_here, lack_is_told, plan_run
from bertsmith.recipes.planning.shape import Text, pretraining_shape
from bertsmith.recipes.pretrain_run import PretrainData, PretrainRun, PretrainSummary
from bertsmith.recipes.ranks import (
    agreed_checkpoint,
    agreed_config,
    check_same_start,
    exit_code,
    open_output,
    sole_run,
    started,
    world_of,
)
from bertsmith.recipes.resume import identity_of
from bertsmith.recipes.trained_parts import freeze, plan_trained_parts
from bertsmith.recipes.training import Rig
from bertsmith.report.run_folder import check_inputs_stay, check_run_folder
from bertsmith.report.run_lock import RunLock
from bertsmith.train.interruption import Interruption, catch_signals
from bertsmith.train.loop import Budget, Cadence, LoopConfig
from bertsmith.train.memory_reuse import reuse_freed_memory
from bertsmith.train.optim import AdamW, group_parameters
from bertsmith.train.precision import choose_compute

EVALUATIONS_A_RUN = 10


def main(config: PretrainConfig) -> int:
    """Pretrain, and print the model's folder."""
    return exit_code(config, pretrain(config).status)


def pretrain(config: PretrainConfig) -> PretrainSummary:
    """Train an encoder by masked-language modelling.

    Raises:
        UserError: The data, the model, the output or a value cannot be used; or a step's numbers
            went wrong, in which case the last good checkpoint stands.
        KeyboardInterrupt: A signal came before there was anything to save.
    """
    check_budget(config)
    lines: list[str] = []
    with catch_signals() as interruption, world_of(config) as world:
        world.on_main(lambda: check_output(config))
        with sole_run(world, config) as lock, lack_is_told("pretrain"):
            config = agreed_config(world, config, lines.append)
            return _pretrain(config, world, lock, interruption, lines)


def _pretrain(
    config: PretrainConfig,
    world: World,
    lock: RunLock | None,
    interruption: Interruption,
    lines: list[str],
) -> PretrainSummary:
    """One rank's run; rank 0 speaks and writes for all, `lines` first."""
    compute = choose_compute(config.precision, config.device, local_rank=world.local_rank)
    if compute.device.type == "cpu":
        reuse_freed_memory()
    data = world.main_first(lambda: open_data(config, verify=world.is_main))
    world.check_same("data", {"fingerprint": data.corpus.fingerprint})
    at_once = devices_at_once(config.parallel, world, device=config.device)
    check_packs(config, data.stream, at_once)
    check_share(config, data.corpus, data.stream)
    vocab = data.corpus.vocab
    identity = identity_of(
        config,
        "pretrain",
        {"data": data.corpus.fingerprint, "tokenizer": vocab.fingerprint},
        precision=compute.name,
    )
    checkpoint, is_changed = agreed_checkpoint(world, config, identity, lines.append)
    model = make_masked_lm(
        config,
        vocab,
        tokenizer_folder=data.tokenizer_folder,
        checkpoint=checkpoint,
        say=lines.append,
    ).to(compute.device)
    set_checkpointing(config.checkpointing, model.encoder, compute, say=lines.append)
    freeze(config.freeze, model, num_layers=len(model.encoder.blocks))
    parts = plan_trained_parts(config.optim, model, updates_per_epoch=None, say=lines.append)
    check_same_start(world, model, checkpoint)
    name = choose_strategy(config.parallel, model, world, say=lines.append)
    ground = ground_here(model.encoder, compute, sharing=name, devices=at_once)
    strategy = wrap(name, model, world, dp_devices=at_once, dtype=compute.dtype)
    optimizer = AdamW(group_parameters(model, config.optim, parts), config.optim)
    state = started(config, checkpoint, optimizer)
    if checkpoint is not None:
        lines.append(f"resumed from {checkpoint}")
    settings = loop_config(config, data.stream)
    text = text_of(data.stream)
    planned = plan_run(
        lambda: pretraining_shape(config, model.encoder.config, ground, text),
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
        rows=None,
        parts=parts,
        lock=lock,
        interruption=interruption,
        planned=planned,
    )
    run = PretrainRun(config, rig, model, data, state, budget=settings.budget, identity=identity)
    return run.carry_out(
        lambda start: prefetch(
            lambda step: data.stream.share(step, rank=world.rank, num_ranks=world.size), start
        ),
        settings,
        lambda tokens: largest_masked(
            vocab,
            tokens=tokens,
            longest=text.longest,
            num_hidden=math.ceil(config.masking.largest_share * tokens),
            has_pairs=has_pairs(config.objective),
        ),
    )


def text_of(stream: PretrainStream) -> Text:
    """What the planner has to know of the text."""
    return Text(
        longest=stream.longest,
        fullest=stream.fullest,
        mean_tokens=float(stream.some_lengths(at_most=10_000).mean()),
    )


def check_output(config: PretrainConfig) -> bool:
    """Refuse a folder that may not be written; changes nothing."""
    check_run_folder(config.output, resume=config.resume, overwrite=config.overwrite)
    if not config.resume:
        check_inputs_stay(config.output, {"model": config.model, "data": config.data})
    return True


def check_packs(config: PretrainConfig, stream: PretrainStream, at_once: int) -> None:
    """A step's packs have to be shared out evenly, or devices would wait in every step.

    Raises:
        UserError: They do not divide.
    """
    packs, tokens = stream.packs_per_step, config.packing.tokens_per_pack
    if packs % at_once:
        more = -(-packs // at_once) * at_once * tokens
        raise UserError(
            f"--tokens_per_step {config.tokens_per_step} is {packs} packs of {tokens} tokens, "
            f"which {at_once} devices cannot share evenly; give --tokens_per_step {more}, or "
            "smaller --packing.tokens_per_pack"
        )


def check_share(config: PretrainConfig, corpus: TokenCorpus, stream: PretrainStream) -> None:
    """A pack in which nothing, or everything, is hidden teaches nothing.

    Raises:
        UserError: The usual pack would be one.
    """
    tokens = corpus.num_tokens / stream.packs_per_epoch
    masking = config.masking
    for name, share in (("share", masking.share), ("share_end", masking.share_end)):
        if share is None or min(share, 1.0 - share) * tokens >= 1.0:
            continue
        what = "nothing" if share < 0.5 else "everything"
        raise UserError(
            f"--masking.{name} {share} hides {what} in a pack: the text fills one with about "
            f"{tokens:.0f} tokens; give a share from {1.0 / tokens:.2g} to {1.0 - 1.0 / tokens:.2g}"
            ", or larger --packing.tokens_per_pack"
        )


def check_budget(config: PretrainConfig) -> None:
    """Exactly one budget, and a positive one."""
    values = {
        "steps": config.steps,
        "tokens": config.tokens,
        "epochs": config.epochs,
        "minutes": config.minutes,
    }
    given = {name: value for name, value in values.items() if value is not None}
    if len(given) != 1:
        what = ", ".join(f"--{name}" for name in given) or "none"
        raise UserError(f"give one of --steps, --tokens, --epochs, --minutes (given: {what})")
    for name, value in given.items():
        if not 0 < value < math.inf:
            raise UserError(f"--{name} {value}: a budget is more than 0")


def open_data(config: PretrainConfig, *, verify: bool = True) -> PretrainData:
    """The prepared text, packed and held out as the config says.

    Args:
        config: Names it.
        verify: Whether to compare the files with their hashes; one rank is enough.

    Raises:
        UserError: It is not there, damaged, or holds nothing to learn from.
    """
    folder = Path(config.data)
    corpus, held_out = (open_shards(folder, part, verify=verify) for part in ("train", "valid"))
    frequencies = corpus_frequencies(corpus)
    stream = PretrainStream(
        corpus,
        packing=config.packing,
        masking=config.masking,
        tokens_per_step=config.tokens_per_step,
        seed=config.seed,
        objective=config.objective,
        type_counts_V=frequencies.counts_V,
    )
    valid: list[MaskedBatch] = []
    pairs: list[MaskedBatch] = []
    packing, max_tokens = config.packing, config.eval.max_tokens
    if held_out.num_documents:
        valid = valid_batches(held_out, packing=packing, max_tokens=max_tokens)
    if held_out.num_documents and has_pairs(config.objective):
        pairs = valid_pairs(
            held_out, packing=packing, max_tokens=max_tokens, objective=config.objective
        )
    return PretrainData(
        corpus=corpus,
        stream=stream,
        valid=valid,
        valid_pairs=pairs,
        frequencies=frequencies,
        tokenizer_folder=folder / "tokenizer",
    )


def loop_config(config: PretrainConfig, stream: PretrainStream) -> LoopConfig:
    """The loop's budget and cadences."""
    if config.minutes is not None:
        budget = Budget(seconds=config.minutes * 60.0)
    elif config.epochs is not None:
        budget = Budget(steps=max(math.ceil(config.epochs * stream.steps_in_epoch(0)), 1))
    else:
        budget = Budget(steps=config.steps, tokens=config.tokens)
    return LoopConfig(
        budget=budget,
        optim=config.optim,
        guard=config.guard,
        seed=config.seed,
        largest_pass_tokens=stream.fullest,
        smallest_pass_tokens=stream.longest,
        evaluate=Cadence(every_steps=config.eval.every_steps, times_a_run=EVALUATIONS_A_RUN),
        save=Cadence.of_saves(config.save),
    )
