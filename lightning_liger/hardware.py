"""GPUs and their peak rates, and the measured rate of devices that are not in the table.

The rates are those of the vendors' data sheets, dense (without structured sparsity) and with float32 accumulation:

- NVIDIA: the data sheets of H100, H200, HGX B200/B300, GB200, GH200, A100, A10, A10G, A30, A40, L4, L40, L40S, T4 and
  V100; the architecture white papers of GA102, AD102 and Blackwell for RTX cards, with FP32 accumulation.
- AMD: the data sheets of Instinct MI250X (one of its two dies, which is one device), MI300X, MI325X and MI355X.

In all of them the rate in float8 is twice that in 16 bits, where there are tensor cores for it (L40S: 1% more).

``memory_bytes`` is what torch reports as total, which is less than the name says and differs by some 0.1 GiB between
drivers.
"""

import functools
import re
import time
from dataclasses import dataclass
from typing import Literal

import torch

from liger_ops.arguments import check_device, check_floating_dtype, check_integer, check_text, did_you_mean, shown

_MEMORY_TOLERANCE = 0.1
"""By which share the memory of a device may differ from the table: more is a slice of a GPU, or another one."""
_MATMUL_SIZE = {"cpu": 1024}
_MATMUL_SECONDS = 0.2

GpuName = Literal[
    "h100-80gb", "h100-pcie-80gb", "h100-nvl-94gb", "h200-141gb", "h200-nvl-141gb", "h800-80gb", "h20-96gb",
    "gh200-96gb", "gh200-144gb", "b200-180gb", "gb200-186gb", "b300-288gb", "a100-80gb", "a100-pcie-80gb",
    "a100-40gb", "a800-80gb", "a40-48gb", "a30-24gb", "a10-24gb", "a10g-24gb", "l40s-48gb", "l40-48gb",
    "l4-24gb", "t4-16gb", "v100-32gb", "v100-16gb", "v100-pcie-32gb", "v100-pcie-16gb", "rtx5090-32gb",
    "rtx4090-24gb", "rtx3090-24gb", "rtxa6000-48gb", "rtx6000ada-48gb", "rtxpro6000-96gb", "mi250x-64gb",
    "mi300x-192gb", "mi325x-256gb", "mi355x-288gb",
]  # fmt: skip
"""The keys of :data:`GPUS`."""


@dataclass(frozen=True)
class Gpu:
    """A GPU: its name, memory and peak rates."""

    name: str
    """As people know it: ``"NVIDIA H100 80GB (SXM)"``."""
    memory_bytes: int
    """The total that torch reports, in bytes."""
    bfloat16_flops: float
    """Dense peak of 16-bit matrix products in FLOP/s; that of float16 where there are no bfloat16 tensor cores."""
    float32_flops: float
    """Dense peak of float32 matrix products in FLOP/s: TF32 where there are tensor cores for it, else plain float32."""
    memory_bandwidth: float
    """In bytes/s."""
    float8_flops: float | None = None
    """Dense peak of float8 matrix products in FLOP/s, None without tensor cores for it."""

    def peak_flops(self, dtype: torch.dtype) -> float:
        """The dense peak in FLOP/s of matrix products in ``dtype``."""
        if dtype.itemsize == 1 and self.float8_flops:
            return self.float8_flops
        return self.bfloat16_flops if dtype.itemsize <= 2 else self.float32_flops


