"""Mixin of losses that compare the policy with a reference model."""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, Literal, cast

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from typing_extensions import Self

from liger_ops.arguments import wrong_value
from lightning_liger.losses.options import Count, Share
from lightning_liger.post_training.base import LigerPostTrainingMixin
from lightning_liger.post_training.reference import (
    disable_dropout,
    drop_from_state_dict,
    drop_reference,
    evaluating,
    has_adapters,
    without_adapters,
)


class LigerReferenceMixin(LigerPostTrainingMixin):
    """A reference model next to the policy: ``ref_model``, or the policy with its adapters off.

    ``ref_model`` is frozen, in evaluation mode and not in checkpoints: ``configure_model`` makes it again. Names and
    defaults are TRL's.

    Attributes:
        reference: Where the reference's log-probabilities come from: ``"model"``, a frozen copy of the model;
            ``"adapters"``, the model without its adapters; ``"columns"`` of the data; ``"auto"`` for columns if the
            data has them, then the copy, then adapters. (Finished modules with ``lora`` make no copy.)
        disable_dropout: Whether the model is trained without dropout.
        sync_ref_model: Whether the frozen copy follows the model (TR-DPO, arXiv:2404.09656). It is in checkpoints then.
            Not under FSDP1 and DeepSpeed.
        ref_model_mixup_alpha: The weight of the model in the copy's new parameters.
        ref_model_sync_steps: Optimizer steps from one update of the copy to the next.
    """

    reference: Literal["auto", "model", "adapters", "columns"] = "auto"
    disable_dropout: bool = True
    sync_ref_model: bool = False
    ref_model_mixup_alpha: Share = 0.6
    ref_model_sync_steps: Count = 512
    ref_model: nn.Module | None
    _reference_hint = "set self.ref_model or train adapters of peft"

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if getattr(self, "ref_model", None) is None:
            self.ref_model = None
        if not self.sync_ref_model:
            drop_from_state_dict(self, "ref_model")

    def _check_arguments(self) -> None:
        super()._check_arguments()
        if not self.needs_reference:
            for name, expected in self._without_reference().items():
                if (value := getattr(self, name)) != expected:
                    raise wrong_value(name, f"{expected!r} for a loss without a reference", value)

    @property
    def needs_reference(self) -> bool:
        """Whether the loss needs log-probabilities of a reference model."""
        raise NotImplementedError(f"{type(self).__name__} must implement needs_reference")

    def _without_reference(self) -> dict[str, Any]:
        """What each setting of the reference has to be for a loss that has none."""
        return {"reference": "auto", "sync_ref_model": False}

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "ref_model" and isinstance(value, nn.Module):  # before any engine sees it
            if value is getattr(self, "model", None):
                raise wrong_value("ref_model", "another module than model, as it is frozen", value)
            if not self.needs_reference:
                raise wrong_value("ref_model", "None for a loss without a reference", type(value).__name__)
            value.requires_grad_(False).eval()
        super().__setattr__(name, value)

    def train(self, mode: bool = True) -> Self:
        """As of any module; the reference stays in evaluation mode."""
        super().train(mode)
        if self.ref_model is not None:
            self.ref_model.eval()
        return self

    def _prepare_stage(self) -> None:
        super()._prepare_stage()
        if self.sync_ref_model and self._attached_trainer is not None and self.trainer.training:
            self._check_sync()
        if self.disable_dropout:
            disable_dropout(self.model)

    def _check_sync(self) -> None:
        if self.ref_model is None or self.reference not in ("auto", "model"):
            raise wrong_value("sync_ref_model", "False without a ref_model that the loss uses", True)
        shards = any(isinstance(unit, FullyShardedDataParallel) for unit in self.trainer.strategy.model.modules())  # type: ignore[union-attr]
        if shards or self.trainer.strategy.handles_gradient_accumulation:
            name = type(self.trainer.strategy).__name__
            raise ValueError(
                f"sync_ref_model must be False under {name}, whose shards of the two models differ, got True: use"
                " strategy='liger_model_parallel' (FSDP2), 'liger_ddp' or 'liger'"
            )
        pair = [{name: each.shape for name, each in model.named_parameters()} for model in (self.model, self.ref_model)]
        if pair[0] != pair[1]:
            raise wrong_value("sync_ref_model", "False for a ref_model with other parameters than the model", True)

    def _step_ends(self) -> None:
        super()._step_ends()
        # Here, as callbacks that save checkpoints run before on_train_batch_end.
        if self.sync_ref_model and (self.trainer.global_step + 1) % self.ref_model_sync_steps == 0:
            self._sync_reference()

    @torch.no_grad()
    def _sync_reference(self) -> None:
        alpha, reference = self.ref_model_mixup_alpha, cast(nn.Module, self.ref_model)
        for module in reference.modules():
            if isinstance(module, FSDPModule):  # without a backward pass, whole copies stay after forward
                module.reshard()
        for own, other in zip(self.model.parameters(), reference.parameters(), strict=True):
            other.mul_(1 - alpha).add_(own, alpha=alpha)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        super().on_save_checkpoint(checkpoint)
        if not self.sync_ref_model:
            drop_reference(checkpoint.get("state_dict", {}), "ref_model.")

    def _reference_kind(self) -> str:
        """``"model"`` or ``"adapters"``, of the log-probabilities that are computed here."""
        found = {"model": self.ref_model is not None, "adapters": has_adapters(self.model)}
        kind = self.reference
        if kind == "auto":
            kind = "model" if found["model"] else "adapters"
        if not found.get(kind):
            raise ValueError(
                f"{type(self).__name__} has no reference for reference={self.reference!r}: {self._reference_hint}"
            )
        return kind

    @contextmanager
    def _reference_model(self) -> Iterator[nn.Module]:
        """The model that computes the reference's log-probabilities, without dropout."""
        kind = self._reference_kind()
        model = cast(nn.Module, self.ref_model) if kind == "model" else self.model
        with evaluating(model), without_adapters(model) if kind == "adapters" else nullcontext():
            yield model
