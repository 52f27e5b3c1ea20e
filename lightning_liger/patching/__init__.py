"""Replaces a model's operations by fused ones: found by structure, verified first, on the instance, reversibly."""

from lightning_liger.patching.apply import KERNELS, apply_liger_kernels, check_kernels
from lightning_liger.patching.report import PatchEntry, PatchReport

__all__ = ["KERNELS", "PatchEntry", "PatchReport", "apply_liger_kernels", "check_kernels"]
