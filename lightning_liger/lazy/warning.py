"""The warning that logits were materialized, with the line of code that needed them."""

from __future__ import annotations

import inspect
import math
from pathlib import Path

import torch
from lightning_utilities.core.rank_zero import rank_zero_warn

import liger_ops

_warned_operations: set[tuple[str, str]] = set()
_SCORES = "lightning_liger.token_scores(logits, labels, outputs=('log_probs', 'entropy'))"
_DIVERGENCE = "lightning_liger.divergence(student_logits, teacher_logits)"
_OWN_FILES = (torch.__file__, liger_ops.__file__, str(Path(__file__).parent))
_OWN_FOLDERS = tuple(f"{Path(file).parent}/" for file in _OWN_FILES)


def warn_materialized(operation: str, shape: torch.Size, dtype: torch.dtype) -> None:
    """Warns once per ``operation`` and line of code."""
    operation, line = operation.strip("_"), _calling_line()
    if (operation, line) not in _warned_operations:
        _warned_operations.add((operation, line))
        rank_zero_warn(
            f"{operation} on an LM head's output ({line}) materializes the logits: {_size(shape, dtype)} GiB. The"
            " result is correct, but the loss is not fused. Losses of log-probabilities, entropies and divergences are"
            f" fused with {_DIVERGENCE if operation == 'kl_div' else _SCORES} instead."
        )


def warn_traced(operation: str, vocab_size: int, dtype: torch.dtype) -> None:
    """Warns once per ``operation`` that is compiled with logits."""
    if ("traced", operation) not in _warned_operations:
        _warned_operations.add(("traced", operation))
        rank_zero_warn(
            f"{operation.strip('_')} on an LM head's output materializes the logits, [..., {vocab_size}] {dtype}, in"
            f" the code that is compiled at {_calling_line()}. The result is right, but takes their memory."
        )


def warn_criterion(model: str) -> None:
    rank_zero_warn(
        f"The loss of {model} is not fused where the model is compiled, as its forward makes a CrossEntropyLoss()."
        " Compute the loss of its logits by torch.nn.functional.cross_entropy, or do not compile the model."
    )


def warn_kept(place: str, shape: torch.Size, dtype: torch.dtype) -> None:
    """Warns once per ``place`` where logits that are kept become real."""
    if ("kept", place) not in _warned_operations:
        _warned_operations.add(("kept", place))
        rank_zero_warn(
            f"An LM head's output that is kept beyond {place} is materialized there: {_size(shape, dtype)} GiB. Keep"
            " only what you need, such as logits.argmax(-1), to save memory."
        )


def _size(shape: torch.Size, dtype: torch.dtype) -> str:
    return f"{tuple(shape)} {dtype}, {math.prod(shape) * dtype.itemsize / 2**30:.2f}"


def _calling_line() -> str:
    """``file:line`` of the innermost code outside of PyTorch and this project."""
    frame = inspect.currentframe()
    while frame is not None and frame.f_back is not None and frame.f_code.co_filename.startswith(_OWN_FOLDERS):
        frame = frame.f_back
    return "unknown line" if frame is None else f"{frame.f_code.co_filename}:{frame.f_lineno}"
