"""Routers of a mixture of experts: from a token's logits of all experts to top_k of them and their factors.

With logits l, scores s = softmax(l) or sigmoid(l), and the chosen experts C, those of the largest selection values

    w = c s / S    S = sum of s over C, or 1      selection values: s + bias, only in the best groups of experts

(DeepSeek-V3, arXiv:2412.19437; groups: DeepSeek-V2, arXiv:2405.04434). The choice has no gradient; with G that of w,

    ds = c / S (G - sum of G s over C / S) on C, 0 elsewhere; without S:  ds = c G
    dl = s (ds - sum of ds s)  for softmax            dl = s (1 - s) ds  for sigmoid

All is in float32. Of equal values the expert with the lowest index is chosen. Where both order alike, logits are
compared in place of scores, which saturate. NaN is less than any number. Saved: the logits and the chosen experts.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from liger_ops import backend
from liger_ops.arguments import (
    check_bool,
    check_choice,
    check_floating_tensors,
    check_integer,
    check_number,
    check_shape,
    wrong_value,
)

_MAX_EXPERTS = 4096  # that registers hold: more run in PyTorch
_EPS: tl.constexpr = tl.constexpr(1e-20)  # of a sum of scores, which are all 0 of very negative logits
_LARGEST: tl.constexpr = tl.constexpr(3.4028234663852886e38)


def _by_logits(bias: Tensor | None, num_groups: int, group_score: str) -> bool:
    """Whether logits choose the same experts as scores."""
    return bias is None and (num_groups == 1 or group_score == "max")


def router_reference(logits: Tensor, bias: Tensor | None, *options: Any) -> tuple[Tensor, Tensor]:
    """The chosen experts and their factors in plain PyTorch, in float32 or wider; options are those of the op."""
    top_k, score, num_groups, top_groups, group_score, normalize, scale = options
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    scores = wide.sigmoid() if score == "sigmoid" else wide.softmax(-1)
    values = (wide if _by_logits(bias, num_groups, group_score) else scores).detach()
    values = values if bias is None else values + bias.to(values.dtype)
    most = torch.finfo(values.dtype).max
    values = values.nan_to_num(nan=-most, posinf=most, neginf=-most)
    if num_groups > 1:
        groups = values.unflatten(-1, (num_groups, -1))
        best = groups.amax(-1) if group_score == "max" else groups.topk(2, -1).values.sum(-1).clamp(-most, most)
        kept = best.argsort(dim=-1, descending=True, stable=True)[..., :top_groups]
        is_kept = torch.zeros_like(best, dtype=torch.bool).scatter(-1, kept, True)
        values = groups.masked_fill(~is_kept.unsqueeze(-1), -torch.inf).flatten(-2)
    index = values.argsort(dim=-1, descending=True, stable=True)[..., :top_k]
    chosen = scores.gather(-1, index)
    if normalize:
        chosen = chosen / (chosen.sum(-1, keepdim=True) + _EPS.value)
    return index, chosen * scale


@triton.jit
def _scores_of(logits, SIGMOID: tl.constexpr):
    if SIGMOID:
        return tl.sigmoid(logits)
    numerator = tl.exp(logits - tl.max(logits, axis=1)[:, None])
    return numerator / tl.sum(numerator, axis=1)[:, None]


@triton.jit
def _first_best(values, columns):
    """In which column each row's largest value is, the first of equal ones; ``[rows, 1]``."""
    best = tl.max(values, axis=1)[:, None]
    return tl.min(tl.where(values == best, columns, values.shape[1]), axis=1)[:, None]


