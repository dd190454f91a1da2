"""What every test leaves behind as it found it."""

from collections.abc import Iterator

import hypothesis
import pytest
import torch

# Time belongs in a benchmark: on a busy machine an example takes as long as it takes.
hypothesis.settings.register_profile(
    "untimed", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow]
)
hypothesis.settings.load_profile("untimed")


@pytest.fixture(autouse=True)
def _products_are_as_precise_as_before() -> Iterator[None]:
    """A run on a CPU sends fp32 products to oneDNN, for the whole process: 1e-6 off, not 1e-7."""
    before = torch.get_float32_matmul_precision()
    yield
    torch.set_float32_matmul_precision(before)
