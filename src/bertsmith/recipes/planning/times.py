"""How long a planned run takes, and what that costs."""

import time
from dataclasses import dataclass

from bertsmith.memory.fit import again_share
from bertsmith.memory.shapes import RunShape
from bertsmith.model.flops import training_flop
from bertsmith.recipes.config import PlanFinetuneConfig, PlanPretrainConfig, PretrainConfig
from bertsmith.recipes.planning.device import BF16_SPEEDUP, Target
from bertsmith.recipes.planning.shape import manifest_of

SHARE_OF_PUBLISHED = 0.35
"""Of a GPU's published rate, what training reaches: about what others report for BERT in plain
operations (docs/memory.md). Not measured by us."""

SHARE_OF_GEMM = 0.5
"""Of the rate at which this CPU multiplies matrices, what training reaches at least."""


@dataclass(frozen=True, kw_only=True)
class Times:
    """Of one step, and of the whole run; None where not known."""

    flop_per_second: float
    """Of all devices together."""

    rate_source: str
    step_seconds: float
    step_tokens: int
    steps: float | None
    run_seconds: float | None
    kilowatt_hours: float | None
    cost: float | None


def times_of(
    config: PlanPretrainConfig | PlanFinetuneConfig,
    shape: RunShape,
    target: Target,
    *,
    step_tokens: int,
) -> Times | None:
    """Seconds, energy and cost; None where nobody knows the device's rate."""
    rate, source = rate_of(config.flop_per_second, shape, target)
    if rate is None:
        return None
    count = max(step_tokens // shape.longest, 1)
    reads_firsts = shape.most_read is not None and shape.read_share < 1.0
    flop = training_flop(
        shape.encoder,
        [shape.longest] * count,
        num_read=count if reads_firsts else shape.num_read(step_tokens),
        scores_vocabulary=shape.task == "masked_lm",
    )
    if isinstance(config, PlanFinetuneConfig) and config.task == "embedding":
        flop *= 4 / 3  # a forward pass more, to see the step whole; a backward costs two
    together = rate * shape.ranks
    step_seconds = flop * (1.0 + again_share(shape)) / together
    steps = steps_of(config, step_tokens=step_tokens)
    run_seconds = None if steps is None else steps * step_seconds
    if isinstance(config, PretrainConfig) and config.minutes is not None:
        run_seconds = config.minutes * 60.0
        steps = run_seconds / step_seconds
    hours = None if run_seconds is None else run_seconds / 3600.0 * shape.ranks
    watts, price = target.device.watts, config.price_per_hour
    return Times(
        flop_per_second=together,
        rate_source=source,
        step_seconds=step_seconds,
        step_tokens=step_tokens,
        steps=steps,
        run_seconds=run_seconds,
        kilowatt_hours=None if hours is None or watts is None else watts * hours / 1000.0,
        cost=None if hours is None or price is None else price * hours,
    )


def steps_of(config: PlanPretrainConfig | PlanFinetuneConfig, *, step_tokens: int) -> float | None:
    """Steps of the budget; None where it does not say."""
    if isinstance(config, PlanFinetuneConfig):
        if config.steps is not None or config.examples is None:
            return config.steps
        return config.epochs * -(-config.examples // config.examples_per_step)
    if config.steps is not None:
        return config.steps
    tokens: float | None = config.tokens
    if config.epochs is not None:
        counts = manifest_of(config.data).get("counts", {})
        in_an_epoch = counts.get("train_tokens")
        tokens = None if in_an_epoch is None else config.epochs * in_an_epoch
    return None if tokens is None else tokens / step_tokens


def rate_of(stated: float | None, shape: RunShape, target: Target) -> tuple[float | None, str]:
    """FLOP/s of one device in training, and who says so."""
    if stated is not None:
        return stated, "as stated"
    rates = target.device.tflop_per_second
    if target.device.kind == "cpu":
        speedup = 1.0 if shape.number_format == "fp32" else BF16_SPEEDUP
        return (
            SHARE_OF_GEMM * speedup * gemm_flop_per_second() / shape.ranks,
            f"{SHARE_OF_GEMM:.0%} of the rate of matrix products, timed here just now",
        )
    if rates is None:
        return None, "not known"
    return (
        SHARE_OF_PUBLISHED * rates[shape.number_format] * 1e12,
        f"{SHARE_OF_PUBLISHED:.0%} of the published rate, an assumption",
    )


def gemm_flop_per_second(*, seconds: float = 0.2) -> float:
    """This CPU's rate of fp32 matrix products, by numpy; the fastest of some."""
    import numpy as np  # noqa: PLC0415 - only where this CPU is planned for

    left = np.ones((1024, 768), np.float32)
    right = np.ones((768, 768), np.float32)
    fastest, end = float("inf"), time.perf_counter() + seconds
    while True:
        started = time.perf_counter()
        left @ right
        now = time.perf_counter()
        fastest = min(fastest, now - started)
        if now >= end:
            return 2.0 * 1024 * 768 * 768 / fastest
