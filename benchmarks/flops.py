"""Work that a training step cannot avoid, counted alike for every program compared."""

from collections.abc import Iterable


def training_flop(
    lengths: Iterable[int],
    *,
    layers: int,
    hidden: int,
    vocab_size: int = 0,
    predicted: int = 0,
) -> float:
    """Floating-point operations of one forward and backward pass over real tokens.

    Three times the forward pass: linear layers 24 h^2 a token, attention 4 h s^2 a sequence of s
    tokens, each a layer; the LM head 2 h^2 + 2 h V at predicted positions only.

    Args:
        lengths: Real tokens of each sequence.
        layers: Encoder blocks.
        hidden: Width; the inner width is four times it.
        vocab_size: Rows of the LM head.
        predicted: Positions it is computed at.
    """
    forward = 0.0
    for length in lengths:
        forward += layers * (24.0 * hidden * hidden * length + 4.0 * hidden * length * length)
    forward += predicted * (2.0 * hidden * hidden + 2.0 * hidden * vocab_size)
    return 3.0 * forward
