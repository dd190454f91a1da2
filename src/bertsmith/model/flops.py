"""Work that a training step cannot avoid, for rates that compare across batches and machines."""

from collections.abc import Iterable

from bertsmith.model.config import EncoderConfig


def training_flop(
    config: EncoderConfig, lengths: Iterable[int], *, num_predicted: int = 0
) -> float:
    """Floating-point operations of one forward and backward pass over real tokens.

    Three times the forward pass: linear layers 2 (4 D^2 + 2 D F) a token and block, attention
    4 D s^2 a sequence of s tokens and block, the LM head 2 (D^2 + D V) at predicted positions.

    Args:
        config: Shape of the encoder.
        lengths: Real tokens of each sequence.
        num_predicted: Positions the vocabulary is scored at; 0 without an LM head.
    """
    width, inner = config.hidden_size, config.intermediate_size
    linear, squares = 2.0 * (4.0 * width * width + 2.0 * width * inner), 4.0 * width
    forward = sum(config.num_hidden_layers * (linear * s + squares * s * s) for s in lengths)
    head = 2.0 * (width * width + width * config.vocab_size)
    return 3.0 * (forward + num_predicted * head)