# key, pattern of torch's device name in lower case, name, GiB, TFLOP/s in 16 bits, TFLOP/s in float32, TB/s
_TABLE: tuple[tuple[str, str, str, float, float, float, float], ...] = (
    ("h100-80gb", r"h100 80gb hbm3|h100 sxm|h100-sxm", "NVIDIA H100 80GB (SXM)", 79.1, 989.4, 494.7, 3.35),
    ("h100-pcie-80gb", r"h100 pcie", "NVIDIA H100 80GB (PCIe)", 79.1, 756, 378, 2.0),
    ("h100-nvl-94gb", r"h100 nvl", "NVIDIA H100 NVL 94GB", 93.0, 835, 417.5, 3.9),
    ("h200-141gb", r"\bh200(?! nvl)", "NVIDIA H200 141GB (SXM)", 139.8, 989.4, 494.7, 4.8),
    ("h200-nvl-141gb", r"\bh200 nvl", "NVIDIA H200 NVL 141GB", 139.8, 835, 417.5, 4.8),
    ("h800-80gb", r"h800(?! pcie)", "NVIDIA H800 80GB (SXM)", 79.1, 989.4, 494.7, 3.35),
    ("h20-96gb", r"\bh20\b", "NVIDIA H20 96GB", 95.1, 148, 74, 4.0),
    ("gh200-96gb", r"gh200", "NVIDIA GH200 96GB", 94.5, 989.4, 494.7, 4.0),
    ("gh200-144gb", r"gh200", "NVIDIA GH200 144GB", 140.4, 989.4, 494.7, 4.9),
    ("b200-180gb", r"\bb200", "NVIDIA B200 180GB (HGX)", 178.4, 2250, 1125, 7.7),
    ("gb200-186gb", r"gb200", "NVIDIA GB200 186GB", 184.2, 2500, 1250, 8.0),
    ("b300-288gb", r"\bb300", "NVIDIA B300 288GB (HGX)", 267.7, 2250, 1125, 8.0),
    ("a100-80gb", r"a100-sxm", "NVIDIA A100 80GB (SXM)", 79.2, 312, 156, 2.039),
    ("a100-pcie-80gb", r"a100 80gb pcie", "NVIDIA A100 80GB (PCIe)", 79.2, 312, 156, 1.935),
    ("a100-40gb", r"a100-(sxm|pcie)", "NVIDIA A100 40GB", 39.4, 312, 156, 1.555),
    ("a800-80gb", r"a800", "NVIDIA A800 80GB", 79.2, 312, 156, 2.039),
    ("a40-48gb", r"a40\b", "NVIDIA A40 48GB", 44.4, 149.7, 74.8, 0.696),
    ("a30-24gb", r"a30\b", "NVIDIA A30 24GB", 23.5, 165, 82, 0.933),
    ("a10-24gb", r"a10\b", "NVIDIA A10 24GB", 22.1, 125, 62.5, 0.6),
    ("a10g-24gb", r"a10g\b", "NVIDIA A10G 24GB", 22.1, 70, 35, 0.6),
    ("l40s-48gb", r"l40s\b", "NVIDIA L40S 48GB", 44.4, 362.05, 183, 0.864),
    ("l40-48gb", r"l40\b", "NVIDIA L40 48GB", 44.4, 181.05, 90.5, 0.864),
    ("l4-24gb", r"l4\b", "NVIDIA L4 24GB", 22.0, 121, 60, 0.3),
    ("t4-16gb", r"\bt4\b", "NVIDIA T4 16GB", 14.6, 65, 8.1, 0.32),
    ("v100-32gb", r"v100-sxm", "NVIDIA V100 32GB (SXM2)", 31.7, 125, 15.7, 0.9),
    ("v100-16gb", r"v100-sxm", "NVIDIA V100 16GB (SXM2)", 15.8, 125, 15.7, 0.9),
    ("v100-pcie-32gb", r"v100-pcie", "NVIDIA V100 32GB (PCIe)", 31.7, 112, 14, 0.9),
    ("v100-pcie-16gb", r"v100-pcie", "NVIDIA V100 16GB (PCIe)", 15.8, 112, 14, 0.9),
    ("rtx5090-32gb", r"rtx 5090$", "NVIDIA GeForce RTX 5090 32GB", 31.4, 209.5, 104.8, 1.792),
    ("rtx4090-24gb", r"rtx 4090$", "NVIDIA GeForce RTX 4090 24GB", 23.6, 165.2, 82.6, 1.008),
    ("rtx3090-24gb", r"rtx 3090$", "NVIDIA GeForce RTX 3090 24GB", 23.6, 71, 35.6, 0.936),
    ("rtxa6000-48gb", r"rtx a6000$", "NVIDIA RTX A6000 48GB", 47.5, 154.8, 77.4, 0.768),
    ("rtx6000ada-48gb", r"rtx 6000 ada", "NVIDIA RTX 6000 Ada 48GB", 47.4, 364.2, 182.1, 0.96),
    ("rtxpro6000-96gb", r"rtx pro 6000 blackwell workstation", "NVIDIA RTX PRO 6000 96GB", 95.0, 503.8, 251.9, 1.792),
    ("mi250x-64gb", r"mi250x", "AMD Instinct MI250X (one die, 64GB)", 64.0, 191.5, 47.9, 1.6),
    ("mi300x-192gb", r"mi300x", "AMD Instinct MI300X 192GB", 192.0, 1307.4, 653.7, 5.3),
    ("mi325x-256gb", r"mi325x", "AMD Instinct MI325X 256GB", 256.0, 1307.4, 653.7, 6.0),
    ("mi355x-288gb", r"mi355x", "AMD Instinct MI355X 288GB", 288.0, 2516.6, 157.3, 8.0),
)

