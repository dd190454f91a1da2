"""Losses of a whole step: the reference's gradient, however a step is cut or shared out."""

import random

import pytest
import torch
from torch import Tensor
from transformers import BertConfig, BertModel

from bertsmith.batch import LabelledBatch, StepShare, unpack
from bertsmith.data.examples import Examples
from bertsmith.data.pair_steps import PairSteps
from bertsmith.hf.keys import to_hf
from bertsmith.model.config import EncoderConfig, Pooling
from bertsmith.model.embedder import SentenceEmbedder
from bertsmith.model.encoder import Encoder
from bertsmith.model.heads import initialize
from bertsmith.model.pair_objectives import Contrastive, CosineError, PairObjective
from bertsmith.parallel.choice import wrap
from bertsmith.parallel.config import StrategyName
from bertsmith.parallel.strategies import Strategy
from bertsmith.parallel.world import World, never
from bertsmith.train.precision import Compute
from bertsmith.train.step import _backward, dropout_seed_of
from ranks import run_ranks

FP32 = Compute(device=torch.device("cpu"), dtype=torch.float32)
NUM_ROWS = 7


def shape(dropout: float) -> EncoderConfig:
    return EncoderConfig(
        vocab_size=40,
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=24,
        max_position_embeddings=16,
        initializer_range=0.3,
        hidden_dropout_prob=dropout,
        attention_probs_dropout_prob=dropout,
    )


def objective_of(name: str) -> PairObjective:
    if name == "scores":
        return CosineError()
    return Contrastive(texts_per_row=3 if name == "negatives" else 2)


def model_of(name: str, pooling: Pooling = "mean", *, dropout: float = 0.0) -> SentenceEmbedder:
    config = shape(dropout)
    model = SentenceEmbedder(Encoder(config), pooling=pooling, objective=objective_of(name))
    initialize(model, config=config, seed=3)
    return model


def steps_of(name: str, *, tokens_per_pack: int) -> PairSteps:
    """Texts of 2 to 9 tokens; row 5 has the anchor of row 2, row 6 the second text of row 1."""
    texts_per_row = objective_of(name).texts_per_row
    draw = random.Random(0)
    texts = [
        [draw.randint(1, 39) for _ in range(draw.randint(2, 9))]
        for _ in range(NUM_ROWS * texts_per_row)
    ]
    texts[5], texts[NUM_ROWS + 6] = texts[2], texts[NUM_ROWS + 1]
    ids = [next(i for i, other in enumerate(texts) if other == text) for text in texts]
    scores = [draw.random() for _ in range(NUM_ROWS)] * texts_per_row
    lengths = torch.tensor([0, *map(len, texts)])
    examples = Examples(
        input_ids_T=torch.tensor([token for text in texts for token in text], dtype=torch.int32),
        segment_ids_T=None,
        starts_N1=lengths.cumsum(0),
        owners_N=torch.arange(len(texts)),
        num_cut=0,
        tokens_cut=0,
    )
    return PairSteps(
        examples,
        torch.tensor([ids, scores], dtype=torch.float64).T.contiguous(),
        texts_per_row=texts_per_row,
        examples_per_step=NUM_ROWS,
        tokens_per_pack=tokens_per_pack,
        seed=0,
    )


def gradients_of(
    model: SentenceEmbedder,
    share: StepShare[LabelledBatch],
    strategy: Strategy,
    *,
    micro_batch_tokens: int | None = None,
) -> dict[str, Tensor]:
    """The step's loss, and the gradient that it leaves."""
    losses = _backward(
        strategy,
        share,
        compute=FP32,
        scaler=None,
        step=0,
        seed=0,
        stop_asked=never,
        micro_batch_tokens=micro_batch_tokens,
    )
    loss = sum(strategy.world.sums(losses))
    grads = [(n, p.grad) for n, p in model.named_parameters() if p.grad is not None]
    found = dict(strategy.whole_tensors(grads))
    return {"loss": torch.tensor(loss), **{name: value.clone() for name, value in found.items()}}


def in_one_process(
    name: str,
    pooling: Pooling = "mean",
    *,
    tokens_per_pack: int = 1000,
    micro_batch_tokens: int | None = None,
    dropout: float = 0.0,
) -> dict[str, Tensor]:
    model = model_of(name, pooling, dropout=dropout)
    share = steps_of(name, tokens_per_pack=tokens_per_pack).share(0, rank=0, num_ranks=1)
    return gradients_of(
        model, share, Strategy(model, World()), micro_batch_tokens=micro_batch_tokens
    )


def assert_same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, atol=1e-5, rtol=1e-5, msg=name)


