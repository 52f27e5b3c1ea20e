"""Wrong arguments of the functions of a model's logits, lazy and materialized."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from lightning_liger import divergence, token_loss, token_scores, topk_log_probs
from tests.bad_inputs import BadInput
from tests.lightning_liger.lazy.twin import LABELS, MASK, Twin

IDS = LABELS[..., None]


def _lazy() -> Tensor:
    return Twin().lazy


def _real() -> Tensor:
    return Twin().real.detach()


def _loss(scores: Any, index: Tensor) -> Tensor:
    return -scores.log_probs


def _call(function: Callable[..., Any], logits: Callable[[], Any], *args: Any, **options: Any) -> Any:
    return function(logits(), *args, **options)


def _token_loss(logits: Tensor, labels: Tensor, **options: Any) -> Any:
    return token_loss(logits, labels, _loss, **options)


WRONG_OF_LABELS: dict[str, tuple[Any, dict[str, Any], tuple[str, ...]]] = {
    "labels-shape": (LABELS[:, 1:], {}, ("labels", "(2, 4)", "(2, 5)")),
    "labels-dtype": (LABELS.int(), {}, ("labels", "torch.int32", "int64")),
    "labels-type": (LABELS.tolist(), {}, ("labels", "[[0, 3", "a tensor")),
    "labels-range": (LABELS + 20, {}, ("labels", "38", "vocab_size - 1 = 36")),
    "temperature-zero": (LABELS, {"temperature": 0.0}, ("temperature", "0.0", "above 0")),
    "temperature-shape": (LABELS, {"temperature": torch.ones(3)}, ("temperature", "(3,)", "(2, 5)")),
    "outputs-name": (LABELS, {"outputs": ("logp",)}, ("outputs", "'logp'", "'log_probs'")),
    "outputs-string": (LABELS, {"outputs": "entropy"}, ("outputs", "'entropy'", "a sequence")),
    "detach-name": (LABELS, {"detach": ("correct",)}, ("detach", "'correct'", "'log_probs'")),
    "ignore_index-type": (LABELS, {"ignore_index": None}, ("ignore_index", "None", "an integer")),
    "saved_logits_bytes-negative": (LABELS, {"saved_logits_bytes": -1}, ("saved_logits_bytes", "-1", "at least 0")),
    "chunk_bytes-zero": (LABELS, {"chunk_bytes": 0}, ("chunk_bytes", "0", "at least 1")),
}
WRONG_LOGITS: dict[str, tuple[Callable[[], Any], tuple[str, ...]]] = {
    "logits-type": (lambda: [1.0], ("logits", "[1.0]", "floating-point tensor")),
    "logits-dtype": (lambda: _real().long(), ("logits", "torch.int64", "floating-point tensor")),
    "logits-empty": (lambda: _real()[..., :0], ("logits", "(2, 5, 0)", "at least one class")),
    "logits-transposed": (lambda: _lazy().mT, ("logits", "(2, 37, 5)", "dimension -2", "movedim(-2, -1)")),
}
WRONG_IDS: dict[str, tuple[Any, dict[str, Any], tuple[str, ...]]] = {
    "ids-shape": (LABELS, {}, ("ids", "(2, 5)", "(2, 5")),
    "ids-type": (LABELS.tolist(), {}, ("ids", "[[0, 3", "a tensor")),
    "ids-range": (IDS + 20, {}, ("ids", "38", "vocab_size - 1 = 36")),
    "renormalize-type": (IDS, {"renormalize": "no"}, ("renormalize", "'no'", "True or False")),
    "mask-dtype": (IDS, {"mask": LABELS}, ("mask", "torch.int64", "bool")),
    "mask-shape": (IDS, {"mask": MASK[:1]}, ("mask", "(1, 5)", "(2, 5)")),
    "temperature-negative": (IDS, {"temperature": -1.0}, ("temperature", "-1.0", "above 0")),
}
WRONG_OF_DIVERGENCE: dict[str, tuple[Callable[[], Any], dict[str, Any], tuple[str, ...]]] = {
    "kind": (_real, {"kind": "kl"}, ("kind", "'kl'", "'forward_kl'")),
    "beta": (_real, {"kind": "jsd", "beta": 1.5}, ("beta", "1.5", "at most 1")),
    "temperature": (_real, {"temperature": 0}, ("temperature", "0", "above 0")),
    "t_squared": (_real, {"t_squared": 2}, ("t_squared", "2", "True or False")),
    "reduction": (_real, {"reduction": "batchmean"}, ("reduction", "'batchmean'", "'mean'")),
    "vocab": (_real, {"vocab": "any"}, ("vocab", "'any'", "'common'")),
    "mask": (_real, {"mask": LABELS}, ("mask", "torch.int64", "bool")),
    "token_weight": (_real, {"token_weight": torch.ones(3)}, ("token_weight", "(3,)", "(2, 5)")),
    "chunk_bytes": (_real, {"chunk_bytes": 0}, ("chunk_bytes", "0", "at least 1")),
    "teacher-tokens": (lambda: _real()[:, 1:], {}, ("teacher_logits", "(2, 4, 37)", "(2, 5)")),
    "teacher-vocab": (lambda: _real()[..., 1:], {}, ("vocab", "36", "'common'")),
    "teacher-type": (lambda: None, {}, ("teacher_logits", "None", "floating-point tensor")),
    "teacher-transposed": (lambda: _lazy().mT, {}, ("teacher_logits", "(2, 37, 5)", "dimension -2")),
}


def _divergence(student: Tensor, teacher: Callable[[], Any], **options: Any) -> Any:
    return divergence(student, teacher(), **options)


BAD_INPUTS = [
    BadInput(
        f"{function.__name__.strip('_')}-{name}-{kind}", partial(_call, function, logits, first, **options), mentions
    )
    for kind, logits in (("lazy", _lazy), ("real", _real))
    for functions, table in (
        ((token_scores, _token_loss), WRONG_OF_LABELS),
        ((topk_log_probs,), WRONG_IDS),
        ((_divergence,), WRONG_OF_DIVERGENCE),
    )
    for function in functions
    for name, (first, options, mentions) in table.items()
] + [
    BadInput(f"{function.__name__.strip('_')}-{name}", partial(_call, function, logits, first), mentions)
    for function, first in ((token_scores, LABELS), (_token_loss, LABELS), (topk_log_probs, IDS))
    for name, (logits, mentions) in WRONG_LOGITS.items()
]
