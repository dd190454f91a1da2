"""Which parts of a model are trained, from when on, and at which learning rate."""

from collections.abc import Callable, Iterator, Mapping
from itertools import groupby

from torch import nn

from bertsmith.data.checkup.grammar import number_of
from bertsmith.errors import UserError
from bertsmith.model.parts import EMBEDDINGS, HEAD, part_of, parts_of, read_parts, spread
from bertsmith.train.config import OptimConfig
from bertsmith.train.layer_rates import PartPlan, plan_parts


def freeze(text: str | None, model: nn.Module, *, num_layers: int) -> None:
    """Have some parts ask for no gradient: they stay as they are.

    Args:
        text: Value of `--freeze`.
        model: Before an optimizer or a strategy sees it.
        num_layers: Of its encoder.

    Raises:
        UserError: It has no such part.
    """
    if text is None:
        return
    try:
        frozen = set(spread(read_parts(text), num_layers=num_layers))
    except ValueError as error:
        raise UserError(f"--freeze {text}: {error}") from error
    for name, parameter in model.named_parameters():
        if part_of(name) in frozen:
            parameter.requires_grad_(False)


def is_frozen(model: nn.Module, part: str) -> bool:
    """Whether nothing of a part is trained."""
    return not any(p.requires_grad for n, p in model.named_parameters() if part_of(n) == part)


def plan_trained_parts(
    config: OptimConfig,
    model: nn.Module,
    *,
    updates_per_epoch: int | None,
    say: Callable[[str], None],
) -> dict[str, PartPlan]:
    """How each part is trained; where not all are alike, that is said as a table.

    Args:
        config: The optimizer's.
        model: With its frozen parameters marked.
        updates_per_epoch: None where a run does not count epochs.
        say: Told the table, a line at a time.

    Raises:
        UserError: The config does not fit the model.
    """
    named = dict(model.named_parameters())
    parts = parts_of(named)
    try:
        plans = plan_parts(config, parts, updates_per_epoch=updates_per_epoch)
    except ValueError as error:
        option = "rates" if config.rates is not None else "unfreeze"
        raise UserError(f"--optim.{option} {error}") from error
    trained = {
        part: sum(p.numel() for n, p in named.items() if part_of(n) == part and p.requires_grad)
        for part in parts
    }
    if len(set(plans.values())) > 1 or not all(trained.values()):
        for line in _table(config, plans, trained):
            say(line)
    return plans


def _table(
    config: OptimConfig, plans: Mapping[str, PartPlan], trained: Mapping[str, int]
) -> Iterator[str]:
    """Lines, from the head down; layers in a row that are alike share one."""
    yield f"{'part':<14}{'peak rate':>11}{'parameters':>14}  trained"
    alike = groupby(reversed(list(plans)), key=lambda part: _sort_of(part, plans, trained))
    for _, run in alike:
        some = list(run)
        plan, count = plans[some[0]], sum(trained[part] for part in some)
        when = "from the start" if plan.begins == 0 else f"after {number_of(plan.begins, 'update')}"
        rate = f"{config.learning_rate * plan.share:.3g}" if count else "-"
        yield f"{_said(some):<14}{rate:>11}{count:>14,}  {when if count else 'no, frozen'}"


def _sort_of(
    part: str, plans: Mapping[str, PartPlan], trained: Mapping[str, int]
) -> tuple[object, ...]:
    """What parts in one line have alike."""
    place = part if part in (EMBEDDINGS, HEAD) else "layers"
    return (place, None) if trained[part] == 0 else (place, plans[part])


def _said(parts: list[str]) -> str:
    """Parts in a row, the upper ones first."""
    if len(parts) > 1:
        return f"layers {parts[-1]}-{parts[0]}"
    return f"layer {parts[0]}" if parts[0].isdecimal() else parts[0]
