"""AdamW (Loshchilov and Hutter 2019) in one pass over memory, and the gradient's whole norm.

Clipping costs no pass of its own: the factor is applied while the update reads the gradient.
"""

import ctypes
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from bertsmith.model.kernels import build, calls
from bertsmith.model.parts import part_of
from bertsmith.parallel.sharding import own_part
from bertsmith.train.config import OptimConfig
from bertsmith.train.layer_rates import PartPlan

_ALL_ALIKE = PartPlan(share=1.0, begins=0)


@dataclass(frozen=True, kw_only=True)
class ParameterGroup:
    """Parameters that are treated alike."""

    name: str
    """"decayed" or "not decayed"."""

    parameters: dict[str, nn.Parameter]
    """By their name in the model, each once even if shared."""

    weight_decay: float

    share: float = 1.0
    """Their learning rate over that of the step."""

    begins: int = 0
    """Updates before their first: where layers are unfrozen one after the other."""


def group_parameters(
    model: nn.Module, config: OptimConfig, parts: Mapping[str, PartPlan] | None = None
) -> list[ParameterGroup]:
    """Split trainable parameters by module type: norms and biases are never decayed.

    By type and not by name, so that no naming habit can slip a norm through. Embedding tables
    follow `decay_embeddings`.

    Args:
        model: Its parameters with `requires_grad` are split; a shared one counts once, under the
            name it has first.
        config: What decays, and how much.
        parts: How each part is trained (`model.parts`); None: all alike.
    """
    plans = {**(parts or {})}
    groups: dict[tuple[PartPlan, bool], dict[str, nn.Parameter]] = {}
    seen: set[int] = set()
    for module_name, module in model.named_modules():
        for key, parameter in module.named_parameters(recurse=False):
            if not parameter.requires_grad or id(parameter) in seen:
                continue
            seen.add(id(parameter))
            decays = parameter.ndim >= 2 and not isinstance(module, nn.LayerNorm)
            if isinstance(module, nn.Embedding):
                decays = config.decay_embeddings
            name = f"{module_name}.{key}" if module_name else key
            plan = plans.get(part_of(name), _ALL_ALIKE)
            groups.setdefault((plan, decays), {})[name] = parameter
    return [
        ParameterGroup(
            name="decayed" if decays else "not decayed",
            parameters=parameters,
            weight_decay=config.weight_decay if decays else 0.0,
            share=plan.share,
            begins=plan.begins,
        )
        for (plan, decays), parameters in sorted(groups.items(), key=lambda item: not item[0][1])
    ]


MOMENT_TYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}

ELEMENTS_AT_ONCE = 1 << 22
"""Of a tensor that torch takes in a wider format: copies take a few times 16 MiB, not more."""


def rounding_key(name: str, update: int) -> int:
    """32 bits for the roundings of a parameter's moments in an update, the same on any machine."""
    return zlib.crc32(f"{update}/{name}".encode())


def _adamw_bf16(
    values: Tensor,
    grads: Tensor,
    first: Tensor,
    second: Tensor,
    *,
    key: int,
    start: int,
    by: calls.AdamWStep,
) -> None:
    """As the kernel of that name, for elements from `start` on."""
    grads = grads * by.factor
    m = first.float()
    m += (1.0 - by.beta1) * (grads - m)
    v = by.beta2 * second.float() + (1.0 - by.beta2) * grads * grads
    values.mul_(by.shrink).sub_(by.rate * m / (v.sqrt() * by.root + by.eps))
    x = torch.arange(start, start + m.numel(), device=m.device)
    x = (x * 0x9E3779B9 + key) & 0xFFFFFFFF
    x = ((x ^ (x >> 16)) * 0x7FEB352D) & 0xFFFFFFFF
    x = ((x ^ (x >> 15)) * 0x846CA68B) & 0xFFFFFFFF
    x ^= x >> 16
    first.copy_(_rounded_at_random(m, x & 0xFFFF))
    second.copy_(_rounded_at_random(v, x >> 16))


def _rounded_at_random(values: Tensor, random: Tensor) -> Tensor:
    """One of the two bf16 neighbours, the nearer one more often; still in fp32."""
    bits = values.view(torch.int32) + random.int()
    return (bits & -65536).view(torch.float32)


