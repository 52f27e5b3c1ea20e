"""Hugging Face's auto classes whose models have fused kernels."""

from typing import Any, ClassVar

from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, PreTrainedModel

from lightning_liger.hub import naming_repository
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
            args: Arguments of the auto class.
            kernels: See :func:`~lightning_liger.apply_liger_kernels`.
            kwargs: Keyword arguments of the auto class.

        Returns:
            The model, with the report of replacements as ``liger_report``.

        Raises:
            ConnectionError: If a repository is not in the local cache, and the Hub cannot be reached.
            FileNotFoundError: If there is no such path, repository or revision.
            PermissionError: If the repository is gated.
            TypeError: For ``kernels`` of another type, before anything is loaded.
            ValueError: For unknown kernels, before anything is loaded, or kernels asked for by name that fit nothing.
        """
        name = args[0] if args else kwargs.get("pretrained_model_name_or_path")
        with naming_repository("pretrained_model_name_or_path", str(name), kwargs.get("revision")):
            return cls._patched("from_pretrained", kernels, *args, **kwargs)

    @classmethod
    def from_config(cls, *args: Any, kernels: KernelChoice = "auto", **kwargs: Any) -> PreTrainedModel:
        """As :meth:`from_pretrained`, with random weights."""
        return cls._patched("from_config", kernels, *args, **kwargs)

    @classmethod
    def _patched(cls, method: str, kernels: KernelChoice, *args: Any, **kwargs: Any) -> Any:
        check_kernels(kernels)
        loaded = getattr(cls._auto_class, method)(*args, **kwargs)
        model = loaded[0] if isinstance(loaded, tuple) else loaded  # with output_loading_info
        model.liger_report = apply_liger_kernels(model, kernels)
        return loaded


class AutoLigerModelForCausalLM(_AutoLigerModel):
    """``AutoModelForCausalLM`` with fused kernels."""

    _auto_class = AutoModelForCausalLM


class AutoLigerModelForImageTextToText(_AutoLigerModel):
    """``AutoModelForImageTextToText`` with fused kernels, also in the loss over its text."""

    _auto_class = AutoModelForImageTextToText
