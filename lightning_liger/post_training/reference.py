"""Log-probabilities of a reference model: a frozen model, the policy without adapters, or stored numbers."""

import hashlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any, Literal, cast

import lightning as L
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader, IterableDataset
from typing_extensions import Self

from liger_ops.arguments import wrong_value
from lightning_liger.losses.options import Count, Share
from lightning_liger.post_training.base import LigerPostTrainingMixin
from lightning_liger.post_training.rows import count_sequences
from lightning_liger.resuming.atomic_io import gather_objects, replace
from lightning_liger.weights.pretrained import naming_damaged

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_DROPOUTS = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout)


def _adapted(model: nn.Module) -> Any:
    """The model with adapters of peft that ``model`` is or holds, None without."""
    parts = model.modules()
    return next((each for each in parts if hasattr(each, "disable_adapter") and hasattr(each, "peft_config")), None)


def has_adapters(model: nn.Module) -> bool:
    return _adapted(model) is not None


@contextmanager
def without_adapters(model: nn.Module) -> Iterator[None]:
    """The model as it was before it got adapters; if one of them is named ``"ref"``, with this one instead."""
    adapted = _adapted(model)
    # peft changes which parameters are trained when it switches adapters off and on.
    trained = [(parameter, parameter.requires_grad) for parameter in adapted.parameters()]
    has_reference, active = "ref" in adapted.peft_config, adapted.active_adapter
    try:
        if has_reference:
            adapted.set_adapter("ref")
        with nullcontext() if has_reference else adapted.disable_adapter():
            yield
    finally:
        if has_reference:
            adapted.set_adapter(active)
        for parameter, requires_grad in trained:
            if parameter.requires_grad != requires_grad:
                parameter.requires_grad_(requires_grad)


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """The model in evaluation mode, without dropout; each module gets its former mode back."""
    training = [module for module in model.modules() if module.training]
    for module in training:
        module.training = False
    try:
        yield
    finally:
        for module in training:
            module.training = True


def disable_dropout(model: nn.Module) -> None:
    """Sets all probabilities of dropout to 0, also those that attention modules of transformers keep as a number."""
    for module in model.modules():
        if isinstance(module, _DROPOUTS):
            module.p = 0.0
        if isinstance(getattr(module, "attention_dropout", None), float):
            module.attention_dropout = 0.0  # type: ignore[assignment]


def keep_reference_out(module: nn.Module) -> None:
    """Keeps ``ref_model`` out of state dicts of ``module``, and lets them be loaded without it.

    FSDP insists on what it shards: :func:`drop_reference` takes it out of the finished checkpoint.
    """

    def drop(owner: nn.Module, state: dict[str, Any], prefix: str, _: Any) -> None:
        part: Any = getattr(owner, "ref_model", None)
        if part is not None and not any(isinstance(each, FullyShardedDataParallel) for each in part.modules()):
            for key in [key for key in state if key.startswith(f"{prefix}ref_model.")]:
                del state[key]

    def allow(_: nn.Module, incompatible: Any) -> None:
        missing = incompatible.missing_keys
        missing[:] = [key for key in missing if ".ref_model." not in f".{key}"]

    module.register_state_dict_post_hook(drop)
    module.register_load_state_dict_post_hook(allow)


def drop_reference(state: dict[str, Any]) -> None:
    """Deletes whole tensors of the reference; FSDP's shards stay, as it loads all that it shards."""
    for key in [key for key in state if key.startswith("ref_model.")]:
        if type(state[key]) in (Tensor, nn.Parameter):
            del state[key]


