"""The counter of bytes agrees with what tensors hold."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from liger_ops import linear_cross_entropy
from lightning_liger.estimate.ledger import Ledger, OnGpu, Unknowable

KIB = 1024


def _meta(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.empty(*shape, dtype=dtype, device="meta", requires_grad=True)


def test_counts_storages_once_until_they_are_gone() -> None:
    ledger = Ledger()
    ledger.owner = "first"
    with ledger:
        x = torch.empty(KIB, dtype=torch.uint8, device="meta")
        views = x.view(2, -1), x[:10]
        y = x + 1
        assert ledger.read() == (2 * KIB, 2 * KIB)
        del x, y
        assert ledger.allocated == KIB  # of which there are views
        del views
    assert ledger.read() == (0, 2 * KIB)
    ledger.hold("name", "second", 100)
    ledger.hold("name", "second", 50)
    ledger.note(3 * KIB)
    assert ledger.read() == (50, 50 + 3 * KIB)
    assert (ledger.most["first"], ledger.most["second"]) == (3 * KIB, 100)
    ledger.hold("name", "second", 0)
    assert ledger.allocated == 0


def test_gives_tensors_to_another_owner() -> None:
    ledger = Ledger()
    with ledger:
        x = torch.empty(KIB, dtype=torch.uint8, device="meta")
    ledger.give(x, "other")
    ledger.reset_peak()
    ledger.reset_peak()
    assert ledger.peaks[-1]["other"] == KIB
    del x
    assert ledger.allocated == 0


def test_attention_saves_no_scores_where_a_gpu_does_not() -> None:
    length = 512
    scores = 2 * 4 * length**2
    causal = torch.ones(length, length, dtype=torch.bool, device="meta")
    for num_kv_heads, dtype, mask, saves_scores in (
        (2, torch.bfloat16, None, False),
        (4, torch.float32, None, False),
        (4, torch.bfloat16, causal, False),  # its bias is one for all heads
        (2, torch.float32, None, True),  # no backend but math takes groups of query heads in float32
    ):
        query = _meta(1, 4, length, 16, dtype=dtype)
        key, value = _meta(1, num_kv_heads, length, 16, dtype=dtype), _meta(1, num_kv_heads, length, 16, dtype=dtype)
        ledger = Ledger()
        with ledger:
            with OnGpu(ledger):
                out = F.scaled_dot_product_attention(query, key, value, mask, is_causal=mask is None, enable_gqa=True)
            assert out.shape == query.shape
            out.sum().backward()
        assert (ledger.peak > scores) == saves_scores, (num_kv_heads, dtype)
        assert key.grad is not None
        assert key.grad.shape == key.shape


@pytest.mark.parametrize(
    ("num_tokens", "chunk_bytes", "beside"),
    [
        pytest.param(4096, None, (64000 + 4096) * 2048, id="default"),
        pytest.param(4096, 64000 * 1024 * 2, (64000 + 4096) * 1024, id="chunks"),
    ],
)
def test_loss_takes_its_gradients_and_what_the_op_allocates_beside(
    num_tokens: int, chunk_bytes: int | None, beside: int
) -> None:
    ledger = Ledger()
    with ledger:
        states, weight = _meta(num_tokens, 4096), _meta(64000, 4096)
        labels = torch.zeros(num_tokens, dtype=torch.int64, device="meta")
        before = ledger.allocated
        linear_cross_entropy(states, weight, labels, chunk_bytes=chunk_bytes, accumulate_dtype=torch.bfloat16)
    assert ledger.peak - before - states.nbytes - weight.nbytes == pytest.approx(2 * beside, abs=2 * KIB)


def test_values_that_only_a_device_has_are_unknowable() -> None:
    with OnGpu(Ledger()):
        assert bool(torch.ones(2, dtype=torch.bool, device="meta").all())
        with pytest.raises(Unknowable, match="values of tensors"):
            torch.ones((), device="meta").item()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("num_kv_heads", [4, 2])
def test_flops_of_attention_are_of_query_heads(dtype: torch.dtype, num_kv_heads: int) -> None:
    query = _meta(3, 4, 40, 16, dtype=dtype)
    key, value = (_meta(3, num_kv_heads, 56, 16, dtype=dtype) for _ in range(2))
    ledger = Ledger()
    with ledger, OnGpu(ledger):
        if num_kv_heads < 4 and dtype == torch.float32:  # as models repeat them for the memory-efficient backend
            key, value = (each.repeat_interleave(2, dim=1) for each in (key, value))
        output = F.scaled_dot_product_attention(query, key, value, enable_gqa=key.shape[1] < 4)
        product = 2 * 3 * 4 * 40 * 56 * 16
        assert ledger.flops == 2 * product
        output.sum().backward()
        assert ledger.flops == (2 + 5) * product
