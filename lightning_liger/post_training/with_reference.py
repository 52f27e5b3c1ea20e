"""Mixin of losses that compare the policy with a reference model."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, cast

from torch import nn

from liger_ops.arguments import check_bool, check_choice, wrong_value
from lightning_liger.post_training.base import LigerPostTrainingMixin
from lightning_liger.post_training.reference import (
    REFERENCES,
    disable_dropout,
    drop_from_state_dict,
    drop_reference,
    evaluating,
    freeze,
    has_adapters,
    without_adapters,
)


class LigerReferenceMixin(LigerPostTrainingMixin):
    """A reference model next to the policy: ``ref_model``, or the policy with its adapters off.

    ``ref_model`` is frozen, in evaluation mode and not in checkpoints: ``configure_model`` makes it again.
    """

    reference: str = "auto"
    disable_dropout: bool = True
    ref_model: nn.Module | None
    _reference_hint = "set self.ref_model or train adapters of peft"

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        check_choice("reference", self.reference, REFERENCES)
        check_bool("disable_dropout", self.disable_dropout)
        super().__init__(*args, **kwargs)
        if getattr(self, "ref_model", None) is None:
            self.ref_model = None
        drop_from_state_dict(self, "ref_model")

    @property
    def needs_reference(self) -> bool:
        """Whether the loss needs log-probabilities of a reference model."""
        raise NotImplementedError(f"{type(self).__name__} must implement needs_reference")

    def _note_replacement(self, before: nn.Module | None) -> None:
        super()._note_replacement(before)
        self._freeze_reference()

    def setup(self, stage: str) -> None:
        super().setup(stage)
        self._freeze_reference()

    def _freeze_reference(self) -> None:
        if self.ref_model is not None:
            if self.ref_model is getattr(self, "model", None):
                raise wrong_value("ref_model", "another module than model, as it is frozen", self.ref_model)
            freeze(self.ref_model)

    def _frozen_models(self) -> list[nn.Module]:
        return [] if self.ref_model is None else [self.ref_model]

    def on_fit_start(self) -> None:
        super().on_fit_start()
        if self.ref_model is not None and any(parameter.requires_grad for parameter in self.ref_model.parameters()):
            raise wrong_value("ref_model", "frozen: its parameters must not require gradients", self.ref_model)
        if self.disable_dropout:
            disable_dropout(self.model)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        super().on_save_checkpoint(checkpoint)
        drop_reference(checkpoint.get("state_dict", {}), "ref_model.")

    def _reference_kind(self) -> str:
        """``"model"`` or ``"adapters"``, of the log-probabilities that are computed here."""
        if self.reference == "model" or (self.reference == "auto" and self.ref_model is not None):
            if self.ref_model is None:
                raise wrong_value("reference", "'model' only with self.ref_model", self.reference)
            return "model"
        if self.reference == "adapters" or (self.reference == "auto" and has_adapters(self.model)):
            return "adapters"
        raise ValueError(f"{type(self).__name__} has no reference: {self._reference_hint}")

    @contextmanager
    def _reference_model(self) -> Iterator[nn.Module]:
        """The model that computes the reference's log-probabilities, without dropout."""
        kind = self._reference_kind()
        model = cast(nn.Module, self.ref_model) if kind == "model" else self.model
        with evaluating(model):
            if kind == "adapters":
                with without_adapters(model):
                    yield model
            else:
                yield model
