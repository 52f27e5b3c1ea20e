"""Experts: each token goes through top_k of num_experts small MLPs, whose outputs are added up by their scores.

With z = W1 x + b1, a = activation(gate) * up of z, y = W2 a + b2 and O = sum of s y over a token's experts, and the
gradient G of O (Shazeer et al., arXiv:1701.06538; formulas of each step are those of a gated MLP):

    d = W2^T G                  without the score, so that  ds = <d, a> + <G, b2>  needs neither y nor a division
    dz = da/dz (s d)            dW2 = sum of G (s a)^T      db2 = sum of s G
    dx = sum of W1^T dz         dW1 = sum of dz x^T         db1 = sum of dz

Saved for backward: x, z, the scores and the index, 4 * intermediate_size bytes per pair in bfloat16; a is computed
again from z. Rows are gathered in the loads of products, and added up in float32 in the order of a token's experts:
nothing is permuted in memory, nothing waits for the device, and results do not depend on the order in which programs
run.

A weight W + B A with B A of a low rank is never made: u = A x has few columns, and a kernel begins its sums with B u;
W^T g + A^T (B^T g) in backward likewise. dA = sum of (B^T g) x^T, dB = sum of g u^T, with u computed again.
"""

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from liger_ops import backend
from liger_ops.arguments import (
    check_bool,
    check_floating_tensors,
    check_pair,
    check_same_device,
    check_shape,
    check_tensor,
    wrong_type,
    wrong_value,
)
from liger_ops.moe import gradients, products, tiles
from liger_ops.moe.exchange import ExpertGroup, run_on_ranks
from liger_ops.moe.gate import Gate
from liger_ops.moe.index import Index, make_index


class _Layout:
    """Weights as views ``[num_experts, output features, input features]``, and where the gate's features are."""

    def __init__(self, gate_up: Tensor, down: Tensor, interleaved: bool, transposed: bool) -> None:
        self.gate_up, self.down = (each.mT if transposed else each for each in (gate_up, down))
        self.num_experts, self.width = self.down.shape[0], self.down.shape[2]
        self.transposed = transposed
        self.gated = 0 if self.gate_up.shape[1] == self.width else 2 if interleaved else 1

    def split(self, z: Tensor) -> tuple[Tensor, Tensor | None]:
        """Gate and up of products ``[num_rows, width or 2 * width]``."""
        if self.gated == 0:
            return z, None
        return (z[:, ::2], z[:, 1::2]) if self.gated == 2 else (z[:, : self.width], z[:, self.width :])

    def block_rows(self, num_rows: int) -> int:
        return tiles.choose_rows(num_rows, self.num_experts, self.down.dtype)


def experts_reference(x: Tensor, gate_up: Tensor, down: Tensor, index: Tensor, scores: Tensor, *others: Any) -> Tensor:
    """The experts one after another, in plain PyTorch: products in the dtype of ``x``, sums in float32 or wider."""
    gate_up_bias, down_bias, gate, interleaved, transposed, *adapters = others
    layout = _Layout(gate_up, down, interleaved, transposed)
    wide = torch.promote_types(x.dtype, torch.float32)

    def run(expert: int, rows: Tensor) -> Tensor:
        z = linear(rows, layout.gate_up, gate_up_bias, adapters[:2], expert)
        a = gate.reference(*layout.split(z)).to(x.dtype)
        return linear(a, layout.down, down_bias, adapters[2:], expert).to(wide)

    def linear(rows: Tensor, weight: Tensor, bias: Tensor | None, adapter: Any, expert: int) -> Tensor:
        y = F.linear(rows, weight[expert], None if bias is None else bias[expert])
        if adapter[0] is None:
            return y
        return y + F.linear(F.linear(rows, adapter[0][expert]), adapter[1][expert])

    y = torch.zeros_like(x, dtype=wide)
    if torch.compiler.is_compiling():  # every expert on every token, as numbers of tokens cannot be traced
        for expert in range(layout.num_experts):
            is_own = index == expert
            own_scores = scores.to(wide).where(is_own, 0.0).sum(-1, keepdim=True)
            is_used = is_own.any(-1, keepdim=True)
            y = y + (run(expert, x.where(is_used, 0.0)) * own_scores).where(is_used, 0.0)
        return y.to(x.dtype)
    order = index.flatten().argsort(stable=True)
    bounds = torch.arange(layout.num_experts + 1, device=index.device)
    offsets = torch.searchsorted(index.flatten()[order], bounds).tolist()
    for expert in range(layout.num_experts):
        pairs = order[offsets[expert] : offsets[expert + 1]]
        if not len(pairs) and expert:  # one without tokens still gives every tensor a gradient
            continue
        tokens = pairs // index.shape[1]
        rows = run(expert, x[tokens]) * scores.flatten()[pairs].to(wide).unsqueeze(-1)
        y = y.index_add(0, tokens, rows)
    return y.to(x.dtype)


