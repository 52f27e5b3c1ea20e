"""Log-probabilities of a reference model: a frozen model, the policy without adapters, or stored numbers."""

import hashlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any, cast

import lightning as L
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader, IterableDataset

from liger_ops.arguments import wrong_value
from lightning_liger.post_training.rows import count_sequences
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
        return {"keys": keys, "log_probs": torch.tensor(list(self.values()))}

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Adds what :meth:`tensors` returned."""
        keys = (key.tobytes() for key in tensors["keys"].numpy())
        self.update(zip(keys, tensors["log_probs"].tolist(), strict=True))

    def share(self) -> None:
        """Gives each rank the sequences of all ranks, and writes the file."""
        for values in _gather_objects(dict(self)):
            self.update(values)
        is_parallel = dist.is_available() and dist.is_initialized()
        if self.path is not None and (not is_parallel or dist.get_rank() == 0):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            written = self.path.with_suffix(".tmp")
            save_file(self.tensors(), written)
            written.replace(self.path)
        if is_parallel:
            dist.barrier()

    def find(self, keys: list[bytes]) -> Tensor:
        """The log-probabilities of sequences, ``[n]`` in float32; raises KeyError for one that is new."""
        if missing := [index for index, key in enumerate(keys) if key not in self]:
            raise KeyError(
                f"the batch must hold sequences whose reference log-probabilities were computed before training, but"
                f" {len(missing)} of its {len(keys)} are new (the first is number {missing[0]}): the data changed"
                " since then, or is not the same in each epoch (random truncation, or mismatched pairs that are made"
                " of each batch). Set precompute_ref_log_probs=False for such data"
            )
        return torch.tensor([self[key] for key in keys])


def _gather_objects(value: Any) -> list[Any]:
    if not (dist.is_available() and dist.is_initialized()):
        return [value]
    everything: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everything, value)
    return everything


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
    totals = _gather_objects(sum_of_bits(model, without_adapters=without_adapters))
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
