"""Loading a Hugging Face checkpoint into a model, tensor by tensor; of a sharded tensor each rank reads its shard."""

import json
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from lightning_utilities.core.rank_zero import rank_zero_warn
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import GenerationConfig, PreTrainedModel

from liger_ops.arguments import check_path, shown, wrong_type
from lightning_liger.resuming.safe_loading import load_file

if TYPE_CHECKING:
    from transformers import WeightConverter

Index = tuple[slice, ...]
Place = tuple[nn.Module, str]
"""A module, and the name of a parameter or buffer in it."""
_ATTRIBUTE = "liger_pretrained_weights"
_WEIGHTS = ("model.safetensors", "pytorch_model.bin")
_NUM_NAMED = 5
# Buffers of older checkpoints that models compute themselves.
_OUTDATED = (r"rotary_emb\.inv_freq$", r"(^|\.)position_ids$")


def load_pretrained(model: nn.Module, folder: str | Path) -> None:
    """Loads the weights of a Hugging Face checkpoint folder into ``model``.

    Tensors that have memory are loaded at once. Those on the meta device are loaded when a ``liger*`` strategy
    initializes them, after it sharded the model: each rank then reads its shards only, so the model need not fit into
    the memory of one device, nor of the host::

        def configure_model(self):
            if getattr(self, "model", None) is not None:  # Lightning calls this for each stage
                return
            with torch.device("meta"):
                self.model = AutoModelForCausalLM.from_config(config)
            load_pretrained(self.model, folder)

    Names and layouts are converted as ``from_pretrained`` does, and ``generation_config.json`` is read.

    Args:
        model: Any module. For one that is not from transformers, the folder must use the module's names.
        folder: Has ``model.safetensors`` or ``pytorch_model.bin``, in one file or several with an index.

    Raises:
        FileNotFoundError: If the folder has no weights, or lacks a file that its index names.
        NotADirectoryError: If ``folder`` is a file.
        OSError: If ``generation_config.json`` cannot be read.
        pickle.UnpicklingError: If ``pytorch_model.bin`` holds anything but tensors.
        TypeError: For arguments of a wrong type.
        ValueError: If tensors of the model are missing in the folder or have another shape or kind of dtype, if a file
            is not complete, or if the model is quantized; the message names them. Nothing is loaded then.
    """
    if not isinstance(model, nn.Module):
        raise wrong_type("model", "a module", model)
    check_path("folder", folder)
    weights = PretrainedWeights(Path(folder), _found(model, Path(folder)))
    if isinstance(model, PreTrainedModel) and (Path(folder) / "generation_config.json").is_file():
        model.generation_config = GenerationConfig.from_pretrained(folder)
    for place in weights.places:  # in this order, in which each conversion is made once
        if not getattr(*place).is_meta:
            weights.fill(*place)
    if any(getattr(*place).is_meta for place in weights.places):
        setattr(model, _ATTRIBUTE, weights)


def take_pretrained(root: nn.Module) -> "dict[Place, PretrainedWeights]":
    """Removes what :func:`load_pretrained` deferred in ``root`` and its modules, and returns each tensor's weights."""
    deferred = [vars(module).pop(_ATTRIBUTE) for module in root.modules() if _ATTRIBUTE in vars(module)]
    return {place: weights for weights in reversed(deferred) for place in weights.places}


def share_pretrained(model: nn.Module, other: nn.Module, place: Place, copies: list[Place]) -> None:
    """Makes ``copies`` in ``other`` start as the tensor ``place`` in ``model``, if its values are deferred."""
    for module in model.modules():
        weights = vars(module).get(_ATTRIBUTE)
        if weights is not None and place in weights.places:
            own = vars(other).setdefault(_ATTRIBUTE, PretrainedWeights(weights.folder, {}))
            own.places.update(dict.fromkeys(copies, weights.places[place]))


@dataclass(eq=False)
class PretrainedWeights:
    """The checkpoint tensors of each tensor of a model, unread."""

    folder: Path
    places: "dict[Place, list[tuple[str, Source]]]"
    """The names and values in the checkpoint; tied tensors may have several."""
    _converted: "tuple[_Conversion, dict[str, Tensor]] | None" = None

    @torch.no_grad()
    def fill(self, module: nn.Module, name: str) -> None:
        """Reads the values of ``module``'s tensor ``name``, or of this rank's shard of it, into that tensor."""
        local, index = own_part(getattr(module, name))
        if not local.numel():
            return
        (first, source), *others = self.places[module, name]
        value = self._read(first, source, index)
        for other, source in others:
            if not torch.equal(value, self._read(other, source, index)):
                raise ValueError(
                    f"{self.folder} has different weights for {first!r} and {other!r}, which the model ties: expected"
                    " equal ones, or tie_word_embeddings=False in its config"
                )
        local.copy_(value)

    def _read(self, name: str, source: "Source", index: Index) -> Tensor:
        if not isinstance(source, _Conversion):
            return source[index] if index else source[...]
        if self._converted is None or self._converted[0] is not source:
            self._converted = None  # frees the last one before the next is read
            self._converted = source, source.convert(lambda part: part[...])
        return self._converted[1][name][index]