@backend.Kernel
def _forward_kernel(
    logits_ptr,  # [num_rows, num_groups * group_size]
    bias_ptr,  # [num_groups * group_size] or None
    index_ptr,  # [num_rows, TOP_K], int64
    chosen_ptr,  # [num_rows, TOP_K]
    row_stride,
    num_rows,
    num_groups,
    group_size,
    scale,
    SIGMOID: tl.constexpr,
    BY_LOGITS: tl.constexpr,
    NORMALIZE: tl.constexpr,
    TOP_GROUPS: tl.constexpr,  # 0 without groups
    BEST_TWO: tl.constexpr,  # whether a group's value is the sum of its best two, or the best
    TOP_K: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_GROUPS: tl.constexpr,
    BLOCK_GROUP: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """One program routes BLOCK_ROWS tokens. Each group has BLOCK_GROUP columns."""
    rows = (tl.program_id(0).to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS))[:, None]
    columns = tl.arange(0, BLOCK_GROUPS * BLOCK_GROUP)[None, :]
    group, place = columns // BLOCK_GROUP, columns % BLOCK_GROUP
    expert = group * group_size + place
    exists = (group < num_groups) & (place < group_size)
    mask = (rows < num_rows) & exists
    logits = tl.load(logits_ptr + rows * row_stride + expert, mask=mask, other=float("-inf")).to(tl.float32)
    scores = _scores_of(logits, SIGMOID)
    values = scores
    if BY_LOGITS:
        values = logits
    if bias_ptr is not None:
        values += tl.load(bias_ptr + expert, mask=exists, other=0.0).to(tl.float32)
    values = tl.where(values == values, tl.minimum(tl.maximum(values, -_LARGEST), _LARGEST), -_LARGEST)
    values = tl.where(exists, values, float("-inf"))
    if TOP_GROUPS > 0:
        groups = tl.reshape(values, (BLOCK_ROWS, BLOCK_GROUPS, BLOCK_GROUP))
        best = tl.max(groups, axis=2)
        if BEST_TWO:
            places = tl.arange(0, BLOCK_GROUP)[None, None, :]
            first = tl.min(tl.where(groups == best[:, :, None], places, BLOCK_GROUP), axis=2)
            best += tl.max(tl.where(places == first[:, :, None], float("-inf"), groups), axis=2)
            best = tl.minimum(tl.maximum(best, -_LARGEST), _LARGEST)
        numbers = tl.arange(0, BLOCK_GROUPS)[None, :]
        best = tl.where(numbers < num_groups, best, float("-inf"))
        kept = tl.zeros((BLOCK_ROWS, BLOCK_GROUPS), tl.int32)
        for _ in range(TOP_GROUPS):
            is_best = numbers == _first_best(best, numbers)
            kept = tl.where(is_best, 1, kept)
            best = tl.where(is_best, float("-inf"), best)
        groups = tl.where(kept[:, :, None] > 0, groups, float("-inf"))
        values = tl.reshape(groups, (BLOCK_ROWS, BLOCK_GROUPS * BLOCK_GROUP))
    slots = tl.arange(0, BLOCK_K)[None, :]
    chosen = tl.zeros((BLOCK_ROWS, BLOCK_K), tl.float32)
    index = tl.zeros((BLOCK_ROWS, BLOCK_K), tl.int32)
    for slot in range(TOP_K):
        best_column = _first_best(values, columns)
        is_best = columns == best_column
        score = tl.sum(tl.where(is_best, scores, 0.0), axis=1)[:, None]
        chosen = tl.where(slots == slot, score, chosen)
        number = best_column // BLOCK_GROUP * group_size + best_column % BLOCK_GROUP
        index = tl.where(slots == slot, number, index)
        values = tl.where(is_best, float("-inf"), values)
    if NORMALIZE:
        chosen = chosen / (tl.sum(chosen, axis=1)[:, None] + _EPS)
    stored = (rows < num_rows) & (slots < TOP_K)
    tl.store(index_ptr + rows * TOP_K + slots, index.to(tl.int64), mask=stored)
    tl.store(chosen_ptr + rows * TOP_K + slots, chosen * scale, mask=stored)


