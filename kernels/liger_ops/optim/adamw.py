"""AdamW at memory bandwidth: each number is read and written once.

AdamW (arXiv:1711.05101, algorithm 2), for a gradient g in step t:

    m = beta1 m + (1 - beta1) g             v = beta2 v + (1 - beta2) g**2
    p = p - lr weight_decay p - lr / (1 - beta1**t) m / (sqrt(v / (1 - beta2**t)) + eps)

Computed in float32, from the m and v of this step before they are rounded. ``moments`` says how they are rounded.
"""

import inspect
import math
from collections.abc import Callable, Iterable
from itertools import chain
from typing import Any, Literal, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.graph import increment_version
from torch.distributed.tensor import DTensor

from liger_ops import backend
from liger_ops.arguments import check_bool, check_choice, check_integer, check_number, wrong_type, wrong_value
from liger_ops.optim import moments
from liger_ops.optim.moments import NAMES, kernel_cut, kernel_decode, kernel_encode, kernel_random_words, kernel_scales

__all__ = ["AdamW"]

_MIN_ELEMENTS = 2**23
"""Of a tensor with a kernel of its own. Fewer take less time on the GPU than the launch takes on the host."""
_BLOCK_SIZE, _NUM_WARPS = 1024, 4
_DTYPES = (torch.float32, torch.bfloat16)
_NUMBERS = ("lr", "eps", "weight_decay")
_VARIANTS = ("amsgrad", "capturable", "differentiable")
OWN_OPTIONS = {"state_dtype": None, "stochastic_rounding": False, "seed": 0}
"""Options that PyTorch's AdamW does not have, and what they are where groups have none, as in its checkpoints."""
_NAMES_OF_DTYPES = {torch.float32: "float32", torch.bfloat16: "bfloat16"}
_plain_step = inspect.unwrap(torch.optim.AdamW.step)
"""Without what PyTorch wraps around it: hooks of a step run around the whole of ours."""