def _forward_fake(x: Tensor, gate_up: Tensor, down: Tensor, index: Tensor, *settings: Any) -> list[Tensor]:
    *_, interleaved, transposed, keep, num_rows = settings
    layout = _Layout(gate_up, down, interleaved, transposed)
    y = torch.empty_like(x, memory_format=torch.contiguous_format)
    if not keep:
        return [y]
    z = x.new_empty((num_rows, layout.gate_up.shape[1]))
    sizes = Index.sizes(index.numel(), layout.num_experts, num_rows)
    return [y, z, *(x.new_empty(size, dtype=torch.int32) for size in sizes)]


_TENSORS = "Tensor x, Tensor gate_up, Tensor down, Tensor index, Tensor scores"
_SETTINGS = f"{backend.schema_of(Gate)}, bool interleaved, bool transposed"


@backend.register_op(
    f"moe_experts({_TENSORS}, Tensor? gate_up_bias, Tensor? down_bias, Tensor?[] adapters, {_SETTINGS}, bool keep,"
    " SymInt num_rows) -> Tensor[]",
    fake=_forward_fake,
)
def _forward(x: Tensor, gate_up: Tensor, down: Tensor, index: Tensor, scores: Tensor, *others: Any) -> list[Tensor]:
    """The output, and with ``keep`` what backward needs: z and the index. At most ``num_rows`` pairs have an expert."""
    gate_up_bias, down_bias, adapters, *options, interleaved, transposed, keep, num_rows = others
    layout, gate = _Layout(gate_up, down, interleaved, transposed), Gate(*options)
    top_k, block_rows = index.shape[1], layout.block_rows(num_rows)
    places = make_index(index.reshape(-1), layout.num_experts, block_rows, num_rows)
    z = x.new_empty((num_rows, layout.gate_up.shape[1])) if keep else None
    a = x.new_empty((num_rows, layout.width))
    gate_up_a, gate_up_b, down_a, down_b = adapters
    low = products.narrow(x, gate_up_a, places, block_rows, top_k), gate_up_b
    products.gate_up(x, layout.gate_up, gate_up_bias, places, top_k, block_rows, gate, layout.gated, z, a, *low)
    rows = x.new_empty((num_rows, x.shape[1]))
    low = products.narrow(a, down_a, places, block_rows), down_b
    products.product(a, layout.down, down_bias, places, block_rows, rows, *low)
    del a, low
    y = torch.empty_like(x, memory_format=torch.contiguous_format)
    products.combine(rows, scores, places, top_k, y)
    return [y] if z is None else [y, z, *places]


def _backward_fake(grad: Tensor, x: Tensor, gate_up: Tensor, down: Tensor, *rest: Any) -> list[Tensor]:
    _, scores, down_bias, adapters, z, *_, needs = rest
    biases = gate_up.new_empty((gate_up.shape[0], z.shape[1])), down_bias
    return backend.empty_gradients((x, gate_up, down, scores, *biases, *adapters), needs)


