"""The kernel by which ``lightning-liger doctor`` tests Triton's compiler."""

import torch
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

_BLOCK_SIZE = 128


@triton.jit
def _add_one_kernel(x_ptr, y_ptr, num_elements, BLOCK_SIZE: tl.constexpr):  # type: ignore[no-untyped-def]
    """One program adds 1 to ``BLOCK_SIZE`` elements."""
    offsets = tl.program_id(0) * BLOCK_SIZE + tl.arange(0, BLOCK_SIZE)
    is_inside = offsets < num_elements
    tl.store(y_ptr + offsets, tl.load(x_ptr + offsets, mask=is_inside) + 1, mask=is_inside)


def run_kernel() -> None:
    """Runs the kernel on the current GPU; RuntimeError if its result is wrong."""
    x = torch.arange(200.0, device="cuda")
    y = torch.empty_like(x)
    _add_one_kernel[(2,)](x, y, x.numel(), BLOCK_SIZE=_BLOCK_SIZE)
    if not torch.equal(y, x + 1):
        raise RuntimeError("a kernel that adds 1 gave another result")


def compile_kernel(compute_capability: int) -> None:
    """Compiles the kernel for a GPU that need not be there; 90 is compute capability 9.0."""
    signature = {"x_ptr": "*fp32", "y_ptr": "*fp32", "num_elements": "i32", "BLOCK_SIZE": "constexpr"}
    source = ASTSource(_add_one_kernel, signature, {"BLOCK_SIZE": _BLOCK_SIZE})
    triton.compile(source, target=GPUTarget("cuda", compute_capability, 32))
