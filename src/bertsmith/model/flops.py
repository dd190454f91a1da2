"""Work that a training step cannot avoid, for rates that compare across programs and machines."""

from collections.abc import Iterable

from bertsmith.model.config import EncoderConfig


def training_flop(
    config: EncoderConfig, lengths: Iterable[int], *, num_read: int, scores_vocabulary: bool
) -> float:
    """Floating-point operations of one forward and backward pass over real tokens.

    Three times the forward pass. A block: linear layers 2 (4 D^2 + 2 D F) a token, attention
    4 D s^2 a sequence of s tokens. Of the last block all tokens need keys and values, 4 D^2, and
    only those that a head reads need the rest. The LM head: 2 (D^2 + D V) a token it reads.

    Args:
        config: Shape of the encoder.
        lengths: Real tokens of each sequence.
        num_read: Tokens whose last hidden state a head reads: the masked ones, or one a sequence.
        scores_vocabulary: Whether the head is an LM head.
    """
    width, inner = config.hidden_size, config.intermediate_size
    linear, keys_and_values = 2.0 * (4.0 * width * width + 2.0 * width * inner), 4.0 * width * width
    num_tokens = num_squares = 0
    for length in lengths:
        num_tokens += length
        num_squares += length * length
    forward = config.num_hidden_layers * 4.0 * width * num_squares
    forward += ((config.num_hidden_layers - 1) * linear + keys_and_values) * num_tokens
    forward += (linear - keys_and_values) * num_read
    if scores_vocabulary:
        forward += 2.0 * (width * width + width * config.vocab_size) * num_read
    return 3.0 * forward
