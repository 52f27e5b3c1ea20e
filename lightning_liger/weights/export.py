"""Export of a Lightning checkpoint to a Hugging Face folder."""

import re
import warnings
from collections.abc import Collection
from pathlib import Path
from typing import Any

import lightning as L
import torch
from huggingface_hub import HfApi
from torch import Tensor, nn
from torch.distributed.checkpoint import FileSystemReader, load
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from liger_ops.arguments import check_bool, check_integer, check_path, check_text, shown, wrong_type, wrong_value
from lightning_liger.hub import is_repository, naming_repository
from lightning_liger.resuming.atomic_io import replace
from lightning_liger.resuming.safe_loading import check_checkpoint, load_file, loading_safely
from lightning_liger.weights.card import model_card

_PREFIX = "model."
_ADAPTED = ".base_layer."
"""In the names that peft gives the weights of modules with adapters."""
_FOLDER_PREFIXES = ("model.", "state_dict.")
"""The prefixes that the strategies ``liger_fsdp`` and ``liger_model_parallel`` give weights in a sharded checkpoint."""


def export_pretrained(
    module: L.LightningModule,
    ckpt_path: str | Path,
    output: str | Path,
    *,
    tokenizer: PreTrainedTokenizerBase | None = None,
    max_shard_size: str | int = "5GB",
    weights_only: bool = True,
    data: str | L.LightningDataModule | None = None,
    push_to_hub: str | None = None,
    private: bool = False,
) -> None:
    """Writes the weights of a Lightning checkpoint to a folder that ``from_pretrained`` loads.

    The checkpoint may be a file, or the folder of a sharded checkpoint; neither GPUs nor several processes are needed.
    Written are ``config.json``, ``model.safetensors`` (several files and an index for large models),
    ``generation_config.json``, the tokenizer, if there is one, and ``README.md``, a model card with the base model, the
    data, the module and its settings, the steps, the tokens if :class:`~lightning_liger.LigerMonitor` counted them, and
    versions.

    Adapters of peft are merged into the weights that they belong to.

    Args:
        module: Its attribute ``model`` is a Hugging Face model, with or without adapters of peft; if it is None,
            ``configure_model`` is called on the meta device to build it. The model is cast to the checkpoint's dtype;
            its own weights are not used.
        ckpt_path: A checkpoint that Lightning saved, under any strategy.
        output: The folder, created if it does not exist; it must be empty. It is there once it is complete.
        tokenizer: Saved in the same folder.
        max_shard_size: The maximum size of a file, as text or in bytes, unless a single tensor is larger.
        weights_only: Whether the checkpoint may hold tensors and plain Python objects only, as in :func:`torch.load`.
        data: What the model was trained on, for the card: a path, ``owner/name`` of a data set on the Hub, or the data
            module.
        push_to_hub: ``owner/name`` of a repository on the Hub, which gets the files too. It is created if it does not
            exist, before work starts.
        private: Whether only its owner may see this repository.

    Raises:
        ConnectionError: If the Hub cannot be reached.
        PermissionError: If the user of the token, or of the login, may not write to ``push_to_hub``.
        FileNotFoundError: If there is no checkpoint at ``ckpt_path``.
        RuntimeError: If it cannot be saved, because the disk is full for example.
        pickle.UnpicklingError: With ``weights_only``, if the checkpoint holds objects of other classes, and for a
            ``.metadata`` that does in any case; the message names the class, and how to allow it.
        TypeError: If ``module.model`` is not a Hugging Face model, and for arguments of a wrong type.
        ValueError: If ``output`` is a file or holds files, if the checkpoint is not complete, and if names, shapes or
            kinds of dtypes of the checkpoint's tensors differ from the model's; the message names them. If ``private``
            is set without ``push_to_hub``, or for a repository that is public.
    """
    if not isinstance(module, L.LightningModule):
        raise wrong_type("module", "a LightningModule", module)
    check_path("ckpt_path", ckpt_path)
    check_path("output", output)
    folder = Path(output)
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"output must be a folder, got the file {str(output)!r}")
    if folder.is_dir() and (files := sorted(file.name for file in folder.iterdir())):
        raise ValueError(f"output must be a new or empty folder, got {str(output)!r}, which holds {shown(files)}")
    if tokenizer is not None and not callable(getattr(tokenizer, "save_pretrained", None)):
        raise wrong_type("tokenizer", "a Hugging Face tokenizer or None", tokenizer)
    if isinstance(max_shard_size, str):
        if not re.fullmatch(r"\d+(\.\d+)? *[KMGT]B", max_shard_size.upper()):
            raise wrong_value("max_shard_size", "a size such as '5GB' or '500MB'", max_shard_size)
    else:
        check_integer("max_shard_size", max_shard_size, at_least=1)
    check_bool("weights_only", weights_only)
    if not isinstance(data, L.LightningDataModule):
        check_text("data", data, optional=True)
    check_bool("private", private)
    _prepare_repository(push_to_hub, private)
    output, checkpoint = Path(output).resolve(), contents(Path(ckpt_path), weights_only)
    weights = _read(Path(ckpt_path), checkpoint)
    if getattr(module, "hparams", {}).get("quantization") is not None:
        weights = _with_base(module, weights)
    if getattr(module, "model", None) is None:
        with torch.device("meta"):
            module.configure_model()
    model = getattr(module, "model", None)
    is_adapted = callable(getattr(model, "merge_and_unload", None))
    if is_adapted:
        model = _merged(weights, model, ckpt_path)
    if not isinstance(model, PreTrainedModel):
        raise TypeError(f"{type(module).__name__}.model must be a Hugging Face model, got {type(model).__name__}")
    dtype = next((tensor.dtype for tensor in weights.values() if tensor.is_floating_point()), model.dtype)
    state_dict = _untied(model) if is_adapted else _fitting(weights, model, ckpt_path, model.all_tied_weights_keys)
    # save_pretrained writes the dtype to config.json. The decorator of transformers' `to` loses its signature.
    model.to(dtype)  # type: ignore[arg-type]

    def save(folder: Path) -> None:
        model.save_pretrained(folder, state_dict=state_dict, max_shard_size=max_shard_size)
        if tokenizer is not None:
            tokenizer.save_pretrained(folder)
        model_card(module, checkpoint, data).save(folder / "README.md")

    replace(output, save)
    if push_to_hub is not None:
        with naming_repository("push_to_hub", push_to_hub):
            HfApi().upload_folder(repo_id=push_to_hub, folder_path=output, commit_message="Export by lightning-liger")


