"""Routers against float64: the same experts, in the same order, and scores and gradients as accurate as PyTorch's."""

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from liger_ops.moe.router import moe_router, router_reference
from tests.liger_ops.accuracy import DTYPES, assert_as_accurate, few, lay_out

GROUPS = ((1, 1), (2, 1), (3, 2), (8, 3))


def plain(logits: Tensor, index: Tensor, score: str, normalize: bool, scale: float) -> Tensor:
    """The factors of given experts."""
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    chosen = (wide.softmax(-1) if score == "softmax" else wide.sigmoid()).gather(-1, index)
    return scale * (chosen / chosen.sum(-1, keepdim=True) if normalize else chosen)


def by_hand(values: list[float], top_k: int, num_groups: int, top_groups: int, group_score: str) -> list[int]:
    """A token's experts by their selection values; of equal ones the lowest number."""
    size = len(values) // num_groups
    groups = [sorted(values[start : start + size], reverse=True) for start in range(0, len(values), size)]
    best = [sum(each[:2]) if group_score == "best_two" else each[0] for each in groups]
    kept = sorted(range(num_groups), key=lambda group: -best[group])[:top_groups]
    allowed = [expert for expert in range(len(values)) if expert // size in kept]
    return sorted(allowed, key=lambda expert: -values[expert])[:top_k]


@given(st.data())
@few(40)
def test_experts_scores_and_gradients_are_those_of_float64(triton_device: torch.device, data: Any) -> None:
    draw = data.draw
    num_groups, top_groups = draw(st.sampled_from(GROUPS))
    group_size = draw(st.sampled_from([2, 3, 4, 20] if num_groups > 1 else [1, 2, 7, 64, 129]))
    num_experts = num_groups * group_size
    top_k = draw(st.integers(1, min(9, top_groups * group_size)))
    score, normalize = draw(st.sampled_from(["softmax", "sigmoid"])), draw(st.booleans())
    group_score = draw(st.sampled_from(["max", "best_two"])) if group_size > 1 else "max"
    scale, seed = draw(st.sampled_from([1.0, 2.5])), draw(st.integers(0, 99))
    generator = torch.Generator().manual_seed(seed)
    num_tokens, dtype = draw(st.sampled_from([1, 5, 70])), draw(st.sampled_from(DTYPES))
    # Far enough apart for rounding to order them alike in float32 and float64.
    logits = torch.rand(num_tokens, num_experts, generator=generator).argsort(-1).double() * (8 / num_experts) - 4
    logits = lay_out(logits.to(dtype), draw(st.sampled_from(["contiguous", "sliced", "transposed"]))).to(triton_device)
    bias = torch.randint(-8, 9, (num_experts,), generator=generator) / 16 if draw(st.booleans()) else None
    bias = None if bias is None else bias.to(triton_device)
    groups = {"num_groups": num_groups, "top_groups": top_groups, "group_score": group_score}
    leaf = logits.detach().requires_grad_()
    index, scores = moe_router(leaf, top_k, score=score, bias=bias, normalize=normalize, scale=scale, **groups)  # type: ignore[arg-type]

    values = logits.double().cpu()
    if bias is not None or (num_groups > 1 and group_score == "best_two"):
        values = values.softmax(-1) if score == "softmax" else values.sigmoid()
        values = values if bias is None else values + bias.double().cpu()
    # Where values are as good as equal, any of them may come first.
    for row, chosen in zip(values.tolist(), index.tolist(), strict=True):
        expected = by_hand(row, top_k, **groups)  # type: ignore[arg-type]
        assert [row[each] for each in chosen] == pytest.approx([row[each] for each in expected], abs=1e-6)
        assert len({*chosen}) == top_k
    upstream = torch.randn(index.shape, generator=generator).to(triton_device)
    (grad,) = torch.autograd.grad(scores, leaf, upstream)
    assert scores.dtype == torch.float32
    results = []
    for each in (logits, logits.double()):
        each = each.detach().requires_grad_()
        out = plain(each, index, score, normalize, scale)
        results.append((out, *torch.autograd.grad(out, each, upstream.to(out.dtype))))
    for name, actual, eager, truth in zip(("scores", "gradient"), (scores, grad), *results, strict=True):
        assert_as_accurate(name, actual, eager, truth, magnitude=0.2)


@given(st.integers(0, 99), st.sampled_from(GROUPS[1:]), st.sampled_from(["max", "best_two"]), st.booleans())
@few(20)
def test_of_equal_values_the_lowest_expert_is_chosen(
    triton_device: torch.device, seed: int, groups: tuple[int, int], group_score: str, biased: bool
) -> None:
    """Every logit is one of three, or no number; kernels, reference and a sort by hand agree."""
    generator = torch.Generator().manual_seed(seed)
    num_groups, top_groups = groups
    logits = torch.randint(3, (9, num_groups * 4), generator=generator).float() * 20
    bias = torch.zeros(num_groups * 4) if biased else None
    options = (3, "sigmoid", num_groups, top_groups, group_score, True, 1.0)
    is_by_logits = bias is None and group_score == "max"
    values = logits if is_by_logits else logits.double().sigmoid().float()
    expected = [by_hand(row, 3, num_groups, top_groups, group_score) for row in values.tolist()]
    on_device = logits.to(triton_device)
    index, _ = moe_router(
        on_device, 3, score="sigmoid", bias=None if bias is None else bias.to(triton_device), num_groups=num_groups,
        top_groups=top_groups, group_score=group_score,
    )  # fmt: skip
    assert index.tolist() == router_reference(logits, bias, *options)[0].tolist() == expected
    on_device[0, 0], on_device[1], on_device[2, 1] = torch.nan, torch.nan, -torch.inf
    index, _ = moe_router(on_device, 4, num_groups=num_groups, top_groups=top_groups, group_score=group_score)
    reference = router_reference(on_device.cpu(), None, 4, "softmax", num_groups, top_groups, group_score, True, 1.0)[0]
    assert index.tolist() == reference.tolist()
    assert all(len({*row}) == 4 for row in index.tolist())
