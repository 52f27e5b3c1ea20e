"""New memory that is never what a test hopes for."""

import contextlib
from collections.abc import Iterator

import torch


@contextlib.contextmanager
def new_memory_is_nan() -> Iterator[None]:
    """Fills memory that PyTorch allocates with NaN, or the largest integer; deterministic algorithms do that."""
    fills = torch.utils.deterministic.fill_uninitialized_memory
    mode = torch.get_deterministic_debug_mode()
    torch.utils.deterministic.fill_uninitialized_memory = True
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.set_deterministic_debug_mode(mode)
        torch.utils.deterministic.fill_uninitialized_memory = fills