def _gradients(grad: Tensor, x: Tensor, gate_up: Tensor, down: Tensor, *others: Any) -> list[Tensor]:
    """Those gradients of x, gate_up, down, scores, the biases and the adapters that are needed; z is lost if
    ``overwrite``, as the op that ends in an underscore has it."""
    index, scores, down_bias, adapters, z, places, *options, interleaved, transposed, overwrite, needs = others
    layout, gate = _Layout(gate_up, down, interleaved, transposed), Gate(*options)
    needs_x, needs_gate_up, needs_down, needs_scores, needs_gate_up_bias, needs_down_bias, *needs_adapters = needs
    where, top_k, block_rows = Index(*places), index.shape[1], layout.block_rows(len(z))
    narrow = partial(products.narrow, index=where, block_rows=block_rows)
    gate_up_a, gate_up_b, down_a, down_b = adapters
    needs_z = needs_x or needs_gate_up or needs_gate_up_bias or any(needs_adapters[:2])
    needs_scaled = needs_down or any(needs_adapters[2:])
    grad_z = None if not needs_z else z if overwrite else torch.empty_like(z)
    scaled = grad.new_empty((z.shape[0], layout.width)) if needs_scaled else None
    grad_scores = torch.empty_like(scores)
    low: Any = None if down_b is None else narrow(grad, down_b.mT, top_k=top_k)
    gradients.gate_backward(
        grad, layout.down.mT, z, scores, where, block_rows, gate, layout.gated, grad_z, scaled, grad_scores,
        low, None if down_a is None else down_a.mT,
    )  # fmt: skip
    if down_bias is not None and needs_scores:
        if grad.is_cuda and grad.dtype.itemsize == 2:
            by_expert = torch.mm(grad, down_bias.mT, out_dtype=torch.float32)
        else:
            by_expert = grad.float() @ down_bias.mT.float()
        is_used = (index >= 0) & (index < layout.num_experts)
        grad_scores += by_expert.gather(1, index.clamp(0, layout.num_experts - 1)).where(is_used, 0.0)
    found: list[Any] = [None, None, None, grad_scores, *6 * [None]]  # in the order of ``needs``

    def differentiate(place: int, weight: Any, pair: tuple[Any, Any], left_gathered: bool | None) -> None:
        found[place] = weight.new_empty(weight.shape)
        gradients.weight_gradient(*pair, where, top_k, left_gathered, found[place])

    if scaled is not None:
        if needs_adapters[2]:
            differentiate(8, down_a, (low, scaled), None)
        if needs_adapters[3]:
            differentiate(9, down_b, (grad, narrow(scaled, down_a)), True)
        if needs_down:
            differentiate(2, down, (scaled, grad) if layout.transposed else (grad, scaled), not layout.transposed)
        del scaled
    if needs_down_bias and down_bias is not None:
        found[5] = torch.empty_like(down_bias)
        gradients.bias_gradient(grad, scores, where, top_k, found[5])
    low = None if grad_z is None or gate_up_b is None else narrow(grad_z, gate_up_b.mT)
    if needs_x and grad_z is not None:
        rows = grad.new_empty((z.shape[0], x.shape[1]))
        low_weight = None if gate_up_a is None else gate_up_a.mT
        products.product(grad_z, layout.gate_up.mT, None, where, block_rows, rows, low, low_weight)
        found[0] = x.new_empty(x.shape)
        products.combine(rows, None, where, top_k, found[0])
        del rows
    if needs_adapters[0]:
        differentiate(6, gate_up_a, (low, x), False)
    if needs_adapters[1]:
        differentiate(7, gate_up_b, (grad_z, narrow(x, gate_up_a, top_k=top_k)), None)
    if grad_z is not None and needs_gate_up_bias:
        found[4] = gate_up.new_empty((layout.num_experts, z.shape[1]))
        gradients.bias_gradient(grad_z, None, where, top_k, found[4])
    if grad_z is not None and needs_gate_up:
        differentiate(1, gate_up, (x, grad_z) if layout.transposed else (grad_z, x), layout.transposed)
    return [each for each, needed in zip(found, needs, strict=True) if needed and each is not None]


_BEFORE_Z = f"Tensor grad, {_TENSORS}, Tensor? down_bias, Tensor?[] adapters"
_AFTER_Z = f"Tensor[] places, {_SETTINGS}, bool overwrite, bool[] needs"
_backward, _backward_in_place = (
    backend.register_op(f"{name}({_BEFORE_Z}, {z} z, {_AFTER_Z}) -> Tensor[]", _backward_fake)(_gradients)
    for name, z in (("moe_experts_backward", "Tensor"), ("moe_experts_backward_", "Tensor(a8!)"))
)


@register_flop_formula(torch.ops.liger_ops.moe_experts, get_raw=True)
def _forward_flops(x: Tensor, gate_up: Tensor, down: Tensor, *rest: Any, **_: Any) -> int:
    """As PyTorch's counter and estimates of time take them."""
    return 2 * rest[-1] * (gate_up[0].numel() + down[0].numel())


@register_flop_formula(
    [torch.ops.liger_ops.moe_experts_backward, torch.ops.liger_ops.moe_experts_backward_], get_raw=True
)
def _backward_flops(grad: Tensor, x: Tensor, gate_up: Tensor, down: Tensor, *rest: Any, **_: Any) -> int:
    needs_x, needs_gate_up, needs_down, *_others = rest[-1]
    products = (needs_x + needs_gate_up) * gate_up[0].numel() + (1 + needs_down) * down[0].numel()
    return 2 * len(rest[4]) * products  # of z


