"""What a strategy counts."""

import threading

import torch
from torch import nn

from bertsmith.batch import MaskedBatch, StepShare, pack
from bertsmith.model.config import EncoderConfig
from bertsmith.model.heads import MaskedLM
from bertsmith.parallel.data_parallel import InFormat
from bertsmith.parallel.strategies import Strategy, shell_of
from bertsmith.parallel.world import World


def test_tokens_of_a_filler_are_not_counted() -> None:
    """Else a budget in tokens would end sooner on more ranks."""
    none = torch.zeros(0, dtype=torch.int64)
    packs = [
        MaskedBatch(inputs=pack([torch.arange(n)]), positions_M=none, targets_M=none)
        for n in (7, 2)
    ]
    share = StepShare(packs=packs, numbers=[0], num_packs=3)
    assert Strategy(nn.Linear(1, 1), World()).tokens_by_device(share) == [7]


def test_a_replica_computes_in_the_runs_format_in_a_thread_of_its_own() -> None:
    """A new thread has autocast off, and torch's DataParallel switches it on in fp16."""
    layer = InFormat(nn.Linear(4, 4), device_type="cpu", dtype=torch.bfloat16)
    found: list[torch.Tensor] = []
    with torch.autocast("cpu", dtype=torch.float16):
        thread = threading.Thread(target=lambda: found.append(layer(torch.ones(1, 4))))
        thread.start()
        thread.join()
    assert found[0].dtype == torch.bfloat16


def test_a_shell_holds_no_values_and_keeps_ties() -> None:
    shape = EncoderConfig(
        vocab_size=64,
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=32,
        max_position_embeddings=16,
    )
    model = MaskedLM(shape)
    shell = shell_of(model)
    assert {p.device.type for p in shell.parameters()} == {"meta"}
    assert {n: p.shape for n, p in shell.named_parameters()} == {
        n: p.shape for n, p in model.named_parameters()
    }
    assert {p.device.type for p in model.parameters()} == {"cpu"}
