"""`bertsmith pretrain`: prepared text in, encoder out. The wiring, from top to bottom.

Nothing is written, and nothing of an older run replaced, before the data, the model and the
settings are known to fit.
"""

import math
from contextlib import suppress
from pathlib import Path

from bertsmith.batch import MaskedBatch
from bertsmith.data.shards import open_shards
from bertsmith.data.stream import PretrainStream, prefetch, valid_batches
from bertsmith.errors import EXIT_INTERRUPTED, UserError
from bertsmith.parallel.choice import choose_strategy, devices_at_once, wrap
from bertsmith.parallel.world import World
from bertsmith.recipes.config import PretrainConfig
from bertsmith.recipes.masked_lm import make_masked_lm
from bertsmith.recipes.pretrain_run import PretrainData, PretrainRun, PretrainSummary
from bertsmith.recipes.ranks import (
    agreed_checkpoint,
    is_main_process,
    open_output,
    world_of,
)
from bertsmith.report.devices import BusySampler, devices_of, uses_of
from bertsmith.report.metrics_log import open_metrics
from bertsmith.report.progress import TrainingDisplay
from bertsmith.report.run_folder import (
    check_inputs_stay,
    check_run_folder,
)
from bertsmith.train.checkpoint import RunState, load_moments, newest_checkpoint, read_state
from bertsmith.train.interruption import catch_signals
from bertsmith.train.loop import Budget, Cadence, LoopConfig, train
from bertsmith.train.memory_reuse import reuse_freed_memory
from bertsmith.train.optim import AdamW, group_parameters
from bertsmith.train.precision import choose_compute
from bertsmith.train.step import NonFiniteLossError

EVALUATIONS_A_RUN = 10


def main(config: PretrainConfig) -> int:
    """Pretrain, and print the model's folder."""
    summary = pretrain(config)
    if summary.status == "interrupted":
        return EXIT_INTERRUPTED
    if is_main_process():
        print(Path(config.output) / "model")
    return 0


def pretrain(config: PretrainConfig) -> PretrainSummary:
    """Train an encoder by masked-language modelling.

    Raises:
        UserError: The data, the model, the output or a value cannot be used; or the loss is not
            finite, in which case the last good checkpoint stands.
    """
    check_budget(config)
    with world_of(config) as world:
        return _pretrain(config, world)


def _pretrain(config: PretrainConfig, world: World) -> PretrainSummary:
    """One rank's run; rank 0 speaks and writes for all."""
    world.on_main(lambda: check_output(config))
    compute = choose_compute(config.precision, config.device, local_rank=world.local_rank)
    if compute.device.type == "cpu":
        reuse_freed_memory()
    data = world.main_first(lambda: open_data(config, verify=world.is_main))
    world.check_same("data", {"fingerprint": data.corpus.fingerprint})
    at_once = devices_at_once(config.parallel, world, device=config.device)
    check_packs(config, data.stream, at_once)
    lines: list[str] = []
    checkpoint = agreed_checkpoint(world, config, data.corpus.fingerprint, lines.append)
    model = make_masked_lm(
        config,
        data.corpus.vocab,
        tokenizer_folder=data.tokenizer_folder,
        checkpoint=checkpoint,
        say=lines.append,
    ).to(compute.device)
    strategy = wrap(
        choose_strategy(config.parallel, model, world, say=lines.append),
        model,
        world,
        num_devices=at_once,
        dtype=compute.dtype,
    )
    optimizer = AdamW(group_parameters(model, config.optim), config.optim)
    state = RunState()
    if checkpoint is not None:
        state = read_state(checkpoint)[0]
        load_moments(checkpoint, optimizer, updates=state.updates)
        lines.append(f"resumed from {checkpoint}")

    folder = Path(config.output)
    speaker = open_output(world, config)
    for line in lines:
        speaker.say(line)
    run = PretrainRun(config, folder, speaker, compute, strategy, model, optimizer, data, state)
    settings = loop_config(config, data.stream)
    run.say_banner(settings.budget)
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
                steps=lambda start: prefetch(
                    lambda step: data.stream.share(step, rank=world.rank, num_ranks=world.size),
                    start,
                ),
                config=settings,
                compute=compute,
                state=state,
                hooks=run,
                interruption=interruption,
            )
        except Exception as error:
            with suppress(UserError):  # a full disk: the first error is the one to tell
                run.summarize("failed", run.state)
            if isinstance(error, NonFiniteLossError):
                raise UserError(explain_non_finite(error, data, folder)) from error
            raise
        return run.conclude(outcome, uses_of(sampler, compute.device, world))


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
    stream = PretrainStream(
        corpus,
        packing=config.packing,
        masking=config.masking,
        tokens_per_step=config.tokens_per_step,
        seed=config.seed,
    )
    valid: list[MaskedBatch] = []
    if held_out.num_documents:
        valid = valid_batches(
            held_out,
            packing=config.packing,
            masking=config.masking,
            max_tokens=config.eval.max_tokens,
        )
    return PretrainData(
        corpus=corpus,
        stream=stream,
        valid=valid,
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
    minutes = config.save.every_minutes
    return LoopConfig(
        budget=budget,
        optim=config.optim,
        seed=config.seed,
        evaluate=Cadence(every_steps=config.eval.every_steps, times_a_run=EVALUATIONS_A_RUN),
        save=Cadence(
            every_steps=config.save.every_steps,
            every_seconds=None if minutes is None else minutes * 60.0,
        ),
    )


def explain_non_finite(error: NonFiniteLossError, data: PretrainData, folder: Path) -> str:
    """One line: the step, the documents, and what stands."""
    packs = data.stream.documents_of(error.step)
    documents = [d for pack in packs for d in pack] if error.pack is None else packs[error.pack]
    names = [data.corpus.name_of(d) for d in sorted(set(documents))]
    shown = ", ".join(names[:5]) + (f" and {len(names) - 5:,} more" if len(names) > 5 else "")
    good = newest_checkpoint(folder / "checkpoints", lambda line: None)
    advice = "no checkpoint was made before; try a lower --optim.learning_rate"
    if good:
        advice = f"start a new run from the last good one with a lower rate: --model {good}"
    return (
        f"the {error.what} of step {error.step + 1} is not finite (NaN or infinite), on documents "
        f"{shown}; weights were not updated; {advice}"
    )