class _ExpertsFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *args: Any) -> Tensor:
        tensors, (gate, interleaved, transposed, num_rows), adapters = args[:7], args[7:11], args[11:]
        ctx.settings = *gate, interleaved, transposed
        y, z, *places = _forward(*tensors, list(adapters), *ctx.settings, True, num_rows)
        ctx.save_for_backward(*tensors[:5], tensors[6], *adapters, z, *places)  # without the bias of gate and up
        return y

    @staticmethod
    @backend.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        needs = [ctx.needs_input_grad[place] for place in (0, 1, 2, 4, 5, 6, 11, 12, 13, 14)]
        (*inputs, z, offsets, pairs, rows, starts, experts), overwrite = backend.take_saved_tensors(ctx, own=10)
        places = [offsets, pairs, rows, starts, experts]
        grad = backend.as_rows(grad, grad.shape[-1])
        compute = _backward_in_place if overwrite else _backward
        gradients = compute(grad, *inputs[:6], inputs[6:], z.detach(), places, *ctx.settings, overwrite, needs)
        x, gate_up, down, scores, gate_up_bias, down_bias, *adapters = backend.spread(gradients, needs)
        return x, gate_up, down, None, scores, gate_up_bias, down_bias, None, None, None, None, *adapters


def _compute(tensors: list[Any], settings: tuple[Any, ...], adapters: list[Any], num_rows: int) -> Tensor:
    if not backend.runs_on_triton(tensors[0]) or num_rows == 0:
        return experts_reference(*tensors, *settings, *adapters)
    if backend.needs_graph(*tensors, *adapters):
        return _ExpertsFunction.apply(*tensors, *settings, num_rows, *adapters)
    (y,) = _forward(*tensors, adapters, *settings[0], *settings[1:], False, num_rows)
    return y