@backend.Kernel
def _backward_kernel(
    grad_ptr,  # [num_rows, TOP_K]
    logits_ptr,  # [num_rows, num_experts]
    index_ptr,  # [num_rows, TOP_K]
    grad_logits_ptr,  # [num_rows, num_experts], contiguous
    row_stride,
    num_rows,
    num_experts,
    scale,
    SIGMOID: tl.constexpr,
    NORMALIZE: tl.constexpr,
    TOP_K: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program computes the gradient of BLOCK_ROWS tokens' logits."""
    rows = (tl.program_id(0).to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS))[:, None]
    columns = tl.arange(0, BLOCK)[None, :]
    mask = (rows < num_rows) & (columns < num_experts)
    logits = tl.load(logits_ptr + rows * row_stride + columns, mask=mask, other=float("-inf")).to(tl.float32)
    scores = _scores_of(logits, SIGMOID)
    grad = tl.zeros((BLOCK_ROWS, BLOCK), tl.float32)
    chosen = tl.zeros((BLOCK_ROWS, BLOCK), tl.float32)
    for slot in range(TOP_K):
        place = rows * TOP_K + slot
        is_chosen = columns == tl.load(index_ptr + place, mask=rows < num_rows, other=0)
        upstream = tl.load(grad_ptr + place, mask=rows < num_rows, other=0.0).to(tl.float32)
        grad = tl.where(is_chosen, upstream, grad)
        chosen = tl.where(is_chosen, 1.0, chosen)
    if NORMALIZE:
        total = tl.sum(tl.where(chosen > 0, scores, 0.0), axis=1)[:, None] + _EPS
        mean = tl.sum(tl.where(chosen > 0, grad * scores, 0.0), axis=1)[:, None] / total
        grad = tl.where(chosen > 0, (grad - mean) / total, 0.0)
    grad *= scale
    if SIGMOID:
        grad *= scores * (1.0 - scores)
    else:
        grad = scores * (grad - tl.sum(grad * scores, axis=1)[:, None])
    tl.store(grad_logits_ptr + rows * num_experts + columns, grad.to(grad_logits_ptr.dtype.element_ty), mask=mask)