@dataclass(eq=False)
class _Conversion:
    """Checkpoint tensors that transformers converts to one or several tensors of the model."""

    model: PreTrainedModel
    name: str
    converter: "WeightConverter"
    dtype: torch.dtype
    parts: list[tuple[str, str, Any]] = field(default_factory=list)
    """Key in the checkpoint, the pattern that it matched, and the unread tensor."""

    def convert(self, read: Callable[[Any], Tensor]) -> dict[str, Tensor]:
        """The model's tensors by name."""
        converter = deepcopy(self.converter)
        for key, pattern, part in self.parts:
            # The converter takes a function in place of a future, and calls it when it needs the tensor.
            future: Any = partial(lambda part: read(part).to(self.dtype), part)
            converter.add_tensor(self.name, key, pattern, future)
        converted = converter.convert(self.name, model=self.model, config=self.model.config)
        return {name: value[0] if isinstance(value, list) else value for name, value in converted.items()}

    @cached_property
    def shapes(self) -> dict[str, torch.Size]:
        """Those of the model's tensors by name."""
        made = self.convert(lambda part: torch.empty(_shape_and_kind(part)[0], device="meta"))
        return {name: value.shape for name, value in made.items()}


Source = Any
"""A tensor of a file, read when it is indexed, or a :class:`_Conversion`."""


def own_part(tensor: Tensor) -> tuple[Tensor, Index]:
    """This rank's shard of ``tensor``, and its index in the whole tensor."""
    if not isinstance(tensor, DTensor):
        return tensor.detach(), tuple(slice(0, size) for size in tensor.shape)
    (chunk,) = tensor.__create_chunk_list__()  # as distributed checkpoints ask for it
    index = tuple(slice(start, start + size) for start, size in zip(chunk.offsets, chunk.sizes, strict=True))
    return cast(DTensor, tensor.detach()).to_local(), index


def _found(model: nn.Module, folder: Path) -> "dict[Place, list[tuple[str, Source]]]":
    """The places of :class:`PretrainedWeights`; warns of what the model lacks, and raises if it does not fit."""
    if getattr(getattr(model, "config", None), "quantization_config", None) is not None:
        raise ValueError(
            f"the model for {folder} has a quantization_config: quantized weights cannot be trained, expected a"
            " checkpoint with floating-point weights"
        )
    places = _places(model)
    wanted: dict[str, Tensor] = {name: getattr(*place) for name, place in places.items()}
    found, unexpected = _sources(model, wanted, _open(folder))
    _check_shapes_and_dtypes(folder, wanted, found)
    # A tied tensor is one object with several names, and a checkpoint may use any of them.
    available: dict[int, list[str]] = {id(tensor): [] for tensor in wanted.values()}
    for name, tensor in wanted.items():
        available[id(tensor)] += [name] if name in found else []
    missing = [name for name, tensor in wanted.items() if not available[id(tensor)]]
    if names := _without(missing, getattr(model, "_keys_to_ignore_on_load_missing", None)):
        raise ValueError(f"{folder} lacks tensors of the model: {_shortened(names)}")
    ignored = getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ()
    if names := _without(unexpected, (*ignored, *_OUTDATED)):
        rank_zero_warn(f"{folder} has tensors that the model does not have: {_shortened(names)}")
    return {
        place: [(each, found[each]) for each in names]
        for name, place in places.items()
        if (names := available[id(wanted[name])])
    }


def _places(model: nn.Module) -> dict[str, Place]:
    """Module and name in the module of each tensor of the state dict."""
    tensors = (name for name, value in model.state_dict(keep_vars=True).items() if isinstance(value, Tensor))
    return {name: (model.get_submodule(name.rpartition(".")[0]), name.rpartition(".")[2]) for name in tensors}


def _open(folder: Path) -> dict[str, Any]:
    """The tensors in the files, unread, by their names in the files."""
    if folder.exists() and not folder.is_dir():
        raise NotADirectoryError(f"folder must be a folder with weights, got the file {str(folder)!r}")
    for name in _WEIGHTS:
        index = folder / f"{name}.index.json"
        if not index.is_file() and not (folder / name).is_file():
            continue
        names = sorted(set(_weight_map(index).values())) if index.is_file() else [name]
        tensors: dict[str, Any] = {}
        for file in (folder / each for each in names):
            if not file.is_file():
                raise FileNotFoundError(f"{index} names {file.name!r}, which does not exist")
            opened = _open_file(file)
            if twice := sorted(tensors.keys() & opened.keys()):
                raise ValueError(f"{file} has tensors that another file of {folder} has too: {_shortened(twice)}")
            tensors |= opened
        return tensors
    raise FileNotFoundError(f"{folder} has no weights: expected one of {list(_WEIGHTS)}, or their index")


