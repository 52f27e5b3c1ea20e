"""``python -m benchmarks.compiled [--quick] [--table] [ARCHITECTURE ...]``: compiles all kernels for other GPUs.

No GPU is needed: the ops run on meta tensors, with the launch parameters that they choose for an architecture's limits,
and each launch is compiled for it. Prints a line of JSON for each kernel and architecture: how many variants of it were
compiled, the most shared memory that one takes, and what is wrong; or a table of these. Ends with 1 if anything is.
"""

import argparse
import contextlib
import functools
import json
import math
import sys
from collections import defaultdict
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest import mock

import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import CUDABackend

with mock.patch("torch.library.register_fake"):  # without fakes, ops on meta tensors launch their kernels
    import liger_ops
    from liger_ops import backend, self_check
    from liger_ops.fp8 import gated_mlp, linear
    from liger_ops.loss import chunked_loss, given_classes, scale_gradient
    from liger_ops.optim import adamw, gradients
    from liger_ops.optim.moments import BLOCK

KIB = 1024


class Architecture(NamedTuple):
    """A kind of GPU: what Triton compiles for, and the limits of one GPU of it."""

    target: GPUTarget
    hardware: backend.Hardware
    gpu: str
    has_float8: bool = True
    dtypes: tuple[torch.dtype, ...] = (torch.bfloat16, torch.float32)


def _nvidia(capability: int, gpu: str, *limits: int, **options: Any) -> Architecture:
    return Architecture(GPUTarget("cuda", capability, 32), backend.Hardware(*limits), gpu, **options)


ARCHITECTURES = {
    # First: it has least memory of those with asynchronous copies.
    "sm_86": _nvidia(86, "RTX 3090", 82, 1536, 99 * KIB, 6 * KIB**2, has_float8=False),
    "sm_75": _nvidia(75, "T4", 40, 1024, 64 * KIB, 4 * KIB**2, has_float8=False, dtypes=(torch.float16, torch.float32)),
    "sm_80": _nvidia(80, "A100", 108, 2048, 163 * KIB, 40 * KIB**2, has_float8=False),
    "sm_89": _nvidia(89, "RTX 4090", 128, 1536, 99 * KIB, 72 * KIB**2),
    "sm_90": _nvidia(90, "H100", 132, 2048, 227 * KIB, 50 * KIB**2),
    "sm_100": _nvidia(100, "B200", 148, 2048, 227 * KIB, 126 * KIB**2),
    "sm_120": _nvidia(120, "RTX 5090", 170, 1536, 99 * KIB, 96 * KIB**2),
    "gfx942": Architecture(
        GPUTarget("hip", "gfx942", 64), backend.Hardware(304, 2048, 64 * KIB, 4 * KIB**2), "MI300X", has_float8=False
    ),
}
_CLASSES = (515, 32768, 50257, 128256)
WIDTHS = {
    **dict.fromkeys(("cross_entropy", "token_log_probs", "divergence"), _CLASSES),
    "apply_rotary": (16, 48, 64),
    **{
        name: (64,) for name in self_check.CASES if name.startswith("linear_")
    },  # others have their kernels at all sizes
}
"""Columns of the tensors of ops, small, large and odd."""


class Experts(NamedTuple):
    """Sizes of a layer of experts, and options."""

    tokens: int
    hidden_size: int
    width: int
    experts: int
    top_k: int
    options: dict[str, Any] = {}


EXPERTS = (
    Experts(120, 64, 16, 5, 2),
    Experts(8192, 2048, 768, 128, 8),
    Experts(999, 2880, 2880, 32, 4, {"interleaved": True, "transposed": True}),
    Experts(4096, 4096, 14336, 8, 2, {"activation": "relu_squared"}),
)
FLOAT8 = ((61, 64, 96), (8192, 4096, 14336), (999, 2880, 2880))


def _run_op(name: str, width: int, dtype: torch.dtype) -> None:
    case = self_check.CASES[name]
    made, constants = case.make(self_check.Sizes(width=width))
    leaves = [each.to(dtype).requires_grad_() for each in made]
    others = [each.to(dtype) if each.is_floating_point() else each for each in constants]
    found = case.call(getattr(liger_ops, name), *leaves, *others)
    _differentiate(found if isinstance(found, tuple) else (found,), leaves)


def _differentiate(outputs: tuple[Tensor, ...], leaves: list[Tensor]) -> None:
    torch.autograd.grad(outputs, leaves, [torch.empty_like(each) for each in outputs])


