"""Shared by all ops: the choice between Triton and PyTorch, launches of kernels, and registration of ops.

Host time counts as much as kernel time: Triton's own launch binds and specializes every argument anew (about 25 us) and
a call through the dispatcher costs 20 us. ``Kernel`` caches compiled kernels under a short key, and an op goes through
the dispatcher only when a tracer must see it: the compiler, or a dispatch mode such as selective checkpointing's.
"""

import contextlib
import functools
import inspect
import sys
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from liger_ops.arguments import check_same_device

_TRITON_DTYPES = frozenset((torch.float32, torch.bfloat16, torch.float16))
_LIBRARY = torch.library.Library("liger_ops", "DEF")
# Tensor subclasses may hold no data (fake tensors) or data that is not there yet (results of collectives).
_PLAIN_ARGUMENTS = frozenset((Tensor, torch.nn.Parameter, type(None), bool, int, float, str, list, tuple, torch.dtype))


def use_triton(tensor: Tensor) -> bool:
    """Whether ops on ``tensor`` launch Triton kernels; otherwise they run the PyTorch reference.

    A meta tensor stands for one on a GPU: the same ops run, and allocate the same. Where a GPU could not run them, or
    never has, the reference runs, after a warning: on AMD's GPUs, which PyTorch calls CUDA devices too, and in bfloat16
    below compute capability 8.0.
    """
    if not tensor.is_cuda:
        return tensor.is_meta and tensor.dtype in _TRITON_DTYPES and torch.version.hip is None
    return tensor.dtype in _TRITON_DTYPES and _has_kernels(tensor.get_device(), tensor.dtype == torch.bfloat16)


@torch.compiler.assume_constant_result  # neither a query of the device nor a warning can be traced
def _has_kernels(device_index: int, in_bfloat16: bool) -> bool:
    """Whether a GPU runs our kernels; warns, once, if it does not."""
    return _find_kernels(device_index, in_bfloat16)


@functools.lru_cache(maxsize=64)
def _find_kernels(device_index: int, in_bfloat16: bool) -> bool:
    if torch.version.hip is not None:
        reason = "on AMD GPUs ops run as plain PyTorch: their Triton kernels were never tried there"
    elif in_bfloat16 and torch.cuda.get_device_capability(device_index) < (8, 0):
        name = torch.cuda.get_device_name(device_index)
        reason = f"on {name} ops in bfloat16 run as plain PyTorch: their Triton kernels need compute capability 8.0"
    else:
        return True
    warnings.warn(reason, stacklevel=4)
    return False


def runs_on_triton(tensor: Tensor, *others: Tensor | None) -> bool:
    """Whether an op on these tensors launches kernels: ``tensor`` decides, and none may be float64."""
    for each in (tensor, *others):  # a loop, which is faster than a generator
        if each is not None and each.dtype == torch.float64:
            return False
    return use_triton(tensor)


def wide(tensor: Tensor) -> Tensor:
    """In float32, or in its dtype if that is wider."""
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))


def next_power_of_2(size: int) -> int:
    """The least power of two that is at least ``size``, 0 of 0. Triton's own takes microseconds."""
    return 1 << (size - 1).bit_length() if size else 0


@dataclass(frozen=True)
class Hardware:
    """What choices of launch parameters know about a device."""

    multiprocessors: int
    threads: int  # of a multiprocessor, at most
    shared_bytes: int  # of a program, at most
    cache_bytes: int  # L2

    @property
    def warps(self) -> int:
        """Warps that run on a multiprocessor at once."""
        return self.threads // 32

    @property
    def ahead_bytes(self) -> int:
        """Shared memory that loads ahead of their use may fill; 16 KB are left for reductions."""
        return self.shared_bytes - 16 * 1024


@functools.cache
def hardware(device: torch.device) -> Hardware:
    """Of a device."""
    if device.type != "cuda":  # only Triton's interpreter gets here; two programs are the fewest that share the work
        return Hardware(multiprocessors=2, threads=2048, shared_bytes=96 * 1024, cache_bytes=50 * 2**20)
    found: Any = torch.cuda.get_device_properties(device)  # not all is in torch's stubs
    return Hardware(
        multiprocessors=found.multi_processor_count,
        threads=found.max_threads_per_multi_processor,
        shared_bytes=found.shared_memory_per_block_optin,
        cache_bytes=found.L2_cache_size,
    )


