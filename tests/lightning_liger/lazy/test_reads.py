"""What is read from lazy logits agrees with their materialized values."""

import random
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_liger import LazyLogits, materialize
from lightning_liger.lazy.logits import lazy_logits
from tests.lightning_liger.lazy.twin import Twin

BATCH_SIZE, SEQ_LEN, HIDDEN_SIZE, VOCAB_SIZE = 3, 17, 64, 211
SOME_TOKENS = 4 * VOCAB_SIZE * 10

RECORDED: dict[str, Callable[[Tensor], Tensor]] = {
    "itself": lambda x: x,
    "float": lambda x: x.float(),
    "slice": lambda x: x[:, :-1],
    "flat": lambda x: x[:, 1:].flatten(0, 1),
    "scaled": lambda x: x / 0.7,
    "capped": lambda x: torch.tanh(x / 5) * 5,
    "log_softmax": lambda x: x.log_softmax(-1),
    "softmax": lambda x: x.softmax(-1),
    "detached": lambda x: x.detach(),
    "part": lambda x: x[..., 3:200],
}
READ: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "gather": lambda x, gold: x.gather(-1, gold),
    "take_along_dim": lambda x, gold: torch.take_along_dim(x, gold, -1),
    "max": lambda x, gold: x.max(-1, keepdim=True).values,
    "amin": lambda x, gold: x.amin(-1, keepdim=True),
    "topk": lambda x, gold: x.topk(3).values[..., -1:],
    "of_argmax": lambda x, gold: x.gather(-1, x.argmax(-1, keepdim=True)),
}


def lazy_head(dtype: torch.dtype, chunk_bytes: int | None) -> Any:
    bias = random.random() < 0.5
    return Twin(dtype, VOCAB_SIZE, bias=bias, chunk_bytes=chunk_bytes, hidden_size=HIDDEN_SIZE).lazy_head


@pytest.mark.parametrize("mode", [torch.no_grad, torch.enable_grad, torch.inference_mode])
@pytest.mark.filterwarnings("ignore:.*materializes the logits")
def test_values_that_were_read_are_found_again(mode: Callable[[], AbstractContextManager[None]]) -> None:
    for seed in range(100):
        random.seed(seed)
        torch.manual_seed(seed)
        head = lazy_head(
            random.choice([torch.float32, torch.float32, torch.bfloat16]), random.choice([None, SOME_TOKENS])
        )
        with mode(), lazy_logits():
            logits = head(torch.randn(BATCH_SIZE, SEQ_LEN, HIDDEN_SIZE, dtype=head.weight.dtype))
            assert isinstance(logits, LazyLogits)
            names = random.choice(list(RECORDED)), random.choice(list(READ))
            x = RECORDED[names[0]](logits)
            if mode is torch.enable_grad:
                x = x.detach()
            gold = torch.randint(0, x.shape[-1], (*x.shape[:-1], 1))
            read = READ[names[1]]
            value = read(x, gold)
            equal, above, below = ((x == value).sum(-1), (x > value).sum(-1), (x < value).sum(-1))
            assert (equal > 0).all(), names
            assert (above + below + equal == x.shape[-1]).all(), names
            if names[1] == "topk":
                assert ((above < 3) & (above + equal >= 3)).all(), names
            real = materialize(x)
            assert type(real) is Tensor
            if mode is not torch.enable_grad and not head.liger_replacement.options and names[0] != "softmax":
                assert torch.equal(value, read(real, gold)), names


@pytest.mark.filterwarnings("ignore:.*materializes the logits")
def test_comparison_with_what_a_read_with_gradients_became_is_refused() -> None:
    head = lazy_head(torch.float32, None)
    logits = head(torch.randn(BATCH_SIZE, SEQ_LEN, HIDDEN_SIZE))
    gold = logits.gather(-1, torch.zeros(BATCH_SIZE, SEQ_LEN, 1, dtype=torch.int64))
    for other in (gold.detach(), gold.double(), gold * 1, torch.zeros_like(gold)):
        with pytest.raises(RuntimeError, match=r"gt compares .* after gather .*materialize\(logits\)"):
            logits > other  # noqa: B015  raises
    assert (logits > 0).any()
    exact = logits.detach().gather(-1, torch.zeros(BATCH_SIZE, SEQ_LEN, 1, dtype=torch.int64))
    assert not (logits > exact)[..., 0].any()


def test_what_was_read_keeps_no_hidden_states() -> None:
    head = lazy_head(torch.float32, None)
    hidden_states = torch.randn(BATCH_SIZE, SEQ_LEN, HIDDEN_SIZE)
    gold = torch.zeros(BATCH_SIZE, SEQ_LEN, 1, dtype=torch.int64)
    logits = head(hidden_states)
    read = [logits.gather(-1, gold), logits.detach().gather(-1, gold)]
    read[0].sum().backward()
    alive = weakref.ref(hidden_states)
    del logits, hidden_states
    assert alive() is None
    assert len(read) == 2
