"""Weights in float8: quantized for a product, or held so, as frozen weights and what FSDP2 gathers are."""

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.distributed.tensor import DTensor

from liger_ops import backend
from liger_ops.fp8.rows import E4M3, quantize_rows
from liger_ops.fp8.transpose import transpose

_COPIES = {
    torch.ops.aten.alias.default,
    torch.ops.aten.clone.default,
    torch.ops.aten.detach.default,
    torch.ops.aten._to_copy.default,
}


class Float8Weight(Tensor):
    """A weight ``[out_features, in_features]`` of a floating-point dtype that is a payload and a scale for each row.

    Operations other than copies and float8 products compute with its values in that dtype, which are exact in bfloat16
    and float32: payloads have 4 bits, scales are powers of two.
    """

    payload: Tensor
    scale: Tensor
    is_held = False
    """Whether this is what memory holds of a frozen parameter."""

    @staticmethod
    def __new__(cls, payload: Tensor, scale: Tensor, dtype: torch.dtype = torch.bfloat16) -> "Float8Weight":
        weight: Float8Weight = Tensor._make_wrapper_subclass(cls, payload.shape, dtype=dtype, device=payload.device)
        weight.payload, weight.scale = payload, scale
        return weight

    @classmethod
    def of(cls, weight: Tensor) -> "Float8Weight":
        """Quantizes a weight."""
        return cls(*quantize_rows(weight.detach()), weight.dtype)

    def dequantize(self) -> Tensor:
        """Its values, in its dtype."""
        return (self.payload.float() * self.scale[:, None]).to(self.dtype)

    @property
    def parts(self) -> list[Tensor]:
        """What is in memory."""
        return [self.payload, self.scale]

    def share_memory_(self) -> "Float8Weight":
        """Moves what is in memory to memory that processes share."""
        for each in self.parts:
            each.share_memory_()
        return self

    def __repr__(self) -> str:  # type: ignore[override]  # Tensor's has an argument
        return f"Float8Weight({tuple(self.shape)}, dtype={self.dtype}, device={self.device})"

    def __tensor_flatten__(self) -> tuple[list[str], torch.dtype]:
        return ["payload", "scale"], self.dtype

    @staticmethod
    def __tensor_unflatten__(parts: dict[str, Tensor], dtype: torch.dtype, *sizes: Any) -> "Float8Weight":
        return Float8Weight(parts["payload"], parts["scale"], dtype)

    @property
    def data(self) -> Tensor:
        """The same memory, apart from autograd. Assigning another such weight exchanges payload and scales."""
        data: Tensor = Tensor.data.__get__(self)  # type: ignore[attr-defined]
        return data

    @data.setter
    def data(self, other: Tensor) -> None:
        if not isinstance(other, Float8Weight):
            raise unwritable("data.__set__")
        self.payload, self.scale = other.parts

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch's stubs lack the class
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is torch.ops.aten.as_strided.default and isinstance(weight := args[0], cls):
            is_whole = (tuple(args[1]), tuple(args[2])) == (weight.shape, weight.stride())
            func, args, kwargs = (torch.ops.aten.alias.default, args[:1], {}) if is_whole else (func, args, kwargs)
        if func in _COPIES and isinstance(args[0], cls):
            weight = args[0]
            if func is torch.ops.aten._to_copy.default:
                device = kwargs.get("device")
                parts = [each.to(device or each.device, copy=True) for each in (weight.payload, weight.scale)]
            else:
                parts = [func(each) for each in weight.parts]
            copy = Float8Weight(parts[0], parts[1], kwargs.get("dtype") or weight.dtype)
            copy.is_held = weight.is_held
            return copy
        if func._schema.is_mutable and any(isinstance(each, cls) for each in _written(func, args, kwargs)):
            if func is not torch.ops.aten.copy_.default or args[0].requires_grad:
                raise unwritable(func)
            values = args[1] if args[1].shape == args[0].shape else args[1].expand(args[0].shape).contiguous()
            args[0].payload.copy_((found := cls.of(values)).payload)
            args[0].scale.copy_(found.scale)
            return args[0]
        args, kwargs = torch.utils._pytree.tree_map_only(Float8Weight, Float8Weight.dequantize, (args, kwargs))
        result = func(*args, **kwargs)
        return result if backend.is_traced() else _View.of(func, result)


