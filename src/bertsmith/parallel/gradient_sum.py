"""Gradients added up over the ranks, in buckets, while the backward pass still goes on.

What DistributedDataParallel does, with two differences that a run which must not be lost asks for:

- A rank whose pass fails half-way can still bring the sum to its end. DDP's reducer leaves the
  other ranks waiting for the buckets that are missing, and is of no use afterwards.
- Buckets are the same from the first step on. DDP cuts them anew after its first backward pass, so
  with three ranks or more, where the order of additions shows, a resumed run may round otherwise in
  its first step than one that was never stopped.

Buckets are filled from the last parameters to the first, about the order in which a backward pass
comes by them (Li et al. 2020, "PyTorch Distributed", section 3.2.3).
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor, nn

BUCKET_BYTES = 25 << 20
"""Large enough for a network's full rate, small enough to start early; DDP's choice."""


class GradientSum:
    """Adds up the gradients of parameters; every rank makes one, of the same parameters."""

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        """Make room for all gradients, 4 bytes a parameter; frozen parameters have none."""
        trained = [p for p in parameters if p.requires_grad]
        self._buckets = [_Bucket(some) for some in _portions(trained)]
        self._is_meeting = False
        self._num_begun = 0
        self._hooks = [
            parameter.register_post_accumulate_grad_hook(self._hook_of(bucket))  # type: ignore[no-untyped-call]
            for bucket in self._buckets
            for parameter in bucket.parameters
        ]

    def leave(self) -> None:
        """Look at no gradient any more: another sum takes over, of other parameters."""
        for hook in self._hooks:
            hook.remove()

    @contextmanager
    def meeting(self) -> Iterator[None]:
        """Around a backward pass, on every rank, after which gradients are the sum over ranks.

        A pass that did not come to its end, or left parameters out, adds what it has: the others
        get their sums all the same. It must not raise out of the block then.
        """
        for bucket in self._buckets:
            bucket.num_missing = len(bucket.parameters)
        self._num_begun, self._is_meeting = 0, True
        try:
            yield
        finally:
            self._is_meeting = False
        for bucket in self._buckets[self._num_begun :]:
            bucket.begin()
        for bucket in self._buckets:
            bucket.wait()

    def _hook_of(self, bucket: "_Bucket") -> Callable[[Tensor], None]:
        def is_ready(_: Tensor) -> None:
            if not self._is_meeting:
                return
            assert bucket.num_missing > 0, "one gradient a parameter in a backward pass"
            bucket.num_missing -= 1
            # In the order of buckets, whatever that of gradients: it has to be all ranks' own.
            while self._num_begun < len(self._buckets):
                following = self._buckets[self._num_begun]
                if following.num_missing:
                    break
                following.begin()
                self._num_begun += 1

        return is_ready


class _Bucket:
    """Gradients that travel together."""

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        """Of one data type, on one device."""
        self.parameters = parameters
        self.num_missing = 0
        """Parameters that the backward pass has not come by."""

        sizes = [p.numel() for p in parameters]
        self._sum = torch.zeros(sum(sizes), dtype=parameters[0].dtype, device=parameters[0].device)
        parts = torch.split(self._sum, sizes)
        self._views = [part.view_as(p) for part, p in zip(parts, parameters, strict=True)]
        self._work: dist.Work | None = None

    @torch.no_grad()
    def begin(self) -> None:
        """Send the gradients off, and have the parameters hold what will be their sums.

        Takes no memory: a rank that ran out of it does this, too.
        """
        pairs = list(zip(self.parameters, self._views, strict=True))
        for parameter, view in pairs:
            if parameter.grad is None:
                view.zero_()
        found = [(view, p.grad) for p, view in pairs if p.grad is not None]
        if found:
            torch._foreach_copy_([view for view, _ in found], [grad for _, grad in found])
        for parameter, view in pairs:
            parameter.grad = view
        self._work = dist.all_reduce(self._sum, async_op=True)

    def wait(self) -> None:
        """Until the sums are there; on a GPU, for whatever is computed next."""
        assert self._work is not None
        self._work.wait()
        self._work = None


def _portions(parameters: Sequence[nn.Parameter]) -> list[list[nn.Parameter]]:
    """Parameters by bucket, the last ones first; one that is larger has its bucket to itself."""
    portions: list[list[nn.Parameter]] = []
    room_bytes = 0
    for parameter in reversed(parameters):
        size_bytes = parameter.numel() * parameter.element_size()
        before = portions[-1][-1] if portions else parameter
        is_alike = (before.dtype, before.device) == (parameter.dtype, parameter.device)
        if not portions or not is_alike or size_bytes > room_bytes:
            portions.append([])
            room_bytes = BUCKET_BYTES
        portions[-1].append(parameter)
        room_bytes -= size_bytes
    return portions