launch_cache = functools.lru_cache(maxsize=1024)
"""Decorates a choice of launch parameters; bounded because shapes may change with the data. Numbers of rows do so in
every step and are no argument: a choice says how many programs there are at most."""


@dataclass(frozen=True)
class RowLaunch:
    """Tile of rows and columns that a program holds, how many programs share the rows, how far ahead each loads."""

    block_size: int
    num_warps: int
    max_programs: int | None = None  # None: one per tile; in backward of rows in blocks, for each block of columns
    num_stages: int = 1
    block_rows: int = 1
    reload_weight: bool = False  # load weight and bias when a tile needs them instead of keeping them in registers

    def num_programs(self, num_rows: int) -> int:
        """How many programs share ``num_rows`` rows."""
        num_tiles = -(-num_rows // self.block_rows)
        return num_tiles if self.max_programs is None else min(num_tiles, self.max_programs)

    def run(self, kernel: "Kernel", num_programs: int, tensors: dict[str, Tensor], **arguments: Any) -> None:
        """Launches a kernel on all rows of ``tensors`` ``[*, num_columns]``, which may lie apart in memory."""
        for name, tensor in tensors.items():
            rows = as_rows(tensor, tensor.shape[-1])
            arguments |= {f"{name}_ptr": rows, f"{name}_row_stride": rows.stride(0)}
        kernel.launch(
            num_programs,
            num_rows=rows.shape[0],
            num_columns=rows.shape[1],
            BLOCK_ROWS=self.block_rows,
            BLOCK_SIZE=self.block_size,
            num_warps=self.num_warps,
            **arguments,
        )


@launch_cache
def choose_row_tiles(num_columns: int) -> RowLaunch:
    """Tiles of 2048 elements or one longer row, which loops load ahead if those of two tensors take at most 64 KB."""
    block_size = next_power_of_2(num_columns)
    tile_size = max(2048, block_size)
    num_stages = 2 if tile_size <= 8192 else 1
    return RowLaunch(block_size, min(32, tile_size // 512), None, num_stages, tile_size // block_size)


def has_autocast(device_type: str) -> bool:
    """Whether a kind of devices has autocast; PyTorch's own function cannot be traced before 2.13."""
    return device_type != "meta"


def autocast_dtype(device_type: str) -> torch.dtype | None:
    """The dtype of autocast on a kind of devices, None where it is disabled."""
    if has_autocast(device_type) and torch.is_autocast_enabled(device_type):
        return torch.get_autocast_dtype(device_type)
    return None


def without_autocast(device_type: str) -> contextlib.AbstractContextManager[Any]:
    """A context in which autocast is disabled on a kind of devices."""
    return torch.autocast(device_type, enabled=False) if has_autocast(device_type) else contextlib.nullcontext()


def needs_graph(*tensors: Tensor | None) -> bool:
    """Whether autograd must record an op on ``tensors``; a call without autograd is cheaper."""
    if torch.is_grad_enabled():
        for tensor in tensors:  # a loop, which is faster than a generator
            if tensor is not None and tensor.requires_grad:
                return True
    return False


def is_traced() -> bool:
    """Whether a tracer must see the operators that run: the compiler, or a dispatch mode."""
    return torch.compiler.is_compiling() or torch._C._len_torch_dispatch_stack() > 0


def runs_directly(*arguments: Any) -> bool:
    """Whether an op with these arguments runs now, on their data: nothing traces it, and no tensor is a stand-in."""
    return (
        not is_traced()
        and _PLAIN_ARGUMENTS.issuperset(map(type, arguments))
        and not any(isinstance(argument, Tensor) and argument.is_meta for argument in arguments)
    )


def graph_ends() -> bool:
    """Whether the running backward pass frees its graph, so that buffers that we saved may be overwritten."""
    return not is_traced() and not torch._C._autograd._get_current_graph_task_keep_graph()


def take_saved_tensors(ctx: Any, own: int | None = None) -> tuple[list[Any], bool]:
    """The tensors that a Function saved, or None, and whether its backward may write over all of them.

    With ``own`` over the one of this index, which the Function itself made. It may if backward frees its graph, and
    nothing but the caller refers to them and to memory that PyTorch allocated. Then the Function's own references are
    gone: a second call would raise.
    """
    tensors = list(ctx.saved_tensors)  # once: hooks may make them anew each time
    is_kept = torch.compiler.is_compiling() or torch._C._autograd._get_current_graph_task_keep_graph()
    if is_kept or (is_traced() and not tensors[0].is_meta):  # a dispatch mode may keep what it sees
        return tensors, False
    tensors.append(torch.empty(0))  # referred to as the others would be
    ctx.maybe_clear_saved_tensors()
    candidates = tensors if own is None else [tensors[own], tensors[-1]]
    counts = [None if tensor is None else _count_references(tensor) for tensor in candidates]
    is_free = all(
        tensor is None
        or (count == counts[-1] and _is_dense(tensor) and (own is not None or tensor.grad_fn is not None))  # no leaf
        for tensor, count in zip(candidates[:-1], counts, strict=False)
    )
    return tensors[:-1], is_free


def _is_dense(tensor: Tensor) -> bool:
    """Whether a tensor is plain and dense, in memory of PyTorch's: no view of an array, say."""
    return type(tensor) is Tensor and tensor.is_contiguous() and tensor.untyped_storage().resizable()


def _count_references(tensor: Tensor) -> tuple[int, ...]:
    """How many refer to a tensor and to its memory, each in Python and below it."""
    storage = tensor.untyped_storage()
    num_uses = tensor._use_count()  # type: ignore[attr-defined]  # not in torch's stubs
    storage_counts = sys.getrefcount(storage), torch._C._storage_Use_Count(storage._cdata)
    return sys.getrefcount(tensor), num_uses, *storage_counts


class HostNumber:
    """An integer, or one on a device, ``[]``, that is copied in the background and waited for when it is read."""

    def __init__(self, value: Tensor | int) -> None:
        self._value = value
        self._ready: torch.cuda.Event | None = None
        if isinstance(value, Tensor) and value.is_cuda:
            self._value = torch.empty((), dtype=torch.int64, pin_memory=True).copy_(value, non_blocking=True)
            self._ready = torch.cuda.Event()
            self._ready.record(torch.cuda.current_stream(value.device))  # which may not be the current device's

    def __int__(self) -> int:
        if self._ready is not None:
            self._ready.synchronize()
        return int(self._value)


def as_rows(tensor: Tensor, num_columns: int) -> Tensor:
    """``tensor`` as ``[num_rows, num_columns]`` with unit column stride: a view where possible, else a copy."""
    rows = tensor.reshape(-1, num_columns)
    return rows if rows.stride(1) == 1 else rows.contiguous()


def reshaped(rows: Tensor, shape: Sequence[int]) -> Tensor:
    """New rows as ``[*shape, num_columns]``: to autograd no view, so that outputs of functions may be written to."""
    result: Tensor = torch.ops.aten._unsafe_view.default(rows, [*shape, rows.shape[-1]])
    return result


# Versions of Triton whose ``CompiledKernel.run`` takes its arguments in the order in which they are passed below. They
# are passed by position, so another order would corrupt memory: any other version launches by itself, in 25 us instead
# of 8. To add one, compare ``CudaLauncher.__call__``, ``driver.c`` and the call in ``runtime/jit.py`` with the last.
_KNOWN_LAUNCHERS = {
    "3.6": "3.6.0 ran on H200 GPUs",
    "3.7": "3.7.1 was read: the same order; a launcher in C takes the place of generated ones",
}


_MAX_RECENT = 4096
"""Launches of one kernel that are looked up by their numbers; as these may change in each step, few."""


def _knows_launcher() -> bool:
    """Whether the installed Triton's launcher is one of ``_KNOWN_LAUNCHERS``."""
    return ".".join(triton.__version__.split(".")[:2]) in _KNOWN_LAUNCHERS


class Kernel:
    """A Triton kernel that is launched by ``launch``; made by decorating the kernel with this class.

    Parameters whose names end in ``_ptr``, the first of all among them, take tensors or None, others integers, floats,
    None or tuples of those. ``launch(num_programs, *, num_warps, **arguments)`` runs the kernel on the device of its
    first tensor, and raises a ValueError if another tensor is not on that device:

    Args:
        num_programs: Size of the one-dimensional grid, positive.
        num_warps: Warps per program.
        arguments: One for each of the kernel's parameters.
    """

    def __init__(self, function: Callable[..., None]) -> None:
        self.jit = triton.jit(function)
        self.launch: Callable[..., None] = self._choose_launch
        # One entry for each kernel that Triton compiled, as many as its own cache has.
        self._compiled: dict[tuple[Any, ...], tuple[Any, ...]] = {}
        # The same by the numbers themselves: what Triton specializes on takes longer to tell than to look up.
        self._recent: dict[tuple[Any, ...], tuple[Any, ...]] = {}

    def _choose_launch(self, num_programs: int, *, num_warps: int, **arguments: Any) -> None:
        """The first launch, which chooses how all others are done."""
        is_compiled = isinstance(self.jit, triton.JITFunction)  # or else interpreted
        self.launch = self._write_launch() if is_compiled and _knows_launcher() else self._launch_by_triton
        self.launch(num_programs, num_warps=num_warps, **arguments)

    def _launch_by_triton(self, num_programs: int, *, num_warps: int, **arguments: Any) -> Any:
        """Launches as Triton does, on the device of the first tensor; returns the compiled kernel."""
        first, *others = (name for name in self.jit.arg_names if name.endswith("_ptr"))
        tensor = arguments[first]
        check_same_device(first, tensor, **{name: arguments[name] for name in others})
        with torch.cuda.device(tensor.device) if tensor.is_cuda else contextlib.nullcontext():
            return self.jit[(num_programs,)](**arguments, num_warps=num_warps)

    def _launch_first(self, key: tuple[Any, ...], num_programs: int, num_warps: int, arguments: dict[str, Any]) -> None:
        """Launches by Triton, which compiles if need be, and caches the compiled kernel for the next launch."""
        compiled = self._launch_by_triton(num_programs, num_warps=num_warps, **arguments)
        self._compiled[key] = (compiled.run, compiled.function, compiled.packed_metadata, compiled)

    def _write_launch(self) -> Callable[..., None]:
        """``launch`` for this kernel's parameters, as source code: a loop over them would cost more than the launch."""
        names = [parameter.name for parameter in self.jit.params]
        lines, values, key, recent_key = [], [], ["num_warps"], ["num_warps"]
        for parameter in self.jit.params:
            name = parameter.name
            if parameter.is_constexpr:
                values.append(name)
                key.append(name)
                recent_key.append(name)
            elif name.endswith("_ptr"):
                lines.append(f"{name}_address = None if {name} is None else {name}.data_ptr()")
                values.append(f"{name}_address")
                # With its device, so that a tensor of another one is not found, and raises in ``_launch_by_triton``.
                parts = f"{name}.dtype, {name}.get_device(), {name}_address & 15 == 0"
                key.append(f"None if {name} is None else ({parts})")
                recent_key.append(key[-1])
            else:
                values.append(name)
                key.append(f"specialization({name})")
                recent_key += [name, f"{name}.__class__"]  # 1, 1.0 and True are equal
        lines += [
            f"device = {names[0]}.get_device()",
            f"recent_key = ({', '.join(recent_key)})",
            "found = recent.get(recent_key)",
            "if found is None or device != current_device():",
            f"    key = ({', '.join(key)})",
            "    found = compiled.get(key)",
            "    if found is None or device != current_device():",
            f"        return launch_first(key, num_programs, num_warps, dict({', '.join(f'{n}={n}' for n in names)}))",
            f"    if len(recent) == {_MAX_RECENT}:",
            "        recent.clear()",
            "    recent[recent_key] = found",
            "run, function, metadata, _ = found",
            "stream = current_stream(device)",
            f"run(num_programs, 1, 1, stream, function, metadata, None, None, None, {', '.join(values)})",
        ]
        source = f"def launch(num_programs, *, num_warps, {', '.join(names)}):\n    " + "\n    ".join(lines)
        namespace: dict[str, Any] = {
            "compiled": self._compiled,
            "current_device": torch.cuda.current_device,
            "current_stream": triton.runtime.driver.active.get_current_stream,
            "launch_first": self._launch_first,
            "recent": self._recent,
            "specialization": _specialization,
        }
        exec(source, namespace)
        return namespace["launch"]


def _specialization(value: Any) -> Any:
    """The properties that Triton specializes on: None, float, or an integer: 1, a multiple of 16, over 32 bits."""
    kind = value.__class__
    if kind is int:
        return -1 if value == 1 else (value & 15 == 0) + 2 * (not -2147483648 <= value <= 2147483647)
    if kind is tuple:
        return tuple(map(_specialization, value))
    return kind


def schema_of(fields: type | dict[str, Any]) -> str:
    """The fields of a NamedTuple, or names with their annotations, as arguments in an op's schema."""

    def annotated() -> None: ...

    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    kinds = fields if isinstance(fields, dict) else fields.__annotations__
    parameters = [inspect.Parameter(name, kind, annotation=each) for name, each in kinds.items()]
    annotated.__signature__ = inspect.Signature(parameters, return_annotation=None)  # type: ignore[attr-defined]
    return torch.library.infer_schema(annotated, mutates_args=()).rpartition(") -> ")[0].removeprefix("(")


def register_op(
    schema: str, fake: Callable[..., Any], mutates: Sequence[str] = ()
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Registers the decorated launcher as ``torch.ops.liger_ops.<name of schema>``.

    Args:
        schema: The op's schema without its namespace, ``"name(Tensor x, float eps) -> Tensor"``; of the name alone,
            the rest is made from the launcher's annotations.
        fake: Same signature as the launcher; allocates the outputs without computing them, for the compiler.
        mutates: Arguments that the launcher writes to, if the schema is made from it.

    Returns:
        A function of the launcher's positional arguments, the first a tensor, that runs the op: through the dispatcher
        while compiling, under a dispatch mode, and on tensor subclasses and meta tensors, else directly.
    """

    def register(launcher: Callable[..., Any]) -> Callable[..., Any]:
        name, has_arguments, _ = schema.partition("(")
        _LIBRARY.define(schema if has_arguments else name + torch.library.infer_schema(launcher, mutates_args=mutates))
        _LIBRARY.impl(name, launcher, "CompositeExplicitAutograd")
        torch.library.register_fake(f"liger_ops::{name}", fake, lib=_LIBRARY)
        op = getattr(torch.ops.liger_ops, name).default

        @functools.wraps(launcher)
        def call(*arguments: Any) -> Any:
            if is_traced() or not _PLAIN_ARGUMENTS.issuperset(map(type, arguments)) or arguments[0].is_meta:
                return op(*arguments)
            return launcher(*arguments)

        return call

    return register


@triton.jit
def tanh(x):
    """The hyperbolic tangent in float32, which Triton has on some devices only."""
    # The exponential form cancels near zero, where the series is exact to float32.
    decay = tl.exp(-2.0 * tl.abs(x))
    far = (1.0 - decay) / (1.0 + decay)
    square = x * x
    near = x * (1.0 + square * (-1.0 / 3.0 + square * (2.0 / 15.0 - square * (17.0 / 315.0))))
    return tl.where(tl.abs(x) < 0.2, near, tl.where(x < 0.0, -far, far))


def empty_gradients(tensors: Sequence[Tensor | None], needs: Sequence[bool]) -> list[Tensor]:
    """Memory for the gradients that are needed, contiguous."""
    return [
        torch.empty_like(x, memory_format=torch.contiguous_format)
        for x, needed in zip(tensors, needs, strict=False)
        if needed and x is not None
    ]


def spread(gradients: Sequence[Tensor], needs: Sequence[bool]) -> tuple[Tensor | None, ...]:
    """``gradients`` each in its place, None where none is needed."""
    if len(gradients) == len(needs):
        return tuple(gradients)
    rest = iter(gradients)
    return tuple([next(rest) if needed else None for needed in needs])  # a list, which is faster than a generator


def once_differentiable(backward: Callable[..., Any]) -> Callable[..., Any]:
    """Decorates a ``backward`` that is not differentiable: with ``create_graph=True`` it raises RuntimeError.

    PyTorch's decorator of that name lets the first derivative pass and fails only when it is differentiated, which
    ``autograd.grad`` with respect to given inputs may never do: a gradient penalty would silently lose its gradient.
    """

    @functools.wraps(backward)
    def wrapper(ctx: Any, *grad_outputs: Any) -> Any:
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():
            raise RuntimeError(f"{ctx.name()} has no second derivative: create_graph must be False, got True")
        return backward(ctx, *grad_outputs)

    return wrapper
