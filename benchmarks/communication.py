"""A model of data-parallel efficiency: computing against summing gradients. Nothing is measured.

A step of one GPU computes t seconds, a third forward and two thirds backward. Gradients are summed
in buckets while the backward pass goes on, except those of the embedding table, which are ready
only at its end (the LM head shares the table, so its gradient waits for the embedding's). What is
not hidden is added:

    exposed = max(0, other - backward * (1 - 1 / buckets)) + embeddings
    efficiency = compute / (compute + exposed)

A sum over n devices on links of B bytes a second each way takes 2 (n - 1) / n * bytes / B as a ring
(Patarasuk and Yuan 2009), on top of a start for each bucket. In a cluster the devices of a node sum
first, over the link inside it, then the nodes over the network, one after the other; the network's
start grows with log2 of the nodes, as in trees.
"""

import math
from dataclasses import dataclass

from bertsmith.model.config import PRESETS, EncoderConfig
from bertsmith.model.flops import training_flop

LINK_SHARE = 0.8
"""Of a link's bytes a second, how much a sum gets. With it 220 MB take 1.1 ms on the H100's NVLink
and 15 ms on PCIe 4, which is what others report."""

BUCKET_BYTES = 25 * 2**20
"""torch's default."""

SEQUENCE_TOKENS = 128
READ_SHARE = 0.15


@dataclass(frozen=True, kw_only=True)
class Hardware:
    """Some devices and what links them."""

    name: str
    tflop_per_second: float
    """Useful work a device does, at the best published rate: then summing weighs most."""

    devices_a_node: int
    nodes: int
    link_gb_per_second: float
    """Of a device inside its node, each way, as the vendor says."""

    network_gbit_per_second: float = 0.0
    """Of a whole node, each way."""

    link_start_seconds: float = 10e-6
    network_start_seconds: float = 20e-6


H100, A100 = 482.0, 158.0
"""TFLOP/s: NVIDIA's and Dell's BERT-large, MLPerf v3.0, computed from their logs."""

PCIE4 = 32.0
"""GB/s each way of 16 lanes."""

HARDWARE = (
    Hardware(
        name="8 H100, NVLink",
        tflop_per_second=H100,
        devices_a_node=8,
        nodes=1,
        link_gb_per_second=450,
    ),
    Hardware(
        name="8 A100, NVLink",
        tflop_per_second=A100,
        devices_a_node=8,
        nodes=1,
        link_gb_per_second=300,
    ),
    Hardware(
        name="8 A100, PCIe 4",
        tflop_per_second=A100,
        devices_a_node=8,
        nodes=1,
        link_gb_per_second=PCIE4,
    ),
    *(
        Hardware(
            name=f"{nodes} x 8 H100, {nic}",
            tflop_per_second=H100,
            devices_a_node=8,
            nodes=nodes,
            link_gb_per_second=450,
            network_gbit_per_second=gbit,
        )
        for nodes in (8, 64, 512)
        for nic, gbit in (("8 x 400 Gbit/s InfiniBand", 3200), ("400 Gbit/s", 400))
    ),
    *(
        Hardware(
            name=f"{nodes} x 8 A100, {nic}",
            tflop_per_second=A100,
            devices_a_node=8,
            nodes=nodes,
            link_gb_per_second=300,
            network_gbit_per_second=gbit,
            network_start_seconds=start,
        )
        for nodes, nic, gbit, start in (
            (32, "8 x 200 Gbit/s InfiniBand", 1600, 20e-6),
            (8, "100 Gbit/s Ethernet", 100, 50e-6),
            (8, "25 Gbit/s Ethernet", 25, 50e-6),
        )
    ),
    Hardware(
        name="4 x 8 A100 on PCIe 4, 25 Gbit/s Ethernet",
        tflop_per_second=A100,
        devices_a_node=8,
        nodes=4,
        link_gb_per_second=PCIE4,
        network_gbit_per_second=25,
        network_start_seconds=50e-6,
    ),
)
TOKENS = (4096, 16_384, 65_536, 262_144)
GRADIENT_BYTES = {"bf16": 2, "fp32": 4}


def parameters_of(config: EncoderConfig) -> tuple[int, int]:
    """Parameters of the masked LM in all, and those of the token embedding."""
    width, inner = config.hidden_size, config.intermediate_size
    block = 4 * (width * width + width) + 2 * width * inner + inner + width + 4 * width
    embedding = config.vocab_size * width
    others = (config.max_position_embeddings + config.type_vocab_size + 2) * width
    head = width * width + width + 2 * width + config.vocab_size
    return embedding + others + config.num_hidden_layers * block + head, embedding


def sum_seconds(hardware: Hardware, num_bytes: float) -> float:
    """Time to sum so many bytes of gradients over all devices."""
    inside, nodes = hardware.devices_a_node, hardware.nodes
    buckets = math.ceil(num_bytes / BUCKET_BYTES)
    link = LINK_SHARE * hardware.link_gb_per_second * 1e9
    seconds = 2 * (inside - 1) / inside * num_bytes / link
    seconds += buckets * hardware.link_start_seconds
    if nodes > 1:
        network = LINK_SHARE * hardware.network_gbit_per_second * 1e9 / 8
        seconds += 2 * (nodes - 1) / nodes * num_bytes / network
        seconds += buckets * 2 * math.log2(nodes) * hardware.network_start_seconds
    return seconds


def compute_seconds(hardware: Hardware, config: EncoderConfig, num_tokens: int) -> float:
    """Time of one device's forward and backward pass."""
    flop = training_flop(
        config,
        [SEQUENCE_TOKENS] * (num_tokens // SEQUENCE_TOKENS),
        num_read=round(READ_SHARE * num_tokens),
        scores_vocabulary=True,
    )
    return flop / (hardware.tflop_per_second * 1e12)


def efficiency(
    hardware: Hardware, config: EncoderConfig, *, num_tokens: int, gradient_bytes: int
) -> float:
    """Share of a step that computes; 1.0 is as fast a device as one alone."""
    compute = compute_seconds(hardware, config, num_tokens)
    total, embedding = parameters_of(config)
    other = (total - embedding) * gradient_bytes
    hidden = 2 / 3 * compute * (1 - 1 / math.ceil(other / BUCKET_BYTES))
    exposed = max(0.0, sum_seconds(hardware, other) - hidden)
    exposed += sum_seconds(hardware, embedding * gradient_bytes)
    return compute / (compute + exposed)


def model_rows() -> list[dict[str, str | float]]:
    """One row for each hardware, model and type of gradient."""
    rows: list[dict[str, str | float]] = []
    for hardware in HARDWARE:
        for name in ("bert-base", "bert-large"):
            for kind, num_bytes in GRADIENT_BYTES.items():
                total, _ = parameters_of(PRESETS[name])
                row: dict[str, str | float] = {
                    "hardware": hardware.name,
                    "model": name,
                    "gradients": kind,
                    "megabytes": round(total * num_bytes / 1e6),
                    "sum_milliseconds": round(sum_seconds(hardware, total * num_bytes) * 1e3, 2),
                }
                for tokens in TOKENS:
                    share = efficiency(
                        hardware, PRESETS[name], num_tokens=tokens, gradient_bytes=num_bytes
                    )
                    row[f"{tokens}"] = round(share, 4)
                rows.append(row)
    return rows
