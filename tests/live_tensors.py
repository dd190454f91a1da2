"""`benchmarks/live_bytes.py` for tests: bytes that torch gives out on a CPU, or autograd holds."""

import importlib.util
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from types import ModuleType


def _loaded() -> ModuleType:
    file = Path(__file__).parents[1] / "benchmarks" / "live_bytes.py"
    spec = importlib.util.spec_from_file_location("live_bytes", file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["live_bytes"] = module
    spec.loader.exec_module(module)
    return module


_module = _loaded()
counted, phase = _module.counted, _module.phase
held_for_backward: Callable[[], AbstractContextManager[dict[int, int]]]
held_for_backward = _module.held_for_backward