@backend.Kernel
def _adamw_kernel(
    param_ptr,  # [num_elements], as all but step
    grad_ptr,
    exp_avg_ptr,
    exp_avg_sq_ptr,
    scale_ptr,  # [num_rows, blocks of a row], as the next; None unless moments are codes
    scale_sq_ptr,
    step_ptr,  # [], float32: this step's number, from 1
    rates,  # lr, lr * weight_decay, beta2, 1 - beta1 and 1 - beta2, rounded once, logarithms of both betas, eps
    num_elements,  # with whole blocks in each row, if moments are codes
    row_size,
    seed,
    number,  # of the parameter
    MAXIMIZE: tl.constexpr,
    ROUNDS_PARAM: tl.constexpr,
    ROUNDS_MOMENTS: tl.constexpr,
    HAS_CODES: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
):
    """One program updates BLOCK_SIZE elements; if moments are codes, as rows of BLOCK."""
    lr, decay, beta2, rate1, rate2, log_beta1, log_beta2, eps = rates
    start = tl.program_id(0).to(tl.int64) * BLOCK_SIZE
    if HAS_CODES:
        blocks = start // BLOCK + tl.arange(0, BLOCK_SIZE // BLOCK)
        has_block = blocks < num_elements // BLOCK
        row_blocks = tl.cdiv(row_size, BLOCK)
        columns = (blocks % row_blocks)[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
        offsets = (blocks // row_blocks)[:, None] * row_size + columns
        mask = has_block[:, None] & (columns < row_size)
    else:
        offsets = start + tl.arange(0, BLOCK_SIZE)
        mask = offsets < num_elements
    step = tl.load(step_ptr).to(tl.float64)  # in float32, 1 - beta2**t would keep four digits of the first steps
    correction1 = (1.0 - tl.exp(step * log_beta1)).to(tl.float32)
    correction2 = (1.0 - tl.exp(step * log_beta2)).to(tl.float32)
    param = tl.load(param_ptr + offsets, mask=mask).to(tl.float32)
    grad = tl.load(grad_ptr + offsets, mask=mask).to(tl.float32)
    exp_avg = tl.load(exp_avg_ptr + offsets, mask=mask)
    exp_avg_sq = tl.load(exp_avg_sq_ptr + offsets, mask=mask)
    if HAS_CODES:
        exp_avg = kernel_decode(exp_avg, tl.load(scale_ptr + blocks, mask=has_block), True)
        exp_avg_sq = kernel_decode(exp_avg_sq, tl.load(scale_sq_ptr + blocks, mask=has_block), False)
    exp_avg = exp_avg.to(tl.float32)
    exp_avg_sq = exp_avg_sq.to(tl.float32)
    if MAXIMIZE:
        grad = -grad
    exp_avg = exp_avg + (grad - exp_avg) * rate1
    exp_avg_sq = exp_avg_sq * beta2 + grad * grad * rate2
    # Rounded to nearest: the fast square root takes denormal numbers for zero.
    denominator = tl.sqrt_rn(exp_avg_sq) / tl.sqrt_rn(correction2) + eps
    # Both are subtracted at once: 1 - decay would lose most digits of a small decay.
    param = param - (param * decay + lr / correction1 * exp_avg / denominator)
    if ROUNDS_PARAM or ROUNDS_MOMENTS:
        words = kernel_random_words(start, seed, step, number, BLOCK_SIZE).reshape(param.shape)
    if ROUNDS_PARAM:
        param = kernel_cut(param, words)
    if HAS_CODES:
        exp_avg = tl.where(mask, exp_avg, 0.0)
        exp_avg_sq = tl.where(mask, exp_avg_sq, 0.0)
        scales, scales_sq = kernel_scales(exp_avg), kernel_scales(exp_avg_sq)
        tl.store(scale_ptr + blocks, scales, mask=has_block)
        tl.store(scale_sq_ptr + blocks, scales_sq, mask=has_block)
        exp_avg = kernel_encode(exp_avg, scales, words * 1597334677, True)  # moments.FACTORS
        exp_avg_sq = kernel_encode(exp_avg_sq, scales_sq, words * 741103597, False)
    elif ROUNDS_MOMENTS:
        exp_avg = kernel_cut(exp_avg, words * 1597334677)
        exp_avg_sq = kernel_cut(exp_avg_sq, words * 741103597)
    tl.store(param_ptr + offsets, param.to(param_ptr.dtype.element_ty), mask=mask)
    tl.store(exp_avg_ptr + offsets, exp_avg.to(exp_avg_ptr.dtype.element_ty), mask=mask)
    tl.store(exp_avg_sq_ptr + offsets, exp_avg_sq.to(exp_avg_sq_ptr.dtype.element_ty), mask=mask)


class _Update(NamedTuple):
    """One parameter's part of a step."""

    parameter: Tensor  # as the optimizer has it, like the next
    grad: Tensor
    tensors: tuple[Tensor, ...]  # this rank's part of both and of both moments, of one shape
    step: Tensor  # [], float32: this step's number, from 1
    options: dict[str, Any]  # of its group
    scales: tuple[Tensor, ...] | None = None  # of moments that are codes
    number: int = 0  # of the parameter
    can_launch: bool | None = None  # whether a kernel can do it, None where nobody has looked

    def run(self) -> None:
        """Updates the parameter and both moments in place."""
        if self.tensors[0].numel():
            if _can_launch(self.tensors) if self.can_launch is None else self.can_launch:
                self._launch()
            else:
                self._run_reference()
        increment_version(self.parameter)  # a graph that saved the parameter is out of date

    def _rounds(self) -> tuple[bool, bool]:
        """Whether the parameter and both moments are rounded stochastically."""
        param, _, exp_avg, _ = self.tensors
        rounds_param = self.options["stochastic_rounding"] and param.dtype == torch.bfloat16
        return rounds_param, self.options["state_dtype"] is not None and exp_avg.dtype != torch.float32

    def _launch(self) -> None:
        (beta1, beta2), lr = self.options["betas"], self.options["lr"]
        decay, logarithms = lr * self.options["weight_decay"], (_log(beta1), _log(beta2))
        param, grad, exp_avg, exp_avg_sq = self.tensors
        rounds_param, rounds_moments = self._rounds()
        scale, scale_sq = self.scales or (None, None)
        num_elements = param.numel() if scale is None else scale.numel() * moments.BLOCK
        _adamw_kernel.launch(
            triton.cdiv(num_elements, _BLOCK_SIZE),
            num_warps=_NUM_WARPS,
            param_ptr=param,
            grad_ptr=grad,
            exp_avg_ptr=exp_avg,
            exp_avg_sq_ptr=exp_avg_sq,
            scale_ptr=scale,
            scale_sq_ptr=scale_sq,
            step_ptr=self.step,
            rates=(lr, decay, beta2, 1.0 - beta1, 1.0 - beta2, *logarithms, self.options["eps"]),
            num_elements=num_elements,
            row_size=param.shape[-1] if param.dim() else 1,
            seed=self.options["seed"],
            number=self.number,
            MAXIMIZE=self.options["maximize"],
            ROUNDS_PARAM=rounds_param,
            ROUNDS_MOMENTS=rounds_moments,
            HAS_CODES=scale is not None,
            BLOCK=moments.BLOCK,
            BLOCK_SIZE=_BLOCK_SIZE,
        )

    def _run_reference(self) -> None:
        """The kernel's update in PyTorch."""
        (beta1, beta2), lr = self.options["betas"], self.options["lr"]
        dtype = torch.promote_types(self.tensors[0].dtype, torch.float32)
        param, grad = (each.to(dtype) for each in self.tensors[:2])
        exp_avg, exp_avg_sq = stored = self.tensors[2:]
        if self.scales is not None:
            exp_avg, exp_avg_sq = map(moments.decode, stored, self.scales, (True, False))
        exp_avg, exp_avg_sq = exp_avg.to(dtype), exp_avg_sq.to(dtype)
        grad = -grad if self.options["maximize"] else grad
        exp_avg = exp_avg + (grad - exp_avg) * (1.0 - beta1)
        exp_avg_sq = exp_avg_sq * beta2 + grad * grad * (1.0 - beta2)
        step = self.step.double()
        correction1, correction2 = ((1.0 - torch.exp(step * _log(beta))).to(dtype) for beta in (beta1, beta2))
        denominator = exp_avg_sq.sqrt() / correction2.sqrt() + self.options["eps"]
        rate = torch.full_like(correction1, lr) / correction1  # a number would be multiplied by a reciprocal
        param = param - (param * (lr * self.options["weight_decay"]) + rate * exp_avg / denominator)
        rounds_param, rounds_moments = self._rounds()
        if rounds_param or rounds_moments:
            is_padded = self.scales is not None
            words = moments.random_words(param.shape, is_padded, self.options["seed"], self.step, self.number)
        self.tensors[0].copy_(moments.cut(param, words) if rounds_param else param)
        for index, value in enumerate((exp_avg, exp_avg_sq)):
            if rounds_moments:
                own = words * moments.FACTORS[index] & moments.WORD
            if self.scales is not None:
                value, scales = moments.encode(value, index == 0, own)
                self.scales[index].copy_(scales)
            elif rounds_moments:
                value = moments.cut(value, own)
            stored[index].copy_(value)


class AdamW(torch.optim.AdamW):
    """:class:`torch.optim.AdamW` at memory bandwidth, whose moments may take less memory.

    Our kernels update parameters of 8 Mi elements or more (of this rank's shard) that are contiguous, on a GPU, in
    float32 or bfloat16, with gradients and states alike. PyTorch updates all others, in its fused kernel if all
    parameters of a group are floating-point and on GPUs, and all of a group whose options are tensors. States are those
    of :class:`torch.optim.AdamW`, so each loads the other's checkpoints. There is no ``amsgrad``, ``foreach``,
    ``fused``, ``capturable`` and ``differentiable``; groups may have them, and are then left to PyTorch or to its
    choice of an implementation.

    With ``state_dtype`` or ``stochastic_rounding`` the kernels update parameters of any size, and PyTorch operations
    those that are not contiguous, not on a GPU, or in float16 or float64. Such groups take neither tensors as options
    nor ``amsgrad``, ``capturable`` and ``differentiable``. Random numbers depend on ``seed``, the step, the position
    of the parameter and of the element: a resumed training goes on bit for bit. States that were saved with another
    ``state_dtype`` are converted.

    Args:
        params: Parameters, or groups of them, which may have options of their own.
        lr: Learning rate, a number or a tensor.
        betas: Averaging factors of the gradient and its square.
        eps: Added to the denominator.
        weight_decay: Decoupled decay, multiplied by the learning rate.
        maximize: Whether to go up the gradient.
        state_dtype: Of both moments: None for the parameter's; ``torch.float32``; ``torch.bfloat16``, rounded
            stochastically; the name of one of these, which groups have; ``"8bit"``, in codes with a scale for each
            block of 256 numbers along the last dimension, rounded stochastically. Moments of vectors, of rows of fewer
            than 256 numbers and of parameters of fewer than 4096 are then float32. States of codes are
            ``exp_avg_codes`` and ``exp_avg_sq_codes``, uint8 of the parameter's shape, and ``exp_avg_scales`` and
            ``exp_avg_sq_scales``, float32 ``[..., blocks of a row]``; they are sharded as the parameter. Under FSDP1,
            ``state_dict`` makes float32 moments of them.
        stochastic_rounding: Whether bfloat16 parameters are rounded stochastically; steps below half their last digit
            are lost otherwise.
        seed: Of the random numbers.

    Raises:
        TypeError: For an argument of a wrong type, and a sparse gradient with ``state_dtype``.
        ValueError: For a number out of range; if ``state_dtype="8bit"`` meets rows that are sharded in other than whole
            blocks; for a group whose options ``state_dtype`` or ``stochastic_rounding`` does not go with.
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
        state_dtype: torch.dtype | Literal["float32", "bfloat16", "8bit"] | None = None,
        stochastic_rounding: bool = False,
        seed: int = 0,
    ) -> None:
        if not isinstance(betas, list | tuple) or len(betas) != 2:
            raise wrong_type("betas", "a pair of numbers", betas)
        for name, value, below in (("lr", lr, None), ("betas[0]", betas[0], 1.0), ("betas[1]", betas[1], 1.0)):
            if not isinstance(value, Tensor):
                check_number(name, value, at_least=0.0, below=below)
        check_number("eps", eps, at_least=0.0)
        check_number("weight_decay", weight_decay, at_least=0.0)
        check_bool("maximize", maximize)
        own = dict(zip(OWN_OPTIONS, (state_dtype, stochastic_rounding, seed), strict=True))
        _check_own(own | {"params": []})
        first, second = (beta if isinstance(beta, Tensor) else float(beta) for beta in betas)
        super().__init__(params, lr, (first, second), eps, weight_decay, maximize=maximize)
        if own != OWN_OPTIONS:
            self.defaults |= own
            for group in self.param_groups:
                group |= own | group
                _check_own(group)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds a group of parameters, as PyTorch's optimizers do."""
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        is_open = group["fused"] is None and group["foreach"] is None and not group["differentiable"]
        if is_open and group["params"] and all(each.is_cuda and each.is_floating_point() for each in group["params"]):
            group["fused"] = True
        _check_own(group)

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

    def state_dict(self) -> dict[str, Any]:
        """PyTorch's state dict; FSDP1, which knows no scales, gets moments in float32 for codes."""
        state_dict = super().state_dict()
        states = state_dict["state"]
        for number, parameter in enumerate(chain.from_iterable(group["params"] for group in self.param_groups)):
            if number in states and moments.is_flat(parameter):
                states[number] = moments.relaid(states[number], to_codes=False)
        return state_dict

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads states, also those of another ``state_dtype``, which this optimizer keeps, as ``stochastic_rounding``.

        States are not copied if they are of the right dtype and on the right device.
        """
        own = [{name: group[name] for name in OWN_OPTIONS if name in group} for group in self.param_groups]
        states = {
            number: {name: value for name, value in state.items() if name not in moments.STORED}
            for number, state in state_dict["state"].items()
        }  # PyTorch would cast moments to the parameter's dtype
        super().load_state_dict({**state_dict, "state": states})
        for group, saved, options in zip(self.param_groups, state_dict["param_groups"], own, strict=True):
            for name in OWN_OPTIONS:
                group.pop(name, None)
            group |= options | ({"seed": saved["seed"]} if options and "seed" in saved else {})
            for number, parameter in zip(saved["params"], group["params"], strict=True):
                state = state_dict["state"].get(number, {})
                if not moments.STORED.isdisjoint(state):
                    dtype = moments.dtype_of(parameter, group.get("state_dtype"))
                    for name in NAMES:
                        self.state[parameter] |= moments.converted(state, name, parameter, dtype)

    def _find_updates(self) -> list[_Update]:
        """The parameters that our kernels update."""
        scaled = getattr(self, "grad_scale", None) is not None or getattr(self, "found_inf", None) is not None
        is_left_out = scaled or torch.compiler.is_compiling()
        updates, first = [], 0
        for group in self.param_groups:
            options = None if is_left_out else _options_of(group)
            for number, parameter in enumerate(group["params"], first):
                if parameter.grad is None:
                    continue
                if _is_own(parameter, group):
                    if options is None:
                        raise _unfit(group)
                    updates.append(self._own_update_of(parameter, options, number))
                elif options is not None and (update := self._update_of(parameter, options)):
                    updates.append(update)
            first += len(group["params"])
        return updates

    def _own_update_of(self, parameter: Tensor, options: dict[str, Any], number: int) -> _Update:
        """How ``parameter`` is updated by us in any case; makes its states if there are none."""
        grad, state = parameter.grad, self.state[parameter]
        assert grad is not None
        if grad.layout != torch.strided:
            raise wrong_type("gradients", "dense with state_dtype or stochastic_rounding", grad)
        if not state:
            state["step"] = 0.0
            for name in NAMES:
                state |= moments.zeros(parameter, name, moments.dtype_of(parameter, options["state_dtype"]))
        state["step"] = step = torch.as_tensor(state["step"], dtype=torch.float32, device=parameter.device)
        spread = grad
        if isinstance(parameter, DTensor) and isinstance(grad, DTensor):
            spread = grad.redistribute(parameter.device_mesh, parameter.placements)
        codes, scales = zip(*map(moments.names_of, NAMES), strict=True)
        has_codes = moments.has_codes(state)
        stored = (state[name] for name in (codes if has_codes else NAMES))
        tensors = tuple(map(moments.local, (parameter, spread, *stored)))
        own_scales = tuple(moments.local(state[name]) for name in scales) if has_codes else None
        return _Update(parameter, grad, tensors, step, options, own_scales, number)

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
        if len(kinds) > 1 or first.numel() < _MIN_ELEMENTS or not _can_launch(tensors):
            return None
        # An optimizer that is not fused, which the state may come from, counts on the CPU.
        state["step"] = step = state["step"].to(first.device, torch.float32)
        return _Update(parameter, grad, tensors, step, options, can_launch=True)


def _options_of(group: dict[str, Any]) -> dict[str, Any] | None:
    """The options of a group for our kernels, None if they do not have them."""
    numbers = {name: group[name] for name in _NUMBERS}
    has_tensors = any(isinstance(value, Tensor) for value in (*numbers.values(), *group["betas"]))
    if has_tensors or any(group[name] for name in _VARIANTS) or not group["decoupled_weight_decay"]:
        return None
    options: dict[str, Any] = {name: float(value) for name, value in numbers.items()}
    options |= {"betas": tuple(map(float, group["betas"])), "maximize": bool(group["maximize"])}
    return options | {name: group.get(name, default) for name, default in OWN_OPTIONS.items()}


def _is_own(parameter: Tensor, group: dict[str, Any]) -> bool:
    """Whether PyTorch cannot update a parameter: it is rounded stochastically, or its moments are not as it is."""
    state_dtype = group.get("state_dtype")
    if state_dtype == "bfloat16" or (group.get("stochastic_rounding") and parameter.dtype == torch.bfloat16):
        return True
    return moments.dtype_of(parameter, state_dtype) != parameter.dtype


def _check_own(group: dict[str, Any]) -> None:
    """Raises unless the options that PyTorch does not have are right for a group's parameters; names its dtype."""
    options = OWN_OPTIONS | group
    check_choice("state_dtype", options["state_dtype"], (*moments.STATE_DTYPES, *_NAMES_OF_DTYPES))
    if options["state_dtype"] in _NAMES_OF_DTYPES:
        group["state_dtype"] = _NAMES_OF_DTYPES[options["state_dtype"]]
    check_bool("stochastic_rounding", options["stochastic_rounding"])
    check_integer("seed", options["seed"], at_least=0)
    for parameter in group["params"]:
        if _is_own(parameter, group):
            if not parameter.is_floating_point():
                raise wrong_type("params", "floating-point with state_dtype", parameter)
            if _options_of(group) is None:
                raise _unfit(group)


def _unfit(group: dict[str, Any]) -> ValueError:
    expected = "numbers, without amsgrad, capturable, differentiable, scaled gradients and torch.compile"
    given = {name: group[name] for name in ("betas", *_NUMBERS, *_VARIANTS, "decoupled_weight_decay")}
    return wrong_value("options of a group with state_dtype or stochastic_rounding", expected, given)


def _can_launch(tensors: tuple[Tensor, ...]) -> bool:
    """Whether a kernel of ours can update the first of these tensors."""
    first = tensors[0]
    return (
        first.dtype in _DTYPES
        and backend.use_triton(first)
        and backend.runs_directly(*tensors)
        and all(each.is_contiguous() and not each.is_neg() for each in tensors)
    )


def _log(beta: float) -> float:
    return math.log(beta) if beta else -math.inf


def _parts(tensors: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """This rank's parts of DTensors that are spread alike; other tensors as they are."""
    spread = [(each.device_mesh, each.placements) if isinstance(each, DTensor) else None for each in tensors]
    if spread[0] is None or len(set(spread)) > 1 or any(placement.is_partial() for placement in spread[0][1]):
        return tensors
    local = (each.to_local() for each in tensors if isinstance(each, DTensor))
    # What FSDP2 gathers in float8 is of a class of its own, over plain memory.
    return tuple(each.plain() if hasattr(each, "plain") else each for each in local)
