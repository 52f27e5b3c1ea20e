"""Optimizers at memory bandwidth: each number is read and written once.

AdamW (arXiv:1711.05101, algorithm 2), for a gradient g in step t:

    m = beta1 m + (1 - beta1) g             v = beta2 v + (1 - beta2) g**2
    p = p - lr weight_decay p - lr / (1 - beta1**t) m / (sqrt(v / (1 - beta2**t)) + eps)

Computed in float32, from the m and v of this step before they are rounded.
"""

import inspect
import math
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.graph import increment_version
from torch.distributed.tensor import DTensor

from liger_ops import backend
from liger_ops.arguments import check_bool, check_number, wrong_type

__all__ = ["AdamW"]

_MIN_ELEMENTS = 2**22
"""Of a tensor with a kernel of its own. Fewer take less time on the GPU than the launch takes on the host."""
_BLOCK_SIZE, _NUM_WARPS = 1024, 4
_DTYPES = (torch.float32, torch.bfloat16)
_NUMBERS = ("lr", "eps", "weight_decay")
_VARIANTS = ("amsgrad", "capturable", "differentiable")
_plain_step = inspect.unwrap(torch.optim.AdamW.step)
"""Without what PyTorch wraps around it: hooks of a step run around the whole of ours."""


@backend.Kernel
def _adamw_kernel(
    param_ptr,  # [num_elements], as all but step
    grad_ptr,
    exp_avg_ptr,
    exp_avg_sq_ptr,
    step_ptr,  # [], float32: this step's number, from 1
    lr,
    decay,  # lr * weight_decay
    beta2,
    rate1,  # 1 - beta1, rounded once, as the next one
    rate2,
    log_beta1,
    log_beta2,
    eps,
    num_elements,
    MAXIMIZE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
):
    """One program updates BLOCK_SIZE elements."""
    offsets = tl.program_id(0).to(tl.int64) * BLOCK_SIZE + tl.arange(0, BLOCK_SIZE)
    mask = offsets < num_elements
    step = tl.load(step_ptr).to(tl.float64)  # in float32, 1 - beta2**t would keep four digits of the first steps
    correction1 = (1.0 - tl.exp(step * log_beta1)).to(tl.float32)
    correction2 = (1.0 - tl.exp(step * log_beta2)).to(tl.float32)
    param = tl.load(param_ptr + offsets, mask=mask).to(tl.float32)
    grad = tl.load(grad_ptr + offsets, mask=mask).to(tl.float32)
    exp_avg = tl.load(exp_avg_ptr + offsets, mask=mask).to(tl.float32)
    exp_avg_sq = tl.load(exp_avg_sq_ptr + offsets, mask=mask).to(tl.float32)
    if MAXIMIZE:
        grad = -grad
    exp_avg = exp_avg + (grad - exp_avg) * rate1
    exp_avg_sq = exp_avg_sq * beta2 + grad * grad * rate2
    # Rounded to nearest: the fast square root takes denormal numbers for zero.
    denominator = tl.sqrt_rn(exp_avg_sq) / tl.sqrt_rn(correction2) + eps
    # Both are subtracted at once: 1 - decay would lose most digits of a small decay.
    param = param - (param * decay + lr / correction1 * exp_avg / denominator)
    tl.store(param_ptr + offsets, param.to(param_ptr.dtype.element_ty), mask=mask)
    tl.store(exp_avg_ptr + offsets, exp_avg.to(exp_avg_ptr.dtype.element_ty), mask=mask)
    tl.store(exp_avg_sq_ptr + offsets, exp_avg_sq.to(exp_avg_sq_ptr.dtype.element_ty), mask=mask)


class _Update(NamedTuple):
    """One parameter's part of a step."""

    parameter: Tensor  # as the optimizer has it, like the next
    grad: Tensor
    tensors: tuple[Tensor, ...]  # this rank's part of both and of both averages, of one shape, contiguous, on a GPU
    step: Tensor  # [], float32: this step's number, from 1
    options: dict[str, Any]  # of its group

    def run(self) -> None:
        """Updates the parameter and both averages in place."""
        (beta1, beta2), lr = self.options["betas"], self.options["lr"]
        param, grad, exp_avg, exp_avg_sq = self.tensors
        _adamw_kernel.launch(
            triton.cdiv(param.numel(), _BLOCK_SIZE),
            num_warps=_NUM_WARPS,
            param_ptr=param,
            grad_ptr=grad,
            exp_avg_ptr=exp_avg,
            exp_avg_sq_ptr=exp_avg_sq,
            step_ptr=self.step,
            lr=lr,
            decay=lr * self.options["weight_decay"],
            beta2=beta2,
            rate1=1.0 - beta1,
            rate2=1.0 - beta2,
            log_beta1=math.log(beta1) if beta1 else -math.inf,
            log_beta2=math.log(beta2) if beta2 else -math.inf,
            eps=self.options["eps"],
            num_elements=param.numel(),
            MAXIMIZE=self.options["maximize"],
            BLOCK_SIZE=_BLOCK_SIZE,
        )
        increment_version(self.parameter)  # a graph that saved the parameter is out of date


