"""Work counted by hand for a model small enough to do so."""

from bertsmith.model.config import EncoderConfig
from bertsmith.model.flops import training_flop

SHAPE = EncoderConfig(
    vocab_size=7,
    hidden_size=2,
    num_hidden_layers=2,
    num_attention_heads=1,
    intermediate_size=3,
    max_position_embeddings=9,
)


def test_forward_and_twice_backward_of_each_product() -> None:
    # Multiplications and additions of one token: q, k, v and out 2 * 2*2 each, inner and inner_out
    # 2 * 2*3 each: 56. A sequence of s: scores and context 2 * 2 * s * s each.
    attention = 2 * (4 * 2 * (3 * 3 + 1 * 1))
    first_block = 56 * (3 + 1)
    last_block = 16 * (3 + 1) + (56 - 16) * 2  # keys and values of all 4, the rest of the 2 read
    head = 2 * (2 * 2 + 2 * 7) * 2
    blocks = attention + first_block + last_block
    wanted = {False: 3 * blocks, True: 3 * (blocks + head)}
    for scores_vocabulary, flop in wanted.items():
        assert training_flop(SHAPE, [3, 1], num_read=2, scores_vocabulary=scores_vocabulary) == flop