_WITHOUT_FLOAT8 = ("a100", "a800", "a40", "a30", "a10", "t4", "v100", "rtx3090", "rtxa6000", "mi250x")

GPUS: dict[str, Gpu] = {
    key: Gpu(
        name=name,
        memory_bytes=int(memory * 2**30),
        bfloat16_flops=half * 1e12,
        float32_flops=single * 1e12,
        memory_bandwidth=bandwidth * 1e12,
        float8_flops=None if key.startswith(_WITHOUT_FLOAT8) else 2 * half * 1e12,
    )
    for key, _, name, memory, half, single, bandwidth in _TABLE
}
"""The known GPUs by their keys, such as ``"h100-80gb"``."""


def find_gpu(device_name: str, total_memory: int) -> Gpu | None:
    """The known GPU that a device is, None if it is unknown or a slice (MIG) of a GPU.

    Args:
        device_name: ``name`` of ``torch.cuda.get_device_properties(device)``.
        total_memory: Its ``total_memory`` in bytes.

    Raises:
        TypeError: If ``device_name`` is no text or ``total_memory`` no integer.
        ValueError: If ``total_memory`` is below 1.
    """
    check_text("device_name", device_name)
    check_integer("total_memory", total_memory, at_least=1)
    name = device_name.lower()
    for key, pattern, *_ in _TABLE:
        gpu = GPUS[key]
        if re.search(pattern, name) and abs(total_memory / gpu.memory_bytes - 1) < _MEMORY_TOLERANCE:
            return gpu
    return None


def get_gpu(name: str) -> Gpu:
    """The GPU of a key of :data:`GPUS`.

    Raises:
        TypeError: If ``name`` is no text.
        ValueError: If it is no key; the message names the five that are most similar.
    """
    check_text("gpu", name)
    key = name.strip().lower().replace("_", "-").replace(" ", "-")
    if key in GPUS:
        return GPUS[key]
    raise ValueError(
        "gpu must be a key of lightning_liger.hardware.GPUS (`lightning-liger inspect --help` lists them), got"
        f" {shown(name)}{did_you_mean(key, GPUS, most=5, cutoff=0.3)}"
    )


def measure_matmul_flops(device: torch.device | str, dtype: torch.dtype) -> float:
    """The measured rate of large matrix products on a device in FLOP/s, in about 0.2 seconds; measured once.

    Raises:
        TypeError: If ``dtype`` is no floating-point dtype.
        ValueError: If ``device`` is none that torch knows.
    """
    check_device("device", device)
    check_floating_dtype("dtype", dtype)
    return _measured(torch.device(device), dtype)


@functools.cache
def _measured(device: torch.device, dtype: torch.dtype) -> float:
    size = _MATMUL_SIZE.get(device.type, 4096)
    with torch.inference_mode(), torch.autocast(device.type, enabled=False):
        left, right = (torch.ones(size, size, device=device, dtype=dtype) for _ in range(2))
        best, begin = float("inf"), time.perf_counter()
        while time.perf_counter() - begin < _MATMUL_SECONDS:
            start = time.perf_counter()
            for _ in range(4):
                _ = left @ right
            if device.type != "cpu":
                torch.accelerator.synchronize(device)
            best = min(best, (time.perf_counter() - start) / 4)
    return 2 * size**3 / best
