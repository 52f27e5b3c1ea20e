"""Hugging Face's auto classes, for models that come with fused kernels."""

from typing import Any, ClassVar

from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, PreTrainedModel

from lightning_liger.patching import apply_liger_kernels, check_kernels
from lightning_liger.patching.apply import KernelChoice


class _AutoLigerModel:
    _auto_class: ClassVar[Any]

    def __init__(self) -> None:
        raise OSError(f"{type(self).__name__} has no instances; use its from_pretrained or from_config")

    @classmethod
    def from_pretrained(cls, *args: Any, kernels: KernelChoice = "auto", **kwargs: Any) -> PreTrainedModel:
        """Loads a model as transformers' auto class does, and applies fused kernels to it.

        Args:
            args: What the auto class takes.
            kernels: Which, see :func:`~lightning_liger.apply_liger_kernels`.
            kwargs: What the auto class takes.

        Returns:
            The model, whose ``liger_report`` says what was replaced.

        Raises:
            ValueError: For kernels that are unknown, before anything is loaded, or that fit nothing in the model.
        """
        check_kernels(kernels)
        return _patched(cls._auto_class.from_pretrained(*args, **kwargs), kernels)

    @classmethod
    def from_config(cls, *args: Any, kernels: KernelChoice = "auto", **kwargs: Any) -> PreTrainedModel:
        """The same with random weights."""
        check_kernels(kernels)
        return _patched(cls._auto_class.from_config(*args, **kwargs), kernels)


def _patched(model: PreTrainedModel, kernels: KernelChoice) -> PreTrainedModel:
    model.liger_report = apply_liger_kernels(model, kernels)
    return model


class AutoLigerModelForCausalLM(_AutoLigerModel):
    """``AutoModelForCausalLM`` with fused kernels."""

    _auto_class = AutoModelForCausalLM


class AutoLigerModelForImageTextToText(_AutoLigerModel):
    """``AutoModelForImageTextToText`` with fused kernels, for the loss over its text too."""

    _auto_class = AutoModelForImageTextToText
