"""The plan of a run's memory: its states, and the highest point of each of its phases."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

from bertsmith.memory.fused_walk import FusedWalk
from bertsmith.memory.ledger import Ledger
from bertsmith.memory.lora_walk import LoraWalk
from bertsmith.memory.plain_walk import PlainWalk
from bertsmith.memory.shapes import RunShape, parameters_of
from bertsmith.memory.walk import FP32, Walk

Phase = Literal["forward and backward", "optimizer", "evaluation", "save"]

MOMENTS = 2
"""AdamW's."""

FIXED_BYTES = {"cpu": 448 << 20, "cuda": 600 << 20}
"""What a run takes beside tensors, unless its shape says: on a CPU the interpreter with torch, and
oneDNN's compiled products (measured, resident: 380 to 450 MiB); on a GPU the CUDA context and its
libraries' workspaces (published figures, not measured here)."""

STILL_TO_COME_BYTES = {"cpu": 64 << 20, "cuda": 200 << 20}
"""Of these, what a run takes after its model is on its device."""

HEAP_SHARE = {"cpu": 0.3, "cuda": 0.05}
"""What an allocator holds beyond the tensors that are alive, over their peak: freed blocks that fit
nothing else. On a CPU 0.1 to 0.4 were measured (the grid's resident memory); on a GPU, assumed."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryPlan:
    """Bytes of tensors on one device at the highest point of a run, by what they are for."""

    weights_bytes: int
    """fp32 weights, and their copies in the type of matrix products."""

    gradients_bytes: int
    moments_bytes: int
    activations_bytes: int
    """What forward keeps for backward, and the pack."""

    logits_bytes: int
    workspace_bytes: int
    """What lives within an operation, or between two."""

    snapshot_bytes: int
    """The copy of model and moments from which checkpoints are written; a CPU run has it beside the
    model, a GPU run in the machine's memory."""

    fixed_bytes: int
    """Beside tensors: interpreter and libraries, or the CUDA context. Not part of the peak."""

    peak_bytes: int
    """The sum of all but the fixed: what an allocator would report."""

    peak_phase: Phase

    phase_peaks_bytes: Mapping[Phase, int]

    heap_bytes: int
    """What the allocator may hold beyond the peak; to choose by, and in no sum."""

    @property
    def needed_bytes(self) -> int:
        """What has to be free on the device."""
        return self.peak_bytes + self.fixed_bytes

    @property
    def safe_bytes(self) -> int:
        """With which a run can be begun without a second thought."""
        return self.needed_bytes + self.heap_bytes


def plan_memory(shape: RunShape) -> MemoryPlan:
    """Walk through a step, an update, an evaluation and a save, and keep the highest point."""
    found: dict[Phase, Ledger] = {
        "forward and backward": _training(shape),
        "optimizer": _optimizer(shape),
        "evaluation": _evaluation(shape),
        "save": _save(shape),
    }
    phase = max(found, key=lambda name: found[name].peak_bytes)
    top = found[phase]
    return MemoryPlan(
        weights_bytes=top.at_peak["weights"],
        gradients_bytes=top.at_peak["gradients"],
        moments_bytes=top.at_peak["moments"],
        activations_bytes=top.at_peak["activations"],
        logits_bytes=top.at_peak["logits"],
        workspace_bytes=top.at_peak["workspace"],
        snapshot_bytes=top.at_peak["snapshot"],
        fixed_bytes=fixed_bytes(shape),
        peak_bytes=top.peak_bytes,
        peak_phase=phase,
        heap_bytes=round(HEAP_SHARE[shape.device] * top.peak_bytes),
        phase_peaks_bytes={name: ledger.peak_bytes for name, ledger in found.items()},
    )


def fixed_bytes(shape: RunShape) -> int:
    """What a run takes beside tensors."""
    return FIXED_BYTES[shape.device] if shape.fixed_bytes is None else shape.fixed_bytes


