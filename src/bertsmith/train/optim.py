"""AdamW (Loshchilov and Hutter 2019) in one pass over memory, and the gradient's whole norm.

Clipping costs no pass of its own: the factor is applied while the update reads the gradient.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from bertsmith.model.kernels import build, calls
from bertsmith.parallel.sharding import own_part
from bertsmith.train.config import OptimConfig


@dataclass(frozen=True, kw_only=True)
class ParameterGroup:
    """Parameters that are treated alike."""

    name: str
    """"decayed" or "not decayed"."""

    parameters: dict[str, nn.Parameter]
    """By their name in the model, each once even if shared."""

    weight_decay: float


def group_parameters(model: nn.Module, config: OptimConfig) -> list[ParameterGroup]:
    """Split trainable parameters by module type: norms and biases are never decayed.

    By type and not by name, so that no naming habit can slip a norm through. Embedding tables
    follow `decay_embeddings`.
    """
    decayed: dict[str, nn.Parameter] = {}
    plain: dict[str, nn.Parameter] = {}
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
            (decayed if decays else plain)[name] = parameter
    groups = [
        ParameterGroup(name="decayed", parameters=decayed, weight_decay=config.weight_decay),
        ParameterGroup(name="not decayed", parameters=plain, weight_decay=0.0),
    ]
    return [group for group in groups if group.parameters]


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
                }
            )
        super().__init__(torch_groups, {})
        self._config = config
        self.updates = 0
        self.clip_factor = 1.0
        for parameter in self._names:
            self.state[parameter] = {
                "first_moment": torch.zeros_like(parameter),
                "second_moment": torch.zeros_like(parameter),
            }

    def set_learning_rate(self, learning_rate: float) -> None:
        """Rate of the next step, for each group."""
        for group in self.param_groups:
            group["lr"] = learning_rate

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
        norms = torch._foreach_norm(grads, 2, dtype=torch.float64)
        return float(torch.stack(list(norms)).square().sum())

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """One update of every parameter that has a gradient; the gradient is not changed."""
        assert closure is None, "the loss is computed by train_step"
        self.updates += 1
        for group in self.param_groups:
            parameters = [p for p in group["params"] if p.grad is not None]
            if not parameters:
                continue
            lib = build.load("fp32") if parameters[0].device.type == "cpu" else None
            if lib is None:
                self._torch_step(group, parameters)
            else:
                self._kernel_step(group, parameters)

    def _kernel_step(self, group: dict[str, object], parameters: list[nn.Parameter]) -> None:
        lib, config = build.load("fp32"), self._config
        assert lib is not None
        rate, decay = float(group["lr"]), float(group["weight_decay"])  # type: ignore[arg-type]
        calls.adamw(
            lib,
            [own_part(p) for p in parameters],
            [own_part(p.grad).contiguous() for p in parameters if p.grad is not None],
            [own_part(self.state[p]["first_moment"]) for p in parameters],
            [own_part(self.state[p]["second_moment"]) for p in parameters],
            calls.AdamWStep(
                rate=rate / (1.0 - config.beta1**self.updates),
                shrink=1.0 - rate * decay,
                beta1=config.beta1,
                beta2=config.beta2,
                root=(1.0 - config.beta2**self.updates) ** -0.5,
                eps=config.eps,
                factor=self.clip_factor,
            ),
        )

    def _torch_step(self, group: dict[str, object], parameters: list[nn.Parameter]) -> None:
        device = parameters[0].device
        # The fused kernel divides by grad_scale and counts steps before it is called.
        torch._fused_adamw_(
            [own_part(p) for p in parameters],
            [own_part(p.grad) for p in parameters if p.grad is not None],
            [own_part(self.state[p]["first_moment"]) for p in parameters],
            [own_part(self.state[p]["second_moment"]) for p in parameters],
            [],
            [torch.tensor(float(self.updates), device=device)] * len(parameters),
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