class AdamW(torch.optim.Optimizer):
    """AdamW whose learning rate and clip factor are arguments of the step.

    A `torch.optim.Optimizer`, so that `GradScaler` and sharding know it. On a CPU with compiled
    kernels all tensors of a group are updated in one call; elsewhere torch's fused AdamW does it.
    """

    def __init__(self, groups: Iterable[ParameterGroup], config: OptimConfig) -> None:
        """Moments start at zero and are allocated at once, so that their memory is known."""
        self._names: dict[nn.Parameter, str] = {}
        torch_groups = []
        for group in groups:
            self._names |= {p: name for name, p in group.parameters.items()}
            torch_groups.append(
                {
                    "params": list(group.parameters.values()),
                    "lr": config.learning_rate,
                    "weight_decay": group.weight_decay,
                    "share": group.share,
                    "begins": group.begins,
                }
            )
        super().__init__(torch_groups, {})
        self._config = config
        self.updates = 0
        self.clip_factor = 1.0
        for parameter in self._names:
            self.state[parameter] = {
                moment: torch.zeros_like(parameter, dtype=MOMENT_TYPES[config.moments])
                for moment in ("first_moment", "second_moment")
            }

    def set_learning_rate(self, learning_rate: float) -> None:
        """Rate of the next step; each group has its share of it."""
        for group in self.param_groups:
            group["lr"] = learning_rate * group["share"]

    def thaw(self) -> bool:
        """Have each group ask for gradients once its time has come, and not before.

        Returns:
            Whether any group began or, after a step back, no longer has begun.
        """
        has_changed = False
        for group in self.param_groups:
            is_trained = self.updates >= group["begins"]
            for parameter in group["params"]:
                has_changed |= parameter.requires_grad != is_trained
                parameter.requires_grad_(is_trained)
        return has_changed

    def squared_grad_norm(self) -> float:
        """Squared L2 norm of the gradient, or of this rank's shards of it, summed in float64.

        In float64 the sum does not depend on how tensors are split over ranks, beyond what rounding
        to fp32 hides: a clipped run equals itself at another world size.
        """
        grads = [own_part(p.grad) for p in self._names if p.grad is not None]
        if not grads:
            return 0.0
        lib = build.load("fp32") if grads[0].device.type == "cpu" else None
        if lib is not None:
            return calls.sum_of_squares(lib, [g.contiguous() for g in grads])
        # In pieces, since torch makes a float64 copy on a CPU.
        pieces = [piece for g in grads for piece in torch.split(g.reshape(-1), ELEMENTS_AT_ONCE)]
        norms = torch._foreach_norm(pieces, 2, dtype=torch.float64)
        return float(torch.stack(list(norms)).square().sum())

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """One update of every parameter that has a gradient; gradients are spent by it."""
        assert closure is None, "the loss is computed by train_step"
        self.updates += 1
        for group in self.param_groups:
            parameters = [p for p in group["params"] if p.grad is not None]
            if not parameters:
                continue
            lib = build.load("fp32") if parameters[0].device.type == "cpu" else None
            if self._config.moments == "bf16":
                self._bf16_step(lib, group, parameters)
            elif lib is None:
                self._torch_step(group, parameters)
            else:
                self._kernel_step(group, parameters)

    def _updates_of(self, group: Mapping[str, object]) -> int:
        """Updates of a group, the one under way included: its moments began with its first."""
        return self.updates - int(group["begins"])  # type: ignore[call-overload,no-any-return]

    def _kernel_step(self, group: dict[str, object], parameters: list[nn.Parameter]) -> None:
        lib = build.load("fp32")
        assert lib is not None
        calls.adamw(
            lib,
            [own_part(p) for p in parameters],
            [own_part(p.grad).contiguous() for p in parameters if p.grad is not None],
            [own_part(self.state[p]["first_moment"]) for p in parameters],
            [own_part(self.state[p]["second_moment"]) for p in parameters],
            self._numbers(group),
        )

    def _numbers(self, group: dict[str, object]) -> calls.AdamWStep:
        """Of this step, for a group."""
        config, updates = self._config, self._updates_of(group)
        rate, decay = float(group["lr"]), float(group["weight_decay"])  # type: ignore[arg-type]
        return calls.AdamWStep(
            rate=rate / (1.0 - config.beta1**updates),
            shrink=1.0 - rate * decay,
            beta1=config.beta1,
            beta2=config.beta2,
            root=(1.0 - config.beta2**updates) ** -0.5,
            eps=config.eps,
            factor=self.clip_factor,
        )

    def _bf16_step(
        self,
        lib: ctypes.CDLL | None,
        group: dict[str, object],
        parameters: list[nn.Parameter],
    ) -> None:
        """Moments of bf16; the draws of a rounding follow from tensor, update and place in it."""
        numbers = self._numbers(group)
        keys = [rounding_key(self._names[p], self.updates) for p in parameters]
        values = [own_part(p) for p in parameters]
        grads = [own_part(p.grad).contiguous() for p in parameters if p.grad is not None]
        first = [own_part(self.state[p]["first_moment"]) for p in parameters]
        second = [own_part(self.state[p]["second_moment"]) for p in parameters]
        if lib is not None:
            calls.adamw_bf16(lib, values, grads, first, second, keys, numbers)
            return
        for tensors, key in zip(zip(values, grads, first, second, strict=True), keys, strict=True):
            for start in range(0, tensors[0].numel(), ELEMENTS_AT_ONCE):
                piece = (t.view(-1)[start : start + ELEMENTS_AT_ONCE] for t in tensors)
                _adamw_bf16(*piece, key=key, start=start, by=numbers)

    def _torch_step(self, group: dict[str, object], parameters: list[nn.Parameter]) -> None:
        device = parameters[0].device
        # The fused kernel divides by grad_scale and counts steps before it is called.
        torch._fused_adamw_(
            [own_part(p) for p in parameters],
            [own_part(p.grad) for p in parameters if p.grad is not None],
            [own_part(self.state[p]["first_moment"]) for p in parameters],
            [own_part(self.state[p]["second_moment"]) for p in parameters],
            [],
            [torch.tensor(float(self._updates_of(group)), device=device)] * len(parameters),
            lr=float(group["lr"]),  # type: ignore[arg-type]
            beta1=self._config.beta1,
            beta2=self._config.beta2,
            weight_decay=float(group["weight_decay"]),  # type: ignore[arg-type]
            eps=self._config.eps,
            amsgrad=False,
            maximize=False,
            grad_scale=torch.tensor(1.0 / self.clip_factor, device=device),
            found_inf=torch.zeros((), device=device),
        )

    def named_moments(self) -> Iterator[tuple[str, Tensor]]:
        """Every moment by a name that a checkpoint can keep: `first_moment/PARAMETER`."""
        for parameter, name in self._names.items():
            for moment in ("first_moment", "second_moment"):
                yield f"{moment}/{name}", self.state[parameter][moment]
