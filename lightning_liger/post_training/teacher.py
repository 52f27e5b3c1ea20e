"""Frozen models next to the one that is trained: made, sharded, and kept out of checkpoints and optimizers."""

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers import AutoModelForCausalLM, PreTrainedConfig

from liger_ops.arguments import wrong_type
from lightning_liger.patching import apply_liger_kernels
from lightning_liger.patching.rules import Patched
from lightning_liger.post_training.base import LigerPostTrainingMixin
from lightning_liger.sequences.context_parallel import ContextParallel
from lightning_liger.weights.materialize import has_meta_tensors, materialize
from lightning_liger.weights.pretrained import load_pretrained


def build_frozen(config: PreTrainedConfig, pretrained: str | None, device: torch.device, dtype: torch.dtype) -> Any:
    """A model with the weights of a folder, or with random ones that are the same on all ranks."""
    settings: dict[str, Any] = {"dtype": dtype, "trust_remote_code": False}
    with device:
        if pretrained is not None and device.type != "meta":
            return AutoModelForCausalLM.from_pretrained(pretrained, config=config, local_files_only=True, **settings)
        with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
            torch.manual_seed(0)
            model = AutoModelForCausalLM.from_config(config, **settings)
    if pretrained is not None:
        load_pretrained(model, pretrained)
    return model


def prepare_frozen(
    model: nn.Module, device: torch.device, *, context: ContextParallel | None = None, is_sharded: bool = False
) -> nn.Module:
    """Makes ``model`` ready for forward passes without gradients on ``device``, whatever engine trains the other model.

    It is frozen, in evaluation mode, and patched with all kernels that fit. With ``is_sharded`` all ranks share its
    parameters, by FSDP2: each layer is whole only while it runs. A model on the meta device gets its values last.
    """
    model.requires_grad_(False).eval()
    if not any(isinstance(module, Patched) for module in model.modules()):
        apply_liger_kernels(model)
    if context is not None:
        context.apply(model)
    if is_sharded and dist.is_initialized() and dist.get_world_size() > 1:
        mesh = init_device_mesh(device.type, (dist.get_world_size(),))
        names = set(getattr(model, "_no_split_modules", None) or ())
        layers = [module for module in model.modules() if names & {cls.__name__ for cls in type(module).__mro__}]
        for unit in (*layers, model):
            fully_shard(unit, mesh=mesh, reshard_after_forward=unit is not model)
        materialize(model, device, layers)
    elif has_meta_tensors(model):
        materialize(model, device)
    return model.to(device)


class LigerTeacherMixin(LigerPostTrainingMixin):
    """A frozen model next to the one that trains, which no engine, no checkpoint and no optimizer sees."""

    shard_teacher = False
    _teacher: tuple[nn.Module, ...] = ()  # in a tuple, so that it is no submodule
    _teacher_hook = "configure_teacher"  # which makes it

    @property
    def teacher(self) -> nn.Module | None:
        """The frozen teacher; None if there is none, or if no stage has begun."""
        return self._teacher[0] if self._teacher else None

    def _prepare_stage(self) -> None:
        super()._prepare_stage()
        self._prepare_teacher()

    def _prepare_teacher(self) -> None:
        if self._teacher or (teacher := getattr(self, self._teacher_hook)()) is None:
            return
        if not isinstance(teacher, nn.Module):
            raise wrong_type(f"{self._teacher_hook}()", "a module or None", teacher)
        self._teacher = (prepare_frozen(teacher, self.device, context=self.context, is_sharded=self.shard_teacher),)