class AdamW(torch.optim.AdamW):
    """:class:`torch.optim.AdamW` at memory bandwidth.

    Our kernels update parameters of 4 Mi elements or more (of this rank's shard) that are contiguous, on a GPU, in
    float32 or bfloat16, with gradients and states alike. PyTorch updates all others, in its fused kernel if all
    parameters of a group are floating-point and on GPUs, and all of a group whose options are tensors. States are those
    of :class:`torch.optim.AdamW`, so each loads the other's checkpoints. There is no ``amsgrad``, ``foreach``,
    ``fused``, ``capturable`` and ``differentiable``; groups may have them, and are then left to PyTorch or to its
    choice of an implementation.

    Args:
        params: Parameters, or groups of them.
        lr: Learning rate, a number or a tensor.
        betas: Averaging factors of the gradient and its square.
        eps: Added to the denominator.
        weight_decay: Decoupled decay, multiplied by the learning rate.
        maximize: Whether to go up the gradient.

    Raises:
        TypeError: For an argument of a wrong type.
        ValueError: For a number out of range.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | Tensor = 1e-3,
        betas: tuple[float | Tensor, float | Tensor] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        *,
        maximize: bool = False,
    ) -> None:
        if not isinstance(betas, list | tuple) or len(betas) != 2:
            raise wrong_type("betas", "a pair of numbers", betas)
        for name, value, below in (("lr", lr, None), ("betas[0]", betas[0], 1.0), ("betas[1]", betas[1], 1.0)):
            if not isinstance(value, Tensor):
                check_number(name, value, at_least=0.0, below=below)
        check_number("eps", eps, at_least=0.0)
        check_number("weight_decay", weight_decay, at_least=0.0)
        check_bool("maximize", maximize)
        first, second = (beta if isinstance(beta, Tensor) else float(beta) for beta in betas)
        super().__init__(params, lr, (first, second), eps, weight_decay, maximize=maximize)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds a group of parameters, as PyTorch's optimizers do."""
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        is_open = group["fused"] is None and group["foreach"] is None and not group["differentiable"]
        if is_open and group["params"] and all(each.is_cuda and each.is_floating_point() for each in group["params"]):
            group["fused"] = True

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Makes a step; returns what ``closure`` returned, which is called first to compute the gradients."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        with torch.no_grad():
            updates = self._find_updates()
            try:
                for update in updates:
                    update.parameter.grad = None  # so that PyTorch leaves it out
                _plain_step(self)
            finally:
                for update in updates:
                    update.parameter.grad = update.grad
            if updates:
                torch._foreach_add_([update.step for update in updates], 1)
            for update in updates:
                update.run()
        return loss

    def _find_updates(self) -> list[_Update]:
        """The parameters that our kernels update."""
        scaled = getattr(self, "grad_scale", None) is not None or getattr(self, "found_inf", None) is not None
        if scaled or torch.compiler.is_compiling():
            return []
        updates = []
        for group in self.param_groups:
            numbers = {name: group[name] for name in _NUMBERS}
            has_tensors = any(isinstance(value, Tensor) for value in (*numbers.values(), *group["betas"]))
            if has_tensors or any(group[name] for name in _VARIANTS) or not group["decoupled_weight_decay"]:
                continue
            options: dict[str, Any] = {name: float(value) for name, value in numbers.items()}
            options |= {"betas": tuple(map(float, group["betas"])), "maximize": bool(group["maximize"])}
            updates += [update for parameter in group["params"] if (update := self._update_of(parameter, options))]
        return updates

    def _update_of(self, parameter: Tensor, options: dict[str, Any]) -> _Update | None:
        """How ``parameter`` is updated by a kernel of ours; None if PyTorch has to."""
        grad = parameter.grad
        if grad is None or parameter.numel() < _MIN_ELEMENTS or grad.layout != torch.strided:
            return None
        state = self.state.get(parameter)
        if not state or not isinstance(state["step"], Tensor):  # PyTorch makes the states, in the first step
            return None
        tensors = _parts((parameter, grad, state["exp_avg"], state["exp_avg_sq"]))
        first, kinds = tensors[0], {(each.shape, each.dtype, each.device) for each in tensors}
        if (
            len(kinds) > 1
            or first.numel() < _MIN_ELEMENTS
            or first.dtype not in _DTYPES
            or not (backend.use_triton(first) and backend.runs_directly(*tensors))
            or any(each.is_neg() or not each.is_contiguous() for each in tensors)
        ):
            return None
        # An optimizer that is not fused, which the state may come from, counts on the CPU.
        state["step"] = step = state["step"].to(first.device, torch.float32)
        return _Update(parameter, grad, tensors, step, options)


def _parts(tensors: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """This rank's parts of DTensors that are spread alike; other tensors as they are."""
    spread = [(each.device_mesh, each.placements) if isinstance(each, DTensor) else None for each in tensors]
    if spread[0] is None or len(set(spread)) > 1 or any(placement.is_partial() for placement in spread[0][1]):
        return tensors
    return tuple(each.to_local() for each in tensors if isinstance(each, DTensor))