def _with_base(module: Any, adapters: dict[str, Tensor]) -> dict[str, Tensor]:
    """The weights of a module whose checkpoint holds adapters of a quantized model: with those before quantization."""
    if getattr(module, "model", None) is not None:
        raise wrong_value("module", "one whose model is not built yet, as it is quantized", type(module).__name__)
    module.quantizes_base = False
    module.configure_model()
    return {**module.state_dict(), **adapters}


def contents(ckpt_path: Path, weights_only: bool | None) -> dict[str, Any]:
    """The checkpoint, of a sharded one all but tensors; empty if these are not in a file of their own."""
    if not ckpt_path.exists():
        raise FileNotFoundError(
            f"ckpt_path must be a checkpoint file or the folder of a sharded one, got '{ckpt_path}'"
        )
    file = next(ckpt_path.glob("*.pt"), None) if ckpt_path.is_dir() else ckpt_path
    found = {} if file is None else load_file(file, weights_only)
    if not isinstance(found, dict) or (file == ckpt_path and not isinstance(found.get("state_dict"), dict)):
        raise ValueError(f"{file} is not a Lightning checkpoint: no dict 'state_dict' in {shown(found)}")
    return found


def _prepare_repository(name: Any, private: bool) -> None:
    check_text("push_to_hub", name, optional=True)
    if name is None and private:
        raise wrong_value("private", "False without push_to_hub", private)
    if name is None:
        return
    if not is_repository(name):
        raise wrong_value("push_to_hub", "owner/name of a repository on the Hub", name)
    with naming_repository("push_to_hub", name):
        HfApi().create_repo(name, private=private, exist_ok=True)
        if private and not HfApi().model_info(name).private:
            raise wrong_value("private", f"False, as the repository {name!r} exists and is public", private)