def moe_experts(
    x: Tensor,
    gate_up: Tensor,
    down: Tensor,
    top_k_index: Tensor,
    top_k_weights: Tensor,
    *,
    activation: str = "silu",
    gate_up_bias: Tensor | None = None,
    down_bias: Tensor | None = None,
    limit: float | None = None,
    alpha: float = 1.0,
    up_offset: float = 0.0,
    limit_output: bool = False,
    interleaved: bool = False,
    transposed: bool = False,
    gate_up_adapter: tuple[Tensor, Tensor] | None = None,
    down_adapter: tuple[Tensor, Tensor] | None = None,
    group: ExpertGroup | None = None,
) -> Tensor:
    """Returns the sum over each token's experts of ``top_k_weights`` times a gated MLP with that expert's weights.

    Products with weights run in the autocast dtype, or in that of the weights; sums are in float32.

    Args:
        x: ``[..., hidden_size]``, the tokens.
        gate_up: ``[num_experts, 2 * intermediate_size, hidden_size]``, the gate's features before those of up; of half
            the size for an activation alone.
        down: ``[num_experts, hidden_size, intermediate_size]``.
        top_k_index: The experts of each token, int64, ``[..., top_k]``. What is outside of ``[0, num_experts)`` is no
            expert: it adds nothing, and its weight gets a gradient of 0. An expert may occur several times.
        top_k_weights: Their factors, ``[..., top_k]``, of any floating-point dtype and any values.
        activation: Of the gate: "silu", "gelu", "gelu_tanh" or "relu_squared".
        gate_up_bias, down_bias: ``[num_experts, output features]``.
        limit: The gate is at most this, up at least minus this and at most this, before the activation.
        alpha: ``silu(gate)`` is ``gate * sigmoid(alpha * gate)``.
        up_offset: Added to up.
        limit_output: The limit is one of the activation's output, not of the gate.
        interleaved: The gate has the even features, up the odd ones.
        transposed: The weights are ``[num_experts, hidden_size, 2 * intermediate_size]`` and ``[num_experts,
            intermediate_size, hidden_size]``.
        gate_up_adapter, down_adapter: Low-rank updates of the weights, ``(a, b)`` of ``[num_experts, rank, input
            features]`` and ``[num_experts, output features, rank]``: what is multiplied with an expert's weight is also
            with ``b @ a``, in two products. No tensor of the weights' size is made for them.
        group: Ranks that share the experts, and call this together. Weights, biases and adapters are those of this
            rank's part of the experts, the numbers in ``top_k_index`` are of all; ranks may have different numbers of
            tokens. What an expert adds to a gradient of its tensors is divided by the number of ranks, as an average
            over the group would, which these tensors do not need.

    Returns:
        ``[..., hidden_size]`` in the dtype of ``x``.

    Raises:
        TypeError: If a tensor is none, or of a wrong dtype.
        ValueError: If shapes, dtypes or devices do not fit together, or an option is out of range.
    """
    gate = Gate(activation, limit, alpha, up_offset, limit_output)
    gate.check()
    check_bool("interleaved", interleaved)
    check_bool("transposed", transposed)
    if group is not None and not isinstance(group, ExpertGroup):
        raise wrong_type("group", "an ExpertGroup or None", group)
    check_floating_tensors("x", x, optional=False, gate_up=gate_up, down=down, top_k_weights=top_k_weights)
    check_floating_tensors("x", x, gate_up_bias=gate_up_bias, down_bias=down_bias)
    check_tensor("top_k_index", top_k_index)
    check_same_device("x", x, top_k_index=top_k_index)
    if x.dim() == 0:
        raise wrong_value("x", "a tensor of [..., hidden_size]", x)
    if down.dim() != 3 or min(down.shape) < 1:
        raise wrong_value("down", "a tensor of three dimensions", down)
    num_experts, hidden_size, width = down.mT.shape if transposed else down.shape
    if x.shape[-1] != hidden_size:
        raise wrong_value("x", f"of [..., hidden_size={hidden_size}] as down has it", x)
    size = gate_up.shape[-1 if transposed else -2] if gate_up.dim() == 3 else 0
    size = size if size in (width, 2 * width) else 2 * width
    shape = (num_experts, hidden_size, size) if transposed else (num_experts, size, hidden_size)
    check_shape("gate_up", gate_up, shape, "down's")
    if gate_up.dtype != down.dtype:
        raise wrong_value("down", f"a tensor in gate_up's {gate_up.dtype}", down)
    check_shape("gate_up_bias", gate_up_bias, (num_experts, size), "the weight's")
    check_shape("down_bias", down_bias, (num_experts, hidden_size), "the weight's")
    tokens = x.shape[:-1]
    if top_k_index.dtype != torch.int64 or top_k_index.shape[:-1] != tokens or top_k_index.dim() != x.dim():
        raise wrong_value("top_k_index", f"an int64 tensor of [{', '.join(map(str, tokens))}, top_k]", top_k_index)
    check_shape("top_k_weights", top_k_weights, top_k_index.shape, "top_k_index's")
    adapters = _check_adapter("gate_up_adapter", gate_up_adapter, gate_up, transposed)
    adapters += _check_adapter("down_adapter", down_adapter, down, transposed)
    dtype = backend.autocast_dtype(x.device.type) or gate_up.dtype
    rows = backend.as_rows(x, x.shape[-1])
    index = top_k_index.reshape(-1, top_k_index.shape[-1])
    cast = [None if each is None else each.to(dtype) for each in (gate_up, down, gate_up_bias, down_bias)]
    cast[2:] = [None if each is None else each.contiguous() for each in cast[2:]]
    scores = top_k_weights.reshape(index.shape).contiguous()
    low = [None if each is None else each.to(dtype).contiguous() for each in adapters]

    def compute(x: Tensor, index: Tensor, scores: Tensor, num_rows: int) -> Tensor:
        tensors: list[Any] = [x, *cast[:2], index, scores, *cast[2:]]
        return _compute(tensors, (gate, interleaved, transposed), low, num_rows if x.numel() else 0)

    index = index.contiguous()
    if group is None:
        y = compute(rows.to(dtype), index, scores, index.numel())
    else:
        y = run_on_ranks(compute, group, down.shape[0], rows.to(dtype), index, scores)
    return y.to(x.dtype).view(x.shape)


def _check_adapter(name: str, adapter: Any, weight: Tensor, transposed: bool) -> list[Tensor | None]:
    if adapter is None:
        return [None, None]
    check_pair(name, adapter, "x", weight)
    num_experts, num_outputs, num_inputs = weight.mT.shape if transposed else weight.shape
    rank = max(1, adapter[0].shape[1]) if adapter[0].dim() == 3 else 1
    check_shape(f"{name}[0]", adapter[0], (num_experts, rank, num_inputs), "the weight's")
    check_shape(f"{name}[1]", adapter[1], (num_experts, num_outputs, rank), "the weight's and the rank's")
    return list(adapter)