def held_bytes(shape: RunShape) -> int:
    """What a run holds before its first step: weights and moments."""
    return _states(replace(shape, has_snapshot=False)).peak_bytes


def held_later_bytes(shape: RunShape) -> int:
    """What it holds from its first save on: the snapshot."""
    return _states(shape).peak_bytes - held_bytes(shape)


def _states(shape: RunShape) -> Ledger:
    """Weights and moments, which are there all the time; and what sharing adds to them."""
    ledger, counts = Ledger(), parameters_of(shape)
    shards = shape.ranks if shape.sharing == "fsdp" else 1
    ledger.hold("weights", "weights", -(-FP32 * counts.trained // shards))
    ledger.hold("frozen", "weights", FP32 * counts.frozen)
    ledger.hold("aside", "weights", FP32 * counts.aside)
    ledger.hold("moments", "moments", -(-MOMENTS * shape.moment_bytes * counts.trained // shards))
    if counts.aside:  # which row stands for which id
        ledger.hold("row numbers", "workspace", 8 * (shape.encoder.vocab_size + shape.table_rows))
    if shape.has_snapshot and shape.device == "cpu":
        whole = counts.trained - counts.table + max(counts.aside, counts.table) + counts.frozen
        ledger.hold("snapshot", "snapshot", FP32 * (whole + MOMENTS * counts.trained))
    return ledger


def _walk(shape: RunShape, ledger: Ledger) -> Walk:
    # ddp's buckets hold every gradient from the start.
    accumulates = shape.packs_per_step > 1 or shape.sharing == "ddp"
    kind: type[Walk] = FusedWalk if shape.body == "kernels" else PlainWalk
    if shape.adapters is not None:
        kind = LoraWalk
    return kind(shape, ledger, accumulates=accumulates)


def _hold_gradients(shape: RunShape, ledger: Ledger) -> None:
    count = parameters_of(shape).trained
    shards = shape.ranks if shape.sharing == "fsdp" else 1
    ledger.hold("gradients", "gradients", -(-FP32 * count // shards))


def _hold_gathered(shape: RunShape, ledger: Ledger) -> None:
    """What fsdp has in one piece: the root, and two blocks (the next is fetched meanwhile)."""
    counts = parameters_of(shape)
    root = counts.table + counts.embeddings + counts.head
    size = shape.product_bytes if shape.device == "cuda" else FP32
    ledger.hold("gathered", "workspace", size * (root + 2 * counts.block))
    if shape.packs_per_step > 1:  # gradients stay whole until the step's last pass
        ledger.hold("whole gradients", "workspace", FP32 * counts.trained)


def _training(shape: RunShape) -> Ledger:
    ledger = _states(shape)
    if shape.sharing == "fsdp":
        _hold_gathered(shape, ledger)
        _hold_gradients(shape, ledger)
        walk = _walk(shape, ledger)
        walk.accumulates = True  # a gradient in one piece is spread over the ranks, and freed
    else:
        walk = _walk(shape, ledger)
        if walk.accumulates:
            _hold_gradients(shape, ledger)
    ledger.start_phase()
    walk.train()
    return ledger


def _optimizer(shape: RunShape) -> Ledger:
    """In place, on gradients that are all there."""
    ledger = _states(shape)
    _hold_gradients(shape, ledger)
    return ledger


def _evaluation(shape: RunShape) -> Ledger:
    ledger = _states(shape)
    if shape.sharing == "ddp":
        _hold_gradients(shape, ledger)
    if shape.sharing == "fsdp":
        _hold_gathered(shape, ledger)
    ledger.start_phase()
    _walk(shape, ledger).evaluate()
    return ledger


def _save(shape: RunShape) -> Ledger:
    """The copy is filled in place; fsdp gathers the model for it, tensor by tensor."""
    ledger, counts = _states(shape), parameters_of(shape)
    if shape.sharing == "ddp":
        _hold_gradients(shape, ledger)
    if shape.sharing == "fsdp":
        ledger.touch("workspace", FP32 * max(counts.table, counts.block_products))
    return ledger