@backend.launch_cache
def choose_rows(block_size: int) -> tuple[int, int]:
    """Rows of a tile of 2048 elements, or of one longer row, and warps."""
    return max(1, 2048 // block_size), min(16, max(4, block_size // 512))


def _forward_fake(logits: Tensor, bias: Tensor | None, top_k: int, *_: Any) -> list[Tensor]:
    shape = logits.shape[0], top_k
    return [logits.new_empty(shape, dtype=torch.int64), logits.new_empty(shape, dtype=torch.float32)]


@backend.register_op("moe_router", fake=_forward_fake)
def _forward(
    logits: Tensor,
    bias: Tensor | None,
    top_k: int,
    score: str,
    num_groups: int,
    top_groups: int,
    group_score: str,
    normalize: bool,
    scale: float,
) -> list[Tensor]:
    num_rows, num_experts = logits.shape
    index, chosen = _forward_fake(logits, bias, top_k)
    group_size = num_experts // num_groups
    blocks = [backend.next_power_of_2(each) for each in (num_groups, group_size)]
    block_rows, num_warps = choose_rows(blocks[0] * blocks[1])
    _forward_kernel.launch(
        -(-num_rows // block_rows),
        logits_ptr=logits,
        bias_ptr=bias,
        index_ptr=index,
        chosen_ptr=chosen,
        row_stride=logits.stride(0),
        num_rows=num_rows,
        num_groups=num_groups,
        group_size=group_size,
        scale=float(scale),
        SIGMOID=score == "sigmoid",
        BY_LOGITS=_by_logits(bias, num_groups, group_score),
        NORMALIZE=normalize,
        TOP_GROUPS=top_groups if num_groups > 1 else 0,
        BEST_TWO=group_score == "best_two",
        TOP_K=top_k,
        BLOCK_ROWS=block_rows,
        BLOCK_GROUPS=blocks[0],
        BLOCK_GROUP=blocks[1],
        BLOCK_K=backend.next_power_of_2(top_k),
        num_warps=num_warps,
    )
    return [index, chosen]


@backend.register_op("moe_router_backward", fake=lambda grad, logits, *_: logits.new_empty(logits.shape))
def _backward(grad: Tensor, logits: Tensor, index: Tensor, score: str, normalize: bool, scale: float) -> Tensor:
    num_rows, num_experts = logits.shape
    grad_logits = logits.new_empty(logits.shape)
    block = backend.next_power_of_2(num_experts)
    block_rows, num_warps = choose_rows(block)
    _backward_kernel.launch(
        -(-num_rows // block_rows),
        grad_ptr=grad,
        logits_ptr=logits,
        index_ptr=index,
        grad_logits_ptr=grad_logits,
        row_stride=logits.stride(0),
        num_rows=num_rows,
        num_experts=num_experts,
        scale=float(scale),
        SIGMOID=score == "sigmoid",
        NORMALIZE=normalize,
        TOP_K=index.shape[1],
        BLOCK_ROWS=block_rows,
        BLOCK=block,
        num_warps=num_warps,
    )
    return grad_logits


class _RouterFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, bias: Tensor | None, options: tuple[Any, ...]) -> tuple[Tensor, Tensor]:
        index, chosen = _forward(logits, bias, *options)
        ctx.save_for_backward(logits, index)
        ctx.mark_non_differentiable(index)
        ctx.options = options[1], *options[-2:]
        return index, chosen

    @staticmethod
    @backend.once_differentiable
    def backward(ctx: Any, _: Tensor, grad: Tensor) -> tuple[Tensor | None, ...]:
        logits, index = ctx.saved_tensors
        return _backward(grad.contiguous(), logits, index, *ctx.options), None, None


def moe_router(
    logits: Tensor,
    top_k: int,
    *,
    score: str = "softmax",
    bias: Tensor | None = None,
    num_groups: int = 1,
    top_groups: int = 1,
    group_score: str = "max",
    normalize: bool = True,
    scale: float = 1.0,
) -> tuple[Tensor, Tensor]:
    """Returns the experts of each token and their factors, as :func:`moe_experts` takes them.

    Of equal values the expert with the lowest index is chosen. Gradients go to the logits only.

    Args:
        logits: ``[..., num_experts]``, in any floating dtype. Rows may lie apart in memory.
        top_k: How many experts a token has.
        score: ``"softmax"`` over all experts, or ``"sigmoid"`` of each logit. A softmax over the logits of the chosen
            experts is ``"softmax"`` with ``normalize``.
        bias: ``[num_experts]``, added to scores for the choice only.
        num_groups: Into how many groups of equal size experts are divided, in their order.
        top_groups: How many groups a token's experts may be in.
        group_score: What groups are compared by: ``"max"``, their largest score with its bias, or ``"best_two"``, the
            sum of the two largest.
        normalize: Whether the scores of a token's experts are divided by their sum.
        scale: A positive factor of all scores, after that.

    Returns:
        The experts, int64, and their scores, float32 (float64 of such logits), both ``[..., top_k]``, the largest
        selection value first.

    Raises:
        TypeError: If an argument is of a wrong type.
        ValueError: If a number is out of range, or shapes or devices do not fit together.
    """
    check_floating_tensors("logits", logits, bias=bias)
    if logits.dim() == 0 or logits.shape[-1] == 0:
        raise wrong_value("logits", "a tensor of [..., num_experts]", logits)
    num_experts = logits.shape[-1]
    check_choice("score", score, ("softmax", "sigmoid"))
    check_choice("group_score", group_score, ("max", "best_two"))
    check_shape("bias", bias, (num_experts,), "[num_experts]")
    check_integer("num_groups", num_groups, at_least=1)
    if num_experts % num_groups or (group_score == "best_two" and num_experts // num_groups < 2):
        raise wrong_value("num_groups", f"a divisor of num_experts={num_experts} that fits group_score", num_groups)
    check_integer("top_groups", top_groups, at_least=1, at_most=num_groups)
    check_integer("top_k", top_k, at_least=1, at_most=top_groups * (num_experts // num_groups))
    check_bool("normalize", normalize)
    check_number("scale", scale, above=0)
    options = (top_k, score, num_groups, top_groups, group_score, normalize, scale)
    rows = backend.as_rows(logits, num_experts)
    bias = None if bias is None else bias.detach().contiguous()
    if not backend.runs_on_triton(rows, bias) or rows.numel() == 0 or num_experts > _MAX_EXPERTS:
        index, chosen = router_reference(rows, bias, *options)
    elif backend.needs_graph(rows):
        index, chosen = _RouterFunction.apply(rows, bias, options)
    else:
        index, chosen = _forward(rows, bias, *options)
    shape = (*logits.shape[:-1], top_k)
    return index.view(shape), chosen.view(shape)