class ReferenceCache(dict[bytes, float]):
    """Summed log-probabilities of sequences by their keys, in memory and in a file of a folder, if there is one.

    ``fingerprint`` is that of the reference model's weights, part of the file's name.
    """

    def __init__(self, folder: str | None, fingerprint: str) -> None:
        super().__init__()
        self.fingerprint = fingerprint
        self.path = None if folder is None else Path(folder) / f"reference-{fingerprint}.safetensors"
        if self.path is not None and self.path.is_file():
            with naming_damaged(self.path):
                self.load(load_file(self.path))

    def tensors(self) -> dict[str, Tensor]:
        """All sequences: ``keys``, ``[n, 16]`` in uint8, and ``log_probs``, ``[n]`` in float32."""
        keys = torch.frombuffer(bytearray(b"".join(self)), dtype=torch.uint8).view(-1, 16)
        return {"keys": keys, "log_probs": torch.tensor(list(self.values()), dtype=torch.float32)}

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Adds what :meth:`tensors` returned; nothing of an empty mapping."""
        if tensors:
            keys = (key.tobytes() for key in tensors["keys"].numpy())
            self.update(zip(keys, tensors["log_probs"].tolist(), strict=True))

    def share(self) -> None:
        """Gives each rank the sequences of all ranks, and writes the file."""
        for values in gather_objects(dict(self)):
            self.update(values)
        if self.path is not None:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            is_first = not dist.is_initialized() or dist.get_rank() == 0
            replace(self.path, lambda path: save_file(self.tensors(), path) if is_first else None, on_all_ranks=True)

    def find(self, keys: list[bytes]) -> Tensor:
        """The log-probabilities of sequences, ``[n]`` in float32; raises KeyError for one that is new."""
        if missing := [index for index, key in enumerate(keys) if key not in self]:
            raise KeyError(
                f"the batch must hold sequences whose reference log-probabilities were computed before training, but"
                f" {len(missing)} of its {len(keys)} are new (the first is number {missing[0]}): the data changed"
                " since then, or differ between epochs (random truncation, or mismatched pairs that are made"
                " per batch). Set precompute_ref_log_probs=False for such data"
            )
        return torch.tensor([self[key] for key in keys], dtype=torch.float32)


def sequence_keys(batch: Mapping[str, Any], prefix: str = "") -> list[bytes]:
    """16 bytes for each sequence of a batch: a hash of its tokens and of which of them are the completion's."""
    names = ("input_ids", "completion_mask", "attention_mask", "sequence_ids")
    found = [None if (value := batch.get(prefix + name)) is None else value.detach().cpu() for name in names]
    ids, mask, attention, numbers = cast(list[Any], found)
    pairs = torch.stack((ids.long(), mask.long()), -1)
    if numbers is not None:
        parts = [pairs[numbers == index] for index in range(count_sequences(batch, prefix))]
        # Padding is part of the last one: up to the last completion token.
        parts = [each[: int(each[:, 1].nonzero().max()) + 1] if each[:, 1].any() else each for each in parts]
    elif attention is None:
        parts = list(pairs)
    else:
        parts = [row[kept.bool()] for row, kept in zip(pairs, attention, strict=True)]
    return [hashlib.blake2b(part.contiguous().numpy().tobytes(), digest_size=16).digest() for part in parts]


def sum_of_bits(model: nn.Module, *, without_adapters: bool = False) -> int:
    """A number that depends on all weights of this rank, and on which parameter has which."""
    total = torch.zeros((), dtype=torch.int64)
    for index, (name, parameter) in enumerate(model.named_parameters()):
        if without_adapters and ("lora_" in name or "modules_to_save" in name):
            continue
        value = getattr(parameter, "ds_tensor", parameter.detach())
        value = value.to_local() if isinstance(value, DTensor) else value
        bits = value.detach().contiguous().view(_BITS[value.element_size()])
        total += ((index + 1) * bits.sum(dtype=torch.int64)).cpu()
    return int(total)


def weights_fingerprint(model: nn.Module, settings: object, *, without_adapters: bool = False) -> str:
    """A hash of the weights as they are distributed, and of ``settings``: the same in each run on the same devices."""
    totals = gather_objects(sum_of_bits(model, without_adapters=without_adapters))
    return hashlib.blake2b(repr((totals, settings)).encode(), digest_size=8).hexdigest()


def every_batch(trainer: L.Trainer) -> Iterator[Any]:
    """The batches of the training and validation data before they are moved to the device, not shuffled.

    Each rank gets a part, and all ranks equally many batches, for which the first examples may come twice. Raises
    ValueError for data that has no length, or loaders that are no ``DataLoader``.
    """
    trainer.fit_loop.setup_data()
    loaders = [trainer.train_dataloader]
    if trainer.enable_validation:
        trainer.fit_loop.epoch_loop.val_loop.setup_data()
        validation = trainer.val_dataloaders
        loaders += validation if isinstance(validation, list | tuple) else [validation]
    for loader in loaders:
        if not isinstance(loader, DataLoader) or isinstance(loader.dataset, IterableDataset):
            expected = "False for data without a length, not in a DataLoader"
            raise wrong_value("precompute_ref_log_probs", expected, loader)
        kwargs: Any = trainer.distributed_sampler_kwargs or {}
        length, size = len(loader.dataset), loader.batch_size  # type: ignore[arg-type]
        each = -(-length // kwargs.get("num_replicas", 1))
        first = kwargs.get("rank", 0) * each
        if size is None and loader.batch_sampler is not None:
            size = getattr(loader.batch_sampler, "batch_size", 1)
        yield from DataLoader(
            loader.dataset, batch_size=size, sampler=[index % length for index in range(first, first + each)],
            collate_fn=loader.collate_fn, num_workers=loader.num_workers,
        )  # fmt: skip


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
            keep_reference_out(self)

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
        """The settings of a loss that has no reference."""
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
            drop_reference(checkpoint.get("state_dict", {}))

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
