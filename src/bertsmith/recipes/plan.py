"""`bertsmith plan`: what a run will need of a device, before a second of it is paid for.

Without torch, so that the answer is there at once; numpy comes in where this CPU is timed.
"""

from bertsmith.errors import UserError
from bertsmith.memory.devices import said_bytes
from bertsmith.memory.fit import auto_passes, largest_pack, least_needed, ways_to_fit
from bertsmith.memory.formula import plan_memory
from bertsmith.memory.shapes import NumberFormat, RunShape
from bertsmith.recipes.config import PlanFinetuneConfig, PlanPretrainConfig
from bertsmith.recipes.planning.device import Target, target_of
from bertsmith.recipes.planning.report import Report, as_json, as_text
from bertsmith.recipes.planning.shape import (
    Table,
    encoder_of,
    finetuning_shape,
    ground_of,
    pretraining_shape,
    shared,
)
from bertsmith.recipes.planning.times import times_of
from bertsmith.tasks.config import READ_WHOLLY


def main(config: PlanPretrainConfig | PlanFinetuneConfig) -> int:
    """Print the plan.

    Raises:
        UserError: After it, if no way of running fits one device.
    """
    report = plan(config)
    print(as_json(report) if config.json else as_text(report))
    limit = report.target.device.memory_bytes
    if report.fits or any(way.fits for way in report.ways):
        return 0
    if report.least.needed_bytes <= limit:
        return 0
    raise impossible(report)


def impossible(report: Report) -> UserError:
    """What says how small the smallest need is."""
    device = report.target.device
    return UserError(
        f"--device {device.name}: {said_bytes(device.memory_bytes)} are too little "
        f"for this model; with packs of {report.shape.longest} tokens and full "
        f"checkpointing it needs {said_bytes(report.least.needed_bytes)}"
    )


def plan(config: PlanPretrainConfig | PlanFinetuneConfig) -> Report:
    """Plan a run.

    Raises:
        UserError: The model, the device or a setting cannot be used.
    """
    target = target_of(config.device)
    whole = shape_of(config, target)
    asked = None if config.micro_batch == "auto" else config.micro_batch
    shape, limit = whole.in_passes(asked), target.device.memory_bytes
    found = plan_memory(shape)
    fits = found.needed_bytes <= limit
    auto = auto_passes(whole, limit)
    step_tokens = (
        config.tokens_per_step
        if isinstance(config, PlanPretrainConfig)
        else _tokens_of_step(config, whole.longest)
    )
    half = target.half_format
    ways = (
        []
        if fits
        else ways_to_fit(
            shape,
            limit,
            step_tokens=step_tokens,
            speedup=None if half is None else target.speedup,
            half=half or "bf16",
        )
    )
    formats: list[NumberFormat] = [shape.number_format, *([half] if half else [])]
    return Report(
        shape=shape,
        target=target,
        plan=found,
        fits=fits,
        micro_batch_tokens=None if auto is None else auto.tokens_per_pack,
        micro_batch_plan=None if auto is None else plan_memory(auto),
        largest_tokens_per_pack=largest_pack(shape, limit),
        times=times_of(config, shape, target, step_tokens=step_tokens),
        ways=ways,
        least=least_needed(shape, formats=formats),
    )


def shape_of(config: PlanPretrainConfig | PlanFinetuneConfig, target: Target) -> RunShape:
    """The run on its target, its packs whole.

    Raises:
        UserError: The model or a setting cannot be used.
    """
    encoder, ground = encoder_of(config), ground_of(target, config.precision)
    if isinstance(config, PlanPretrainConfig):
        alone = pretraining_shape(config, encoder, ground)
        return pretraining_shape(config, encoder, shared(ground, config.parallel, alone, target))
    longest = config.max_sequence_tokens or encoder.max_position_embeddings
    table = Table(
        num_labels=2 if config.task == "questions" else config.labels,
        trained_rows=config.table_rows,
        longest=longest,
        tokens_of_step=_tokens_of_step(config, longest),
        reads_words=config.task in READ_WHOLLY,
    )
    alone = finetuning_shape(config, encoder, ground, table)
    ground = shared(ground, config.parallel, alone, target)
    return finetuning_shape(config, encoder, ground, table)


def _tokens_of_step(config: PlanFinetuneConfig, longest: int) -> int:
    """Tokens behind a step, at most."""
    texts_per_row = 2 if config.task == "embedding" else 1
    return config.examples_per_step * texts_per_row * longest
