"""Wrong files: checkpoints, weights and states that are loaded, exported or resumed from."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
from lightning import LightningModule
from safetensors.torch import save_file
from torch import nn
from torch.distributed import checkpoint as dcp
from torch.utils.data import DataLoader

from lightning_liger import (
    FabricLigerFSDPStrategy,
    LigerFSDPStrategy,
    LigerModelParallelStrategy,
    LigerSingleDeviceStrategy,
    export_pretrained,
    load_pretrained,
)
from lightning_liger.resuming.atomic_io import AtomicCheckpointIO
from lightning_liger.resuming.dataloader import STATE_KEY, resumable
from tests.bad_inputs import row
from tests.lightning_liger.malicious import write_sharded
from tests.valid_calls import Module

MODULE, LINEAR = Module(), nn.Linear(2, 2)
WEIGHTS = {"weight": torch.ones(2, 2), "bias": torch.ones(2)}
INCOMPLETE = "is incomplete, or"
SAFETENSORS = ("model.safetensors", "is not a complete safetensors file")
Write = Callable[[Path], Path]
BREAKS: dict[str, Callable[[bytes], bytes]] = {
    "empty": lambda content: b"",
    "half": lambda content: content[: len(content) // 2],
    "last byte missing": lambda content: content[:-1],
    "text": lambda content: b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 100\n",
    "zeros": lambda content: bytes(len(content)),
}
"""By name, what can happen to the contents of a file."""


def sums() -> list[float]:
    """What a failed call must leave of models."""
    return [float(parameter.sum()) for model in (MODULE, LINEAR) for parameter in model.parameters()]


# What files hold


def saved(value: Any) -> Write:
    def write(tmp_path: Path) -> Path:
        torch.save(value, tmp_path / "file.ckpt")
        return tmp_path / "file.ckpt"

    return write


def full(**changes: Any) -> Write:
    """The checkpoint of ``MODULE``, with other values of some names."""
    weights = MODULE.state_dict() | {name.replace("__", "."): value for name, value in changes.items()}
    return saved({"state_dict": weights, "pytorch-lightning_version": "2.6.0"})


def sharded(tmp_path: Path) -> Path:
    return write_sharded(tmp_path / "folder", optimizer_0={"lr": 0.1})


def other_names(tmp_path: Path) -> Path:
    dcp.save({"weights": {"a": torch.ones(2)}}, checkpoint_id=tmp_path / "folder", no_dist=True)
    return tmp_path / "folder"


def weights(weights: Any = WEIGHTS, *, pickled: bool = False, **files: str | bytes) -> Write:
    """A folder of weights, with other files in it."""

    def write(tmp_path: Path) -> Path:
        save, name = (torch.save, "pytorch_model.bin") if pickled else (save_file, "model.safetensors")
        save(weights, tmp_path / name)
        for name, content in files.items():
            (tmp_path / name).write_bytes(content.encode() if isinstance(content, str) else content)
        return tmp_path

    return write


def breaks(write: Write, kind: str, name: str = "") -> Write:
    def write_broken(tmp_path: Path) -> Path:
        path = write(tmp_path)
        file = path / name if name else path
        file.write_bytes(BREAKS[kind](file.read_bytes()))
        return path

    return write_broken


def with_header(header: bytes) -> Write:
    return weights(**{SAFETENSORS[0]: len(header).to_bytes(8, "little") + header + bytes(16)})


def entry(**changes: Any) -> bytes:
    return json.dumps({"weight": {"dtype": "F32", "shape": [2, 2], "data_offsets": [0, 16], **changes}}).encode()


def wrong_generation_config(tmp_path: Path) -> Path:
    MODULE.model.save_pretrained(tmp_path)
    (tmp_path / "generation_config.json").write_text("{")
    return tmp_path


def twice(tmp_path: Path) -> Path:
    index = {"weight_map": {"weight": "model.safetensors", "bias": "more.safetensors"}}
    save_file(WEIGHTS, tmp_path / "more.safetensors")
    return weights(**{"model.safetensors.index.json": json.dumps(index)})(tmp_path)


def beside_another(tmp_path: Path) -> Path:
    (tmp_path / "out" / "mine").mkdir(parents=True)
    return full()(tmp_path)


# What is called with them


def given(write: Write, call: Callable[[Any], Any]) -> Callable[[Path], None]:
    return lambda tmp_path: call(write(tmp_path))


def exports(write: Write, **changes: Any) -> Callable[[Path], None]:
    def run(tmp_path: Path) -> None:
        arguments = {"module": MODULE, "ckpt_path": write(tmp_path), "output": tmp_path / "out", **changes}
        before = set(tmp_path.rglob("*"))
        try:
            export_pretrained(**arguments)
        finally:
            assert set(tmp_path.rglob("*")) == before

    return run


LOADER = resumable(DataLoader([1, 2, 3]))
IO, SINGLE = AtomicCheckpointIO(), LigerSingleDeviceStrategy()
LOADERS = (SINGLE, LigerFSDPStrategy(), LigerModelParallelStrategy(), FabricLigerFSDPStrategy())
INDEXES = (
    *("{'weight_map'", "", "[1, 2]", '{"metadata": {}}', '{"weight_map": ["model.safetensors"]}', "[" * 100_000),
    *(json.dumps({"weight_map": {"weight": value}}) for value in (5, "../a", "/etc/passwd")),
)
HEADERS = (b"{'weight'", b"[]", entry(dtype="object"), entry(shape=[-2, 2]), entry(data_offsets=[0, 1600]))

# Each with what messages say: weights that are loaded, checkpoints that are exported, any call.
LOADS: list[tuple[Any, ...]] = [
    *((breaks(weights(), kind, "model.safetensors"), *SAFETENSORS) for kind in BREAKS),
    *((breaks(weights(pickled=True), kind, "pytorch_model.bin"), "model.bin", INCOMPLETE) for kind in BREAKS),
    *((with_header(header), *SAFETENSORS) for header in HEADERS),
    *((weights(**{"model.safetensors.index.json": text}), "safetensors.index.json", "weight_map") for text in INDEXES),
    (weights([torch.ones(2)], pickled=True), "must hold tensors by their names", "got [tensor("),
    (weights({"state_dict": WEIGHTS}, pickled=True), "must hold tensors by their names", "['state_dict']"),
    (twice, "more.safetensors has tensors that another file", "bias"),
    (weights(WEIGHTS | {"bias": torch.ones(3)}), "other shapes than the model", "bias (3,) instead of (2,)"),
    (weights({"weight": torch.ones(2, 2)}), "lacks tensors of the model", "bias"),
    *(
        (weights(WEIGHTS | {"bias": bias}, pickled=pickled), "not floating-point: bias", "dtypes")
        for bias, pickled in ((torch.ones(2).int(), False), (torch.ones(2) * 1j, False), (torch.ones(2).int(), True))
    ),
]
EXPORTS: list[tuple[Any, ...]] = [
    *((breaks(full(), kind), "file.ckpt", INCOMPLETE) for kind in BREAKS),
    *((breaks(sharded, kind, ".metadata"), ".metadata", INCOMPLETE) for kind in BREAKS),
    *((breaks(sharded, kind, "__0_0.distcp"), "folder", "incomplete") for kind in BREAKS if "last" not in kind),
    (saved([1, 2]), "file.ckpt is not a Lightning checkpoint", "no dict 'state_dict'", "[1, 2]"),
    (saved({"state_dict": [1]}), "file.ckpt is not a Lightning checkpoint", "{'state_dict': [1]}"),
    (full(model__model__norm__weight=5), "does not fit LlamaForCausalLM", "model.norm.weight is missing"),
    (full(model__more=WEIGHTS["bias"]), "does not fit", "more is not in the"),
    (full(model__model__norm__weight=torch.ones(32).int()), "does not fit", "is torch.int32 instead"),
    (other_names, "folder", "no name starts with"),
    (sharded, "folder does not fit LlamaForCausalLM", "is missing"),
    (beside_another, "new or empty folder", "mine"),
    (weights(), "ckpt_path must be a checkpoint file", "got"),
]
CALLS: list[tuple[Any, ...]] = [
    (lambda tmp_path: export_pretrained(MODULE, *(full()(tmp_path),) * 2), "output must be a folder", "got the file"),
    (exports(full(), ckpt_path="/nowhere"), "ckpt_path", "/nowhere"),
    (exports(full(), module=LightningModule()), "LightningModule.model must be a Hugging Face", "got NoneType"),
    *((exports(full(), max_shard_size=size), "max_shard_size", size, "such as '5GB'") for size in ("big", "-1GB")),
    *((given(breaks(full(), kind), io.load_checkpoint), "file.ckpt", INCOMPLETE) for io in LOADERS for kind in BREAKS),
    *(
        (given(saved(value), SINGLE.load_checkpoint), "file.ckpt is not a checkpoint of Lightning's Trainer", text)
        for value, text in (({"weight": torch.ones(2)}, "['weight']"), ([1, 2], "[1, 2]"), (None, "None"))
    ),
    *(
        (given(breaks(sharded, kind, ".metadata"), each.load_checkpoint), ".metadata", INCOMPLETE)
        for each in LOADERS[1:]
        for kind in BREAKS
    ),
    *((partial(each.load_checkpoint, "/nowhere"), "/nowhere", "no") for each in LOADERS),
    (partial(load_pretrained, LINEAR, "/nowhere"), "/nowhere", "has no weights"),
    (given(saved([1]), partial(load_pretrained, LINEAR)), "folder must be a folder", "got the file"),
    (given(wrong_generation_config, partial(load_pretrained, MODULE.model)), "generation_config.json", "not a valid"),
]
LOADER_STATES: list[tuple[Any, ...]] = [
    (None, "state_dict must be the state of a ResumableDataLoader", "None"),
    ({"start": 3}, "state_dict must be the state of a ResumableDataLoader", "'start'"),
    *(({STATE_KEY: True, "num_batches": value}, "num_batches", repr(value)) for value in (None, -1, 1.5, True)),
]
BAD_INPUTS = [
    *(
        row(call, *mentions, error=(TypeError, ValueError, OSError, UnpicklingError), unchanged=sums)
        for call, *mentions in (
            *((given(write, partial(load_pretrained, LINEAR)), *mentions) for write, *mentions in LOADS),
            *((exports(write), *mentions) for write, *mentions in EXPORTS),
            *CALLS,
        )
    ),
    *(
        row(partial(call, path), "path must be", "a path", repr(path))
        for call in (*(each.load_checkpoint for each in LOADERS), IO.remove_checkpoint, partial(IO.save_checkpoint, {}))
        for path in (None, 5, "", ["a"])
    ),
    row(partial(IO.save_checkpoint, {}, "a.ckpt", {}), "storage_options", "not supported"),
    *(row(partial(LOADER.load_state_dict, each), *mentions) for each, *mentions in LOADER_STATES),
]
