"""The counter of bytes agrees with what tensors hold."""

import pytest
import torch
import torch.nn.functional as F

from liger_ops import linear_cross_entropy
from lightning_liger.estimate.ledger import Ledger, OnGpu, Unknowable

KIB = 1024


def _meta(*shape, dtype=torch.bfloat16):
    return torch.empty(*shape, dtype=dtype, device="meta", requires_grad=True)


def test_counts_storages_once_until_they_are_gone():
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
    with ledger:
        x = torch.empty(KIB, dtype=torch.uint8, device="meta")
    ledger.give(x, "other")
    ledger.reset_peak()
    ledger.reset_peak()
    assert +ledger.peaks[-1] == {"other": KIB}
    del x
    assert ledger.allocated == 0


@pytest.mark.parametrize(
    ("num_kv_heads", "dtype", "has_mask", "saves_scores"),
    [
        (2, torch.bfloat16, False, False),
        (4, torch.float32, False, False),
        (4, torch.bfloat16, True, False),  # its bias is one for all heads
        (2, torch.float32, False, True),  # no backend but math takes groups of query heads in float32
    ],
)
def test_attention_saves_no_scores_where_a_gpu_does_not_and_counts_query_heads(
    num_kv_heads, dtype, has_mask, saves_scores
):
    query = _meta(3, 4, 512, 16, dtype=dtype)
    key, value = (_meta(3, num_kv_heads, 560, 16, dtype=dtype) for _ in range(2))
    mask = torch.ones(512, 560, dtype=torch.bool, device="meta") if has_mask else None
    ledger = Ledger()
    with ledger:
        with OnGpu(ledger):
            out = F.scaled_dot_product_attention(query, key, value, mask, is_causal=mask is None, enable_gqa=True)
        product = 2 * 3 * 4 * 512 * 560 * 16
        assert ledger.flops == 2 * product
        out.sum().backward()
    assert (ledger.peak > 2 * 3 * 4 * 512 * 560) == saves_scores
    assert saves_scores or ledger.flops == (2 + 5) * product
    assert [each.grad.shape for each in (query, key)] == [query.shape, key.shape]


@pytest.mark.parametrize("rows", [None, 1024])
def test_loss_takes_its_gradients_and_a_chunk_of_logits_and_states(rows):
    ledger = Ledger()
    with ledger:
        states, weight = _meta(4096, 4096), _meta(64000, 4096)
        labels = torch.zeros(4096, dtype=torch.int64, device="meta")
        before, chunk_bytes = ledger.allocated, rows and 64000 * rows * 2
        linear_cross_entropy(states, weight, labels, chunk_bytes=chunk_bytes, accumulate_dtype=torch.bfloat16)
    taken = 2 * (64000 + 4096) * (rows or 2048)
    assert ledger.peak - before - states.nbytes - weight.nbytes == pytest.approx(taken, abs=2 * KIB)


def test_values_that_only_a_device_has_are_unknowable():
    with OnGpu(Ledger()):
        assert bool(torch.ones(2, dtype=torch.bool, device="meta").all())
        with pytest.raises(Unknowable, match="values of tensors"):
            torch.ones((), device="meta").item()