def _read(path: Path, checkpoint: dict[str, Any]) -> dict[str, Tensor]:
    if path.is_file():
        return {name: value for name, value in checkpoint["state_dict"].items() if isinstance(value, Tensor)}
    metadata = path / ".metadata"
    if not metadata.is_file():
        raise FileNotFoundError(f"ckpt_path must be a checkpoint file or the folder of a sharded one, got '{path}'")
    check_checkpoint(path)
    reader = FileSystemReader(path)
    entries = reader.read_metadata().state_dict_metadata.items()
    stored = {key: entry for key, entry in entries if isinstance(entry, TensorStorageMetadata)}
    prefix = next((each for each in _FOLDER_PREFIXES if any(key.startswith(each) for key in stored)), None)
    if prefix is None:
        raise ValueError(f"{path} is not a sharded Lightning checkpoint: no name starts with one of {_FOLDER_PREFIXES}")
    own = ((key, entry) for key, entry in stored.items() if key.startswith(prefix))
    weights = {key: torch.empty(entry.size, dtype=entry.properties.dtype) for key, entry in own}
    with warnings.catch_warnings(), loading_safely(path):
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        load(weights, storage_reader=reader, no_dist=True)
    return {key.removeprefix(prefix): tensor for key, tensor in weights.items()}


def _fitting(weights: dict[str, Tensor], model: nn.Module, ckpt_path: Any, tied: Collection[str]) -> dict[str, Tensor]:
    """The weights under the model's names, without those of ``tied``, the second names of tied tensors."""
    found = {name.removeprefix(_PREFIX): tensor for name, tensor in weights.items() if name.startswith(_PREFIX)}
    wanted = model.state_dict(keep_vars=True)
    wrong = [f"{name} is missing" for name in wanted.keys() - found.keys() - set(tied)]
    wrong += [f"{name} is not in the model" for name in found.keys() - wanted.keys()]
    for name in wanted.keys() & found.keys():
        got, want = found[name], wanted[name]
        if got.shape != want.shape:
            wrong.append(f"{name} is {tuple(got.shape)} instead of {tuple(want.shape)}")
        elif got.is_floating_point() != want.is_floating_point():
            wrong.append(f"{name} is {got.dtype} instead of {want.dtype}")
    if wrong:
        raise ValueError(f"{ckpt_path} does not fit {type(model).__name__}: {', '.join(sorted(wrong)[:5])}")
    return {name: tensor for name, tensor in found.items() if name not in tied}


def _merged(weights: dict[str, Tensor], model: Any, ckpt_path: Any) -> Any:
    """The model that has adapters of peft, without them: with weights that include them."""
    first_names: dict[int, str] = {}
    tied = {
        name: first
        for name, tensor in model.state_dict(keep_vars=True).items()
        if (first := first_names.setdefault(id(tensor), name)) != name
    }
    found = _fitting(weights, model, ckpt_path, tied)
    for name, first in tied.items():
        is_changed = any(_ADAPTED in each for each in (name, first))  # in place, which the other must not see
        found[name] = found[first].clone() if is_changed else found[first]
    model.load_state_dict(found, assign=True)
    return model.merge_and_unload()


def _untied(model: PreTrainedModel) -> dict[str, Tensor]:
    """The weights without the second names of tied tensors, which are no longer tied if one of them has changed."""
    weights = model.state_dict()
    tied = model.all_tied_weights_keys
    if all(torch.equal(weights[name], weights[first]) for name, first in tied.items()):
        return {name: tensor for name, tensor in weights.items() if name not in tied}
    model.config.tie_word_embeddings = False
    return weights