class _View(Tensor):
    """A part of a weight that is held in float8, or all of it: values of its own, to which writes would be lost."""

    @staticmethod
    def __new__(cls, tensor: Tensor) -> "_View":
        view: _View = Tensor._make_subclass(cls, tensor)
        return view

    @classmethod
    def of(cls, func: Any, result: Any) -> Any:
        """What ``func`` returned, of this class if it is a view."""
        is_view = any(each.alias_info is not None and not each.alias_info.is_write for each in func._schema.returns)
        return torch.utils._pytree.tree_map_only(Tensor, cls, result) if is_view else result

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch's stubs lack the class
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func._schema.is_mutable and any(isinstance(each, cls) for each in _written(func, args, kwargs)):
            raise unwritable(func)
        args, kwargs = torch.utils._pytree.tree_map_only(Float8Weight, Float8Weight.dequantize, (args, kwargs))
        with torch._C._DisableTorchDispatch():
            result = func(*args, **kwargs)
        return cls.of(func, result)


def unwritable(operation: Any) -> RuntimeError:
    """Not a TypeError: Python takes that of an operator such as += for an operation that is not in place."""
    return RuntimeError(
        f"{operation} would write to a weight that is held in float8, which only copy_ may while it is frozen: to train"
        " it or to merge adapters into it, call undo() of the report of kernels first (trainer.strategy.patch_report),"
        " or set hold_frozen=False in the Float8Recipe"
    )


def _written(func: Any, args: Any, kwargs: Any) -> list[Any]:
    """What an operation writes to, also in lists, as those of optimizers."""
    arguments = func._schema.arguments
    values = {each.name: value for each, value in zip(arguments, args, strict=False)} | kwargs
    names = [each.name for each in arguments if each.alias_info is not None and each.alias_info.is_write]
    leaves: list[Any] = torch.utils._pytree.tree_leaves([values.get(name) for name in names])
    return leaves


def plain(weight: Tensor) -> Tensor:
    """A weight as checkpoints hold it: without these classes, over the same memory if it has its values there."""
    if isinstance(weight, Float8Weight):
        return weight.dequantize()
    if isinstance(weight, DTensor) and isinstance(local := weight.to_local(), Float8Shard):
        mesh, placements, shape, stride = weight.device_mesh, weight.placements, weight.shape, weight.stride()
        return DTensor.from_local(local.plain(), mesh, placements, run_check=False, shape=shape, stride=stride)
    return weight.plain() if isinstance(weight, Float8Shard) else weight


def quantize_weights(weights: Sequence[Tensor], *, together: bool = False) -> tuple[list[Tensor], Tensor]:
    """The payloads ``[N_i, K]`` of weights, or, if asked for, of all ``together``, and the scales of all, ``[N]``.

    Those of weights that are held in float8 stay where they are, unless they are joined.
    """
    sizes = [weight.shape[0] for weight in weights]
    device = weights[0].device
    scale = torch.empty(sum(sizes), dtype=torch.float32, device=device)
    quantized = [each for each in weights if not isinstance(each, Float8Weight)]
    num_rows = sum(each.shape[0] for each in quantized)
    memory = torch.empty((num_rows, weights[0].shape[1]), dtype=E4M3, device=device)
    rest = iter(memory.split([each.shape[0] for each in quantized]))
    payloads = []
    for weight, scales in zip(weights, scale.split(sizes), strict=True):
        if isinstance(weight, Float8Weight):
            payloads.append(weight.payload)
            scales.copy_(weight.scale)
        else:
            payloads.append(quantize_rows(weight, payload=next(rest), scale=scales)[0])
    if together and len(payloads) > 1:
        is_one = len(quantized) == len(weights)
        payloads = [memory if is_one else torch.cat([each.view(torch.uint8) for each in payloads]).view(E4M3)]
    return payloads, scale


@backend.Kernel
def _channel_scale_kernel(
    scale_ptr,  # [num_channels]
    target_ptr,  # [num_channels]
    num_channels,
    BLOCK_SIZE: tl.constexpr,
):
    """Each program finds the largest scale of all, and writes a block."""
    block = tl.arange(0, BLOCK_SIZE)
    largest = tl.full([BLOCK_SIZE], 9.313225746154785e-10, tl.float32)
    for start in range(0, num_channels, BLOCK_SIZE):
        scale = tl.load(scale_ptr + start + block, mask=start + block < num_channels, other=0.0)
        largest = tl.where(scale > largest, scale, largest)
    least = tl.max(largest) * 0.0009765625
    channels = tl.program_id(0) * BLOCK_SIZE + block
    scale = tl.load(scale_ptr + channels, mask=channels < num_channels, other=0.0)
    tl.store(target_ptr + channels, tl.where(scale < least, least, scale), mask=channels < num_channels)


