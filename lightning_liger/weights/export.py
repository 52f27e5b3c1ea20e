"""Export of a Lightning checkpoint to a Hugging Face folder."""

import warnings
from pathlib import Path
from typing import Any

import lightning as L
import torch
from torch import Tensor
from torch.distributed.checkpoint import FileSystemReader, load
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from transformers import PreTrainedModel, PreTrainedTokenizerBase

_PREFIX = "model."
_FOLDER_PREFIXES = ("model.", "state_dict.")
"""The prefixes that the strategies ``liger_fsdp`` and ``liger_model_parallel`` give weights in a sharded checkpoint."""


def export_pretrained(
    module: L.LightningModule,
    ckpt_path: str | Path,
    output: str | Path,
    *,
    tokenizer: PreTrainedTokenizerBase | None = None,
    max_shard_size: str = "5GB",
    weights_only: bool = True,
) -> None:
    """Writes the weights of a Lightning checkpoint to a folder that ``from_pretrained`` loads.

    The checkpoint may be a file, or the folder of a sharded checkpoint; neither GPUs nor several processes are needed.
    Written are ``config.json``, ``model.safetensors`` (several files and an index for large models),
    ``generation_config.json`` and the tokenizer, if there is one.

    Args:
        module: Its attribute ``model`` is a Hugging Face model; if it is None, ``configure_model`` is called on the
            meta device to build it. The model is cast to the checkpoint's dtype; its own weights are not used.
        ckpt_path: A checkpoint that Lightning saved, under any strategy.
        output: The folder, created if it does not exist.
        tokenizer: Saved in the same folder.
        max_shard_size: The maximum size of a file, unless a single tensor is larger.
        weights_only: Whether the checkpoint may hold tensors and plain Python objects only, as in :func:`torch.load`.

    Raises:
        FileNotFoundError: If there is no checkpoint at ``ckpt_path``.
        TypeError: If ``module.model`` is not a Hugging Face model.
        ValueError: If ``output`` is a file, or names or shapes of the checkpoint's tensors differ from the model's; the
            message names them.
    """
    output = Path(output)
    if output.is_file():
        raise ValueError(f"output must be a folder, got the file {str(output)!r}")
    weights = _read(Path(ckpt_path), weights_only)
    if getattr(module, "model", None) is None:
        with torch.device("meta"):
            module.configure_model()
    model = getattr(module, "model", None)
    if not isinstance(model, PreTrainedModel):
        raise TypeError(f"{type(module).__name__}.model must be a Hugging Face model, got {type(model).__name__}")
    dtype = next((tensor.dtype for tensor in weights.values() if tensor.is_floating_point()), model.dtype)
    # save_pretrained writes the dtype to config.json. The decorator of transformers' `to` loses its signature.
    model.to(dtype)  # type: ignore[arg-type]
    model.save_pretrained(output, state_dict=_of_model(weights, model, ckpt_path), max_shard_size=max_shard_size)
    if tokenizer is not None:
        tokenizer.save_pretrained(output)


def _read(path: Path, weights_only: bool) -> dict[str, Tensor]:
    """The state dict of the LightningModule."""
    if path.is_file():
        checkpoint = torch.load(path, map_location="cpu", mmap=True, weights_only=weights_only)
        if "state_dict" not in checkpoint:
            raise ValueError(f"{path} is not a Lightning checkpoint: it has no 'state_dict', only {list(checkpoint)}")
        return checkpoint["state_dict"]
    if not (path / ".metadata").is_file():
        raise FileNotFoundError(
            f"ckpt_path must be a checkpoint file or the folder of a sharded one, got {str(path)!r}"
        )
    reader = FileSystemReader(path)
    stored = {
        key: entry
        for key, entry in reader.read_metadata().state_dict_metadata.items()
        if isinstance(entry, TensorStorageMetadata)
    }
    prefix = next((each for each in _FOLDER_PREFIXES if any(key.startswith(each) for key in stored)), None)
    if prefix is None:
        raise ValueError(f"{path} is not a sharded Lightning checkpoint: no name starts with one of {_FOLDER_PREFIXES}")
    weights = {
        key: torch.empty(entry.size, dtype=entry.properties.dtype)
        for key, entry in stored.items()
        if key.startswith(prefix)
    }
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        load(weights, storage_reader=reader, no_dist=True)
    return {key.removeprefix(prefix): tensor for key, tensor in weights.items()}


def _of_model(weights: dict[str, Tensor], model: PreTrainedModel, ckpt_path: Any) -> dict[str, Tensor]:
    """The weights under the model's names, without the second names of tied tensors."""
    found = {name.removeprefix(_PREFIX): tensor for name, tensor in weights.items() if name.startswith(_PREFIX)}
    wanted = model.state_dict(keep_vars=True)
    wrong = sorted(
        [f"{name} is missing" for name in wanted.keys() - found.keys() - model.all_tied_weights_keys.keys()]
        + [f"{name} is not in the model" for name in found.keys() - wanted.keys()]
        + [
            f"{name} is {tuple(found[name].shape)} instead of {tuple(wanted[name].shape)}"
            for name in wanted.keys() & found.keys()
            if found[name].shape != wanted[name].shape
        ]
    )
    if wrong:
        raise ValueError(f"{ckpt_path} does not fit {type(model).__name__}: {', '.join(wrong[:5])}")
    return {name: tensor for name, tensor in found.items() if name not in model.all_tied_weights_keys}
