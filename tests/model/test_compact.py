"""A narrowed token table trains like the whole one, and is shown whole when asked."""

import numpy as np
import torch

from bertsmith.batch import LabelledBatch, StepShare, pack
from bertsmith.model.compact import CompactVocabulary
from bertsmith.model.config import EncoderConfig
from bertsmith.model.heads import SequenceClassifier, initialize
from bertsmith.parallel.strategies import Strategy
from bertsmith.parallel.world import World
from bertsmith.train.config import OptimConfig
from bertsmith.train.optim import AdamW, group_parameters
from bertsmith.train.precision import Compute
from bertsmith.train.step import train_step

TINY = EncoderConfig(
    vocab_size=60,
    hidden_size=16,
    num_hidden_layers=1,
    num_attention_heads=2,
    intermediate_size=32,
    max_position_embeddings=16,
)
USED = torch.tensor([41, 7, 7, 2, 19, 33, 5])
FP32 = Compute(device=torch.device("cpu"), dtype=torch.float32)
OPTIM = OptimConfig(learning_rate=1e-2, weight_decay=0.1)


def new_model() -> SequenceClassifier:
    model = SequenceClassifier(TINY, num_labels=3)
    initialize(model, config=TINY, seed=0)
    return model


def batch_of(ids: list[torch.Tensor]) -> LabelledBatch:
    return LabelledBatch(
        inputs=pack(ids), labels_N=torch.tensor([0, 2]), rows_N=torch.tensor([0, 1])
    )


def train_both() -> tuple[SequenceClassifier, SequenceClassifier, CompactVocabulary]:
    """Eight steps with the whole table and with a narrow one, dropout on."""
    whole, narrow = new_model(), new_model()
    compact = CompactVocabulary(narrow.encoder, USED)
    optimizers = [AdamW(group_parameters(m, OPTIM), OPTIM) for m in (whole, narrow)]
    rng = np.random.default_rng(0)
    for step in range(8):
        ids = [USED[torch.from_numpy(rng.integers(0, len(USED), n))] for n in (4, 9)]
        batches = [batch_of(ids), batch_of([compact.compact_ids(i) for i in ids])]
        for model, optimizer, batch in zip((whole, narrow), optimizers, batches, strict=True):
            train_step(
                Strategy(model, World()),
                StepShare.of_all([batch]),
                optimizer,
                compute=FP32,
                scaler=None,
                step=step,
                seed=0,
                learning_rate=1e-2,
                max_grad_norm=1.0,
            )
    return whole, narrow, compact


def test_used_rows_and_all_other_weights_train_as_with_the_whole_table() -> None:
    whole, narrow, compact = train_both()
    assert narrow.encoder.embeddings.token.weight.shape == (6, 16)
    with compact.whole():
        rows = torch.unique(USED)
        for (name, a), b in zip(whole.named_parameters(), narrow.parameters(), strict=True):
            if name == "encoder.embeddings.token.weight":
                torch.testing.assert_close(b[rows], a[rows], rtol=1e-5, atol=1e-7)
            else:
                torch.testing.assert_close(b, a, rtol=1e-5, atol=1e-7)
    assert compact.num_rows == 6


def test_rows_of_absent_tokens_stay_bit_for_bit() -> None:
    _, narrow, compact = train_both()
    absent = torch.tensor([i for i in range(60) if i not in USED.tolist()])
    before = new_model().encoder.embeddings.token.weight
    with compact.whole():
        after = narrow.encoder.embeddings.token.weight
        assert torch.equal(after[absent], before[absent])
        assert not torch.equal(after[USED], before[USED])
    assert narrow.encoder.embeddings.token.weight.shape == (6, 16)