def reference(name: str, pooling: Pooling) -> dict[str, Tensor]:
    """sentence-transformers' formulae by hand, on the BERT of transformers, a text at a time."""
    mine = model_of(name, pooling)
    config = BertConfig(
        **{k: getattr(mine.encoder.config, k) for k in ("vocab_size", "hidden_size")},
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=24,
        max_position_embeddings=16,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    theirs = BertModel(config, add_pooling_layer=False)
    state: dict[str, Tensor] = {}
    for key, value in mine.encoder.named_parameters():
        names = to_hf(f"encoder.{key}")
        state |= dict(zip(names, value.detach().chunk(len(names)), strict=True))
    state = {key.removeprefix("bert."): value for key, value in state.items()}
    theirs.load_state_dict(state, strict=False)

    (pack,) = steps_of(name, tokens_per_pack=1000).share(0, rank=0, num_ranks=1).packs
    texts = unpack(pack.inputs.input_ids_T, pack.inputs.starts_N1)
    embedded = {}
    for place, text in zip(pack.labels_N.tolist(), texts, strict=True):
        hidden = theirs(input_ids=text[None]).last_hidden_state[0]
        embedded[place] = hidden.mean(0) if pooling == "mean" else hidden[0]
    all_SD = torch.stack([embedded[place] for place in sorted(embedded)])
    all_SD = torch.nn.functional.normalize(all_SD, dim=1)
    targets = pack.step_targets_S2  # type: ignore[attr-defined]
    anchors, seconds = all_SD[:NUM_ROWS], all_SD[NUM_ROWS : 2 * NUM_ROWS]
    if name == "scores":
        cosines = torch.cosine_similarity(anchors, seconds)
        loss = torch.nn.functional.mse_loss(cosines, targets[:NUM_ROWS, 1].float())
    else:
        ids = targets[:, 0].tolist()
        scores = 20.0 * torch.nn.functional.cosine_similarity(
            anchors[:, None], all_SD[None, NUM_ROWS:], dim=2
        )
        out = torch.zeros_like(scores, dtype=torch.bool)
        for row in range(NUM_ROWS):
            for column in range(out.shape[1]):
                candidate = ids[NUM_ROWS + column]
                right = {ids[row], ids[NUM_ROWS + row]}
                twin = column < NUM_ROWS and ids[column] == ids[row]
                out[row, column] = row != column and (candidate in right or twin)
        assert int(out.sum()) == 4  # both pairs of twins, seen from either side
        loss = torch.nn.functional.cross_entropy(
            scores.masked_fill(out, -torch.inf), torch.arange(NUM_ROWS)
        )
    loss.backward()  # type: ignore[no-untyped-call]
    grads = dict(theirs.named_parameters())
    found = {"loss": loss.detach()}
    for key, _ in mine.named_parameters():
        parts = [grads[one.removeprefix("bert.")].grad for one in to_hf(key)]
        found[key] = torch.cat([part for part in parts if part is not None])
    return found


@pytest.mark.parametrize("pooling", ["mean", "cls"])
@pytest.mark.parametrize("name", ["pairs", "negatives", "scores"])
def test_loss_and_gradient_are_those_of_the_formulae(name: str, pooling: Pooling) -> None:
    assert_same(in_one_process(name, pooling), reference(name, pooling))


@pytest.mark.parametrize("dropout", [0.0, 0.3])
@pytest.mark.parametrize("name", ["pairs", "negatives", "scores"])
def test_cutting_changes_nothing(name: str, dropout: float) -> None:
    whole = in_one_process(name, dropout=dropout)
    assert_same(in_one_process(name, dropout=dropout, tokens_per_pack=25), whole)
    assert_same(in_one_process(name, dropout=dropout, micro_batch_tokens=20), whole)


@pytest.mark.parametrize("name", ["pairs", "negatives", "scores"])
def test_both_passes_drop_the_same(name: str) -> None:
    """The reference is one graph over the whole step, with the dropout that belongs to it."""
    model = model_of(name, dropout=0.3)
    (pack,) = steps_of(name, tokens_per_pack=1000).share(0, rank=0, num_ranks=1).packs
    embeddings_ND = model.logits_NC(pack.inputs, dropout_seed=dropout_seed_of(0, step=0))
    targets_S2 = pack.step_targets_S2  # type: ignore[attr-defined]
    assert model.objective is not None
    loss = model.objective.losses_B(embeddings_ND[pack.labels_N.argsort()], targets_S2).mean()
    loss.backward()  # type: ignore[no-untyped-call]
    expected = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    found = in_one_process(name, dropout=0.3, tokens_per_pack=25)
    assert_same(found, {"loss": loss.detach(), **expected})


def on_rank(world: World, name: str, strategy_name: StrategyName) -> dict[str, Tensor]:
    model = model_of(name, dropout=0.3)
    strategy = wrap(strategy_name, model, world, dp_devices=1, dtype=torch.float32)
    share = steps_of(name, tokens_per_pack=25).share(0, rank=world.rank, num_ranks=world.size)
    return gradients_of(model, share, strategy, micro_batch_tokens=15)


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_two_ranks_equal_one(strategy: StrategyName) -> None:
    assert_same(run_ranks(on_rank, "pairs", strategy)[0], in_one_process("pairs", dropout=0.3))