def _experts(sizes: Experts, dtype: torch.dtype) -> None:
    tokens, hidden_size, width, num_experts, top_k, options = sizes
    both = width if options.get("activation") == "relu_squared" else 2 * width
    shapes = [(num_experts, both, hidden_size), (num_experts, hidden_size, width)]
    gate_up, down = (torch.empty(a, c, b) if "transposed" in options else torch.empty(a, b, c) for a, b, c in shapes)
    biases = [torch.empty(num_experts, both), torch.empty(num_experts, hidden_size)] if "transposed" in options else []
    made = [torch.empty(tokens, hidden_size), gate_up, down, torch.empty(tokens, top_k), *biases]
    leaves = [each.to(dtype).requires_grad_() for each in made]
    x, gate_up, down, scores, *biases = leaves
    index = torch.empty(tokens, top_k, dtype=torch.int64)
    named = dict(zip(("gate_up_bias", "down_bias"), biases, strict=False))
    _differentiate((liger_ops.moe_experts(x, gate_up, down, index, scores, **named, **options),), leaves)


def _float8(num_tokens: int, hidden_size: int, width: int) -> None:
    shapes = (num_tokens, hidden_size), (width, hidden_size), (width, hidden_size), (hidden_size, width)
    x, gate, up, down = leaves = [torch.empty(shape, dtype=torch.bfloat16).requires_grad_() for shape in shapes]
    _differentiate((gated_mlp.scaled_gated_mlp(x, [gate, up], down),), leaves)
    _differentiate(tuple(linear.scaled_linear(x, [gate, up])), [x, gate, up])