def _weight_map(index: Path) -> dict[str, str]:
    try:
        weight_map = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        if not all(isinstance(file, str) and Path(file).name == file for file in weight_map.values()):
            raise ValueError("weight_map must give names of files in the folder")
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(
            f"{index} must be JSON with the file of each tensor in 'weight_map': {type(error).__name__}: {error}"
        ) from error
    return weight_map


@contextmanager
def naming_damaged(path: Any) -> Iterator[None]:
    """Names ``path`` in errors of safetensors."""
    try:
        yield
    except SafetensorError as error:
        raise ValueError(f"{path} is not a complete safetensors file, or holds one that is not: {error}") from error


def _open_file(file: Path) -> dict[str, Any]:
    if file.suffix == ".safetensors":
        with naming_damaged(file):
            opened = safe_open(file, framework="pt")
        return {key: opened.get_slice(key) for key in opened.keys()}  # noqa: SIM118 - not a mapping
    tensors = load_file(file, weights_only=True)
    if not isinstance(tensors, dict) or not all(isinstance(value, Tensor) for value in tensors.values()):
        keys = list(tensors) if isinstance(tensors, dict) else tensors
        raise ValueError(f"{file} must hold tensors by their names, got {shown(keys)}")
    return tensors


def _shape_and_kind(source: Any) -> tuple[tuple[int, ...], bool]:
    """The shape of an unread tensor, and whether it is floating-point."""
    if isinstance(source, Tensor):
        return tuple(source.shape), source.is_floating_point()
    # The dtypes of safetensors that are floating-point are F64, F32, F16, BF16, F8_E4M3 …
    return tuple(source.get_shape()), re.match(r"F\d|BF", source.get_dtype()) is not None


def _sources(
    model: nn.Module, wanted: dict[str, Tensor], tensors: dict[str, Any]
) -> tuple[dict[str, Source], list[str]]:
    """Checkpoint tensors by the model's names, after transformers' conversion, and the names that the model lacks."""
    if not isinstance(model, PreTrainedModel):
        return {name: tensor for name, tensor in tensors.items() if name in wanted}, sorted(tensors.keys() - wanted)
    # Internal to transformers, so not at import.
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightConverter, WeightRenaming, dot_natural_key, rename_source_key

    rules = get_model_conversion_mapping(model)
    renamings = [rule for rule in rules if isinstance(rule, WeightRenaming)]
    converters = [rule for rule in rules if isinstance(rule, WeightConverter)]
    converter_by_pattern = {pattern: converter for converter in converters for pattern in converter.source_patterns}
    prefix = model.base_model_prefix
    found: dict[str, Source] = {}
    conversions: dict[str, _Conversion] = {}
    unexpected = []
    for key in sorted(tensors, key=dot_natural_key):  # the order in which groups of renamings expect them
        name, pattern = rename_source_key(key, renamings, converters, prefix, wanted)
        if name not in wanted and key in wanted:
            name, pattern = rename_source_key(key, [], [], prefix, wanted)
        if name not in wanted:
            unexpected.append(key)
        elif pattern is None:
            found[name] = tensors[key]
        else:
            new = _Conversion(model, name, converter_by_pattern[pattern], wanted[name].dtype)
            conversions.setdefault(name, new).parts.append((key, pattern, tensors[key]))
    for conversion in conversions.values():
        found |= dict.fromkeys(filter(wanted.__contains__, conversion.shapes), conversion)
    return found, unexpected


def _check_shapes_and_dtypes(folder: Path, wanted: dict[str, Tensor], found: dict[str, Source]) -> None:
    shapes: list[str] = []
    kinds: list[str] = []
    for name, source in found.items():
        is_converted, want = isinstance(source, _Conversion), wanted[name]
        shape = tuple(source.shapes[name]) if is_converted else _shape_and_kind(source)[0]
        if shape != tuple(want.shape):
            shapes.append(f"{name} {shape} instead of {tuple(want.shape)}")
        parts = [part for _, _, part in source.parts] if is_converted else [source]
        if any(_shape_and_kind(part)[1] != want.is_floating_point() for part in parts):
            kinds.append(name)
    if shapes:
        raise ValueError(f"{folder} has tensors of other shapes than the model: {_shortened(shapes)}")
    if kinds:
        kind = "not floating-point" if wanted[kinds[0]].is_floating_point() else "floating-point"
        raise ValueError(f"{folder} has tensors of other kinds of dtypes than the model, {kind}: {_shortened(kinds)}")


def _without(names: list[str], patterns: Any) -> list[str]:
    return [name for name in names if not any(re.search(pattern, name) for pattern in patterns or ())]


def _shortened(items: list[str]) -> str:
    rest = len(items) - _NUM_NAMED
    return ", ".join(items[:_NUM_NAMED]) + (f" and {rest} more" if rest > 0 else "")
