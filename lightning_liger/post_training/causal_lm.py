"""A finished causal language model with a reference model, which post-training modules are made of."""

import os
from collections.abc import Mapping
from copy import deepcopy
from dataclasses import fields
from typing import Any, TypeVar, cast

from lightning_utilities.core.rank_zero import rank_zero_warn
from torch import nn

from liger_ops.arguments import wrong_value
from lightning_liger.post_training.reference import sum_of_bits
from lightning_liger.post_training.with_reference import LigerReferenceMixin
from lightning_liger.training.causal_lm import LigerCausalLM

_RANDOM_REFERENCE = "random_reference_fingerprint"
Options = TypeVar("Options")


def options_of(kind: type[Options], arguments: Mapping[str, Any]) -> Options:
    """A dataclass of options from the arguments of ``__init__`` that have the names of its fields, lists as tuples."""
    given = {
        each.name: arguments[each.name] for each in fields(cast(Any, kind)) if each.init and each.name in arguments
    }
    return kind(**{name: tuple(value) if isinstance(value, list) else value for name, value in given.items()})


def plain(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments as checkpoints keep them: paths as strings."""
    return {name: os.fspath(value) if isinstance(value, os.PathLike) else value for name, value in arguments.items()}


def refuse_loss_type(arguments: dict[str, Any]) -> None:
    """Takes the ``loss_type`` of ``LigerCausalLM`` out of the arguments of a module that has another loss.

    Such a module gives it to ``super().__init__`` by name, so that its command line does not have it.
    """
    if (loss_type := arguments.pop("loss_type", "nll")) != "nll":
        raise wrong_value("loss_type", "'nll' in a module with another loss than LigerCausalLM's", loss_type)


class ReferenceCausalLM(LigerReferenceMixin, LigerCausalLM):
    """A causal language model with its reference model.

    Args:
        reference: Where the reference's log-probabilities come from: ``"model"``, a frozen copy of the model;
            ``"adapters"``, the model without its adapters; ``"columns"`` of the data; ``"auto"`` for adapters with
            ``lora``, else the copy, unless the data has columns.
        disable_dropout: Whether the model is trained without dropout.
        sync_ref_model: Whether the frozen copy follows the model (TR-DPO, arXiv:2404.09656). It is in checkpoints then.
        ref_model_mixup_alpha: The weight of the model in the copy's new parameters.
        ref_model_sync_steps: Optimizer steps from one update of the copy to the next.
        **kwargs: See :class:`~lightning_liger.LigerCausalLM`.
    """

    def __init__(
        self,
        reference: str = "auto",
        disable_dropout: bool = True,
        sync_ref_model: bool = False,
        ref_model_mixup_alpha: float = 0.6,
        ref_model_sync_steps: int = 512,
        **kwargs: Any,
    ) -> None:
        self.reference = reference
        self.disable_dropout = disable_dropout
        self.sync_ref_model = sync_ref_model
        self.ref_model_mixup_alpha = ref_model_mixup_alpha
        self.ref_model_sync_steps = ref_model_sync_steps
        super().__init__(**kwargs)
        if self._settings.lora is None and reference == "adapters":
            raise wrong_value("reference", "'adapters' only with lora", reference)
        self._random_reference: int | None = None

    def _configure_other_models(self) -> None:
        super()._configure_other_models()
        if self._has_reference_model():
            self.ref_model = self._build_reference()

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        super().on_save_checkpoint(checkpoint)
        if self._random_reference is not None:
            checkpoint[_RANDOM_REFERENCE] = self._random_reference

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        super().on_load_checkpoint(checkpoint)
        if self.sync_ref_model:  # it is in the checkpoint
            return
        if self._random_reference is not None and checkpoint.get(_RANDOM_REFERENCE) not in (
            None,
            self._random_reference,
        ):
            rank_zero_warn(
                "The reference model has other random weights than that of the checkpoint, so losses and rewards are"
                " not comparable: use the seed of that run (seed_everything), or start from a folder (pretrained)."
            )

    def _has_reference_model(self) -> bool:
        if not self.needs_reference or self.reference in ("columns", "adapters"):
            return False
        return self.reference == "model" or self._settings.lora is None

    def _build_reference(self) -> nn.Module:
        if self._settings.pretrained is not None:
            return self._build_model()
        if any(parameter.is_meta or hasattr(parameter, "ds_id") for parameter in self.model.parameters()):
            raise wrong_value(
                "pretrained", "a folder: strategies that shard cannot copy random weights for the reference", None
            )
        reference = deepcopy(self.model)
        self._random_reference = sum_of_bits(reference)
        return reference