def _step(dtype: torch.dtype) -> None:
    """What no op with a case launches: steps of optimizers, temperatures, the scaling of a gradient, given classes."""
    tensors = tuple(torch.empty(2**20, dtype=dtype) for _ in range(4))
    for options in ({}, {"state_dtype": torch.bfloat16, "stochastic_rounding": True}, {"state_dtype": "8bit"}):
        group = adamw._options_of(adamw.AdamW([torch.nn.Parameter(torch.empty(1))], **options).param_groups[0])
        assert group is not None
        is_8bit = group["state_dtype"] == "8bit"
        moments = [torch.empty(2**20, dtype=torch.uint8) for _ in range(2)] if is_8bit else tensors[2:]
        scales = tuple(torch.empty(2**20 // BLOCK) for _ in range(2)) if is_8bit else None
        step = torch.empty(())
        adamw._Update(*tensors[:2], (*tensors[:2], *moments), step, group, scales)._launch()
    batch = gradients.Batch(())
    batch._alike[dtype] = list(tensors)
    batch._square_sum(dtype)
    batch._multiply(dtype, torch.empty(()))
    for width, softcap in ((515, None), (32768, 30.0)):
        logits, temperature = torch.empty(512, width, dtype=dtype).requires_grad_(), torch.empty(512)
        labels, options = torch.empty(512, dtype=torch.int64), {"temperature": temperature, "softcap": softcap}
        scores = liger_ops.token_log_probs(logits, labels, outputs=("log_probs", "entropy"), **options)
        _differentiate(tuple(score for score in scores if score is not None), [logits])
    scale_gradient._scale_gradient(tensors[0], torch.empty(()), dtype)
    rows, ids = torch.empty(512, 4096, dtype=dtype), torch.empty(512, 7, dtype=torch.int64)
    given_classes._given_logits(rows, rows, ids, 512)
    given_classes.rows_sum(rows, ids, torch.empty(512, 7))


def _run_all(architecture: Architecture) -> None:
    with torch.device("meta"):
        for dtype in architecture.dtypes:
            for name in self_check.CASES:
                for width in WIDTHS.get(name, (64, 4096, 5001, 16384)):
                    _run_op(name, width, dtype)
            for sizes in EXPERTS:
                _experts(sizes, dtype)
            _step(dtype)
        for shape in FLOAT8 if architecture.has_float8 else ():
            _float8(*shape)


KERNELS = {
    value: f"{module.__name__}.{value.jit.__name__}".removeprefix("liger_ops.")
    for module in [module for name, module in sys.modules.items() if name.startswith("liger_ops.")]
    for value in vars(module).values()
    if isinstance(value, backend.Kernel) and value.jit.__module__ == module.__name__
}
"""All kernels, with their names."""
Variant = tuple[int, dict[str, Any]]  # warps and arguments


def _count(tokens: chunked_loss.KeptTokens) -> int:
    """All tokens, as meta tensors hold no numbers."""
    return tokens._count if tokens.order is None else len(tokens.order)


def _variants(architecture: Architecture) -> dict[backend.Kernel, list[Variant]]:
    """The launches of each kernel that differ in more than numbers."""
    found: dict[backend.Kernel, dict[Any, Variant]] = defaultdict(dict)

    def record(kernel: backend.Kernel, num_programs: int, *, num_warps: int, **arguments: Any) -> None:
        # What a tensor on a GPU would choose.
        for name, value in (("INTERPRETED", False), ("FAST", architecture.target.backend == "cuda")):
            if name in arguments:
                arguments[name] = value
        kinds = [
            value.dtype if isinstance(value, Tensor) else value if name.isupper() else value is None
            for name, value in arguments.items()
        ]
        found[kernel].setdefault((num_warps, *kinds), (num_warps, arguments))

    for kernel in KERNELS:
        kernel.launch = functools.partial(record, kernel)
    with (
        mock.patch.object(backend, "hardware", return_value=architecture.hardware),
        mock.patch.object(chunked_loss.KeptTokens, "count", _count),
    ):
        _run_all(architecture)
    return {kernel: list(variants.values()) for kernel, variants in found.items()}


def _size(variant: Variant) -> int:
    """Grows with the tile of a program."""
    sizes = [value for name, value in variant[1].items() if name.isupper() and type(value) is int and value > 0]
    return math.prod(sizes) * max(each.itemsize for each in variant[1].values() if isinstance(each, Tensor))


def _compile_all(names: list[str], quick: bool) -> Iterator[dict[str, Any]]:
    for name in names:
        architecture = ARCHITECTURES[name]
        triton.runtime.driver.set_active(
            SimpleNamespace(
                get_current_target=lambda target=architecture.target: target,
                get_current_device=lambda name=name: name,  # for which Triton caches what it compiled
                get_current_stream=lambda device: 0,
            )
        )
        for kernel, variants in _variants(architecture).items():
            is_float8 = KERNELS[kernel].startswith("fp8.")
            others = [each for each in names[1:] or names if ARCHITECTURES[each].has_float8 or not is_float8]
            if quick and name not in (names[0], others[list(KERNELS).index(kernel) % len(others)]):
                continue
            chosen = [max(variants, key=_size)] if quick else variants
            yield {"architecture": name, "kernel": KERNELS[kernel], **_compile(kernel, chosen, architecture)}


def _compile(kernel: backend.Kernel, variants: list[Variant], architecture: Architecture) -> dict[str, Any]:
    shared, limit, wrong = 0, architecture.hardware.shared_bytes, []
    for num_warps, arguments in variants:
        about = {key: value for key, value in arguments.items() if key.isupper()} | {"num_warps": num_warps}
        try:
            compiled = kernel.jit.warmup(**arguments, num_warps=num_warps, grid=(1,))
        except Exception as error:  # a line of the results: others may compile
            wrong.append(f"{about}: {type(error).__name__}: {error}"[:1000])
            continue
        shared = max(shared, compiled.metadata.shared)
        if compiled.metadata.shared > limit:
            wrong.append(f"{about}: {compiled.metadata.shared} bytes of shared memory")
    return {"variants": len(variants), "shared": shared, "limit": limit, "wrong": wrong}


def _table(results: list[dict[str, Any]]) -> str:
    """A row for each kernel, a column for each architecture: KiB of shared memory, of the variant with the most."""
    names = list(dict.fromkeys(each["architecture"] for each in results))
    cells = {(each["kernel"], each["architecture"]): each for each in results}
    lines = ["| kernel | " + " | ".join(names) + " |", "|---" * (len(names) + 1) + "|"]
    for kernel in sorted(KERNELS.values()):
        row = []
        for name in names:
            cell = cells.get((kernel, name))
            row.append(f"{cell['shared'] / KIB:.1f}" if cell and not cell["wrong"] else "-")
        lines.append(f"| `{kernel}` | " + " | ".join(row) + " |")
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.compiled", description="Compiles kernels for GPUs.")
    parser.add_argument("architectures", nargs="*", metavar="ARCHITECTURE", help=f"of {', '.join(ARCHITECTURES)}")
    parser.add_argument(
        "--quick",
        action="store_true",
        help="the largest variant of each kernel, for the first architecture and one other, without assembling it",
    )
    parser.add_argument("--table", action="store_true", help="print a table at the end in place of lines of JSON")
    options = parser.parse_args(arguments)
    if unknown := set(options.architectures) - set(ARCHITECTURES):
        parser.error(f"architecture must be one of {', '.join(ARCHITECTURES)}, got {', '.join(sorted(unknown))}")
    results = []
    with contextlib.ExitStack() as stack:
        if options.quick:  # the assembler takes half of the time, and tells nothing of shared memory
            stack.enter_context(mock.patch.object(CUDABackend, "make_cubin", return_value=b""))
        for result in _compile_all(options.architectures or list(ARCHITECTURES), options.quick):
            results.append(result)
            if result["wrong"] or not options.table:
                print(json.dumps(result), file=sys.stderr if options.table else sys.stdout, flush=True)
    if options.table:
        print(_table(results))
    return int(any(each["wrong"] for each in results))


if __name__ == "__main__":
    sys.exit(main())