@backend.register_op("fp8_channel_scales", fake=lambda scale: scale.bfloat16())
def _channel_scales(scale: Tensor) -> Tensor:
    target = torch.empty_like(scale, dtype=torch.bfloat16)
    _channel_scale_kernel.launch(
        triton.cdiv(scale.shape[0], 4096),
        scale_ptr=scale,
        target_ptr=target,
        num_channels=scale.shape[0],
        BLOCK_SIZE=4096,
        num_warps=8,
    )
    return target


def channel_scales(scale: Tensor) -> Tensor:
    """What backward multiplies the channels of a gradient by, and divides the rows of weights by: ``[N]``, in bfloat16.

    These are the ``scale`` of weights, except that none is less than 2**-10 of the largest, or of 2**-30: gradients of
    all channels share a scale per token, in which those of rows that are zeros, or nearly, would otherwise be lost.
    """
    if backend.use_triton(scale):
        result: Tensor = _channel_scales(scale)
        return result
    largest = scale.nan_to_num(0.0).amax().clamp(min=2.0**-30)
    return scale.clamp(min=largest * 2.0**-10).bfloat16()


def transpose_weights(weights: Sequence[Tensor], scale: Tensor) -> Tensor:
    """All payloads transposed, ``[K, N]``, made anew with the scales that :func:`channel_scales` gave."""
    sizes = [weight.shape[0] for weight in weights]
    target = scale.new_empty((weights[0].shape[1], sum(sizes)), dtype=E4M3)
    for weight, columns, scales in zip(weights, target.split(sizes, dim=1), scale.split(sizes), strict=True):
        if isinstance(weight, Float8Weight):
            transpose(weight.payload, weight.scale / scales, target=columns)
        else:
            transpose(weight, scales, inverse=True, target=columns)
    return target


_KEPT = {
    getattr(torch.ops.aten, name).default
    for name in ("alias", "as_strided", "clone", "detach", "new_empty", "new_zeros", "view", "_to_copy")
} | {torch.ops.aten.slice.Tensor, torch.ops.aten.split.Tensor, torch.ops.aten.empty_like.default}


class Float8Shard(Tensor):
    """A parameter that FSDP2 shards and gathers in float8, half the bytes of bfloat16; a plain tensor otherwise.

    What is computed of it is a plain tensor too, but for parts and copies, of which FSDP2 makes the shards.
    """

    @staticmethod
    def __new__(cls, tensor: Tensor) -> "Float8Shard":
        shard: Float8Shard = Tensor._make_subclass(cls, tensor)
        return shard

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch's stubs lack the class
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        with torch._C._DisableTorchDispatch():
            result = func(*args, **(kwargs or {}))
        if func not in _KEPT or not isinstance(args[0], cls):
            return result
        return torch.utils._pytree.tree_map_only(Tensor, cls, result)

    def plain(self) -> Tensor:
        """The same memory as a plain tensor."""
        with torch.no_grad(), torch._C._DisableTorchDispatch():
            tensor: Tensor = torch.ops.aten.alias.default(self)
        return tensor

    def fsdp_pre_all_gather(
        self, mesh: Any, outer_size: Any, outer_stride: Any, module: Any, mp_policy: Any
    ) -> tuple[tuple[Tensor, Tensor], None]:
        """The shard's payload and scales, as tensors of the dtype in which FSDP2 gathers other parameters.

        FSDP2 copies tensors of several dtypes byte by byte.
        """
        dtype = mp_policy.param_dtype or self.dtype
        payload, scale = quantize_rows(self.plain())
        return (payload.view(dtype), scale.view(dtype)), None

    def fsdp_post_all_gather(
        self, gathered: tuple[Tensor, ...], metadata: None, dtype: torch.dtype, *, out: Tensor | None = None
    ) -> Any:
        """The whole weight over the memory that FSDP2 gathered into."""
        if out is not None:  # which lies over the same memory
            return None
        payload, scale = gathered
        return Float8Weight(payload.view(E4M3), scale.view(torch.float32), dtype), ()
