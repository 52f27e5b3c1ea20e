"""Wrong files: checkpoints, weights and states that are loaded, exported or resumed from."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import nn
from torch.distributed import checkpoint as dcp
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM

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
from lightning_liger.resuming.safe_loading import check_checkpoint
from tests.bad_inputs import row
from tests.lightning_liger.malicious import write_deepspeed, write_sharded
from tests.valid_calls import Module as ModuleOf

SIZES = {"hidden_size": 8, "intermediate_size": 8, "num_attention_heads": 2, "num_key_value_heads": 2, "vocab_size": 16}
MODEL = LlamaForCausalLM(LlamaConfig(num_hidden_layers=1, **SIZES))
LINEAR, WEIGHTS = nn.Linear(2, 2), {"weight": torch.ones(2, 2), "bias": torch.ones(2)}
NORM = "model.model.norm.weight"
INCOMPLETE = "is not a file of torch.save, or incomplete"
SAFETENSORS = ("model.safetensors", "is not a complete safetensors file")
Write = Callable[[Path], Path]
BREAKS: dict[str, Callable[[bytes], bytes]] = {
    "empty": lambda content: b"",
    "first bytes": lambda content: content[:20],
    "half": lambda content: content[: len(content) // 2],
    "last byte missing": lambda content: content[:-1],
    "text": lambda content: b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 100\n",
    "zeros": lambda content: bytes(len(content)),
}
"""By name, what can happen to the contents of a file."""


def leaves_disk(write: Callable[[Path], Any], call: Callable[[Any], Any]) -> Callable[[Path], None]:
    """Calls ``call`` with what ``write`` returned, and checks that files are the same after it."""

    def on_disk(folder: Path) -> dict[Path, bytes | None]:
        return {path: path.read_bytes() if path.is_file() else None for path in folder.rglob("*")}

    def run(tmp_path: Path) -> None:
        written = write(tmp_path)
        before = on_disk(tmp_path)
        try:
            call(written)
        finally:
            assert on_disk(tmp_path) == before

    return run


def sums() -> list[float]:
    """What a failed call must leave of models."""
    return [float(parameter.sum()) for model in (MODEL, LINEAR) for parameter in model.parameters()]


# What files hold


def saved(value: Any) -> Write:
    def write(tmp_path: Path) -> Path:
        torch.save(value, tmp_path / "file.ckpt")
        return tmp_path / "file.ckpt"

    return write


def full(**changes: Any) -> Write:
    """The checkpoint of ``MODEL``, with other values of some names."""
    weights = {f"model.{name}": tensor.clone() for name, tensor in MODEL.state_dict().items()}
    weights |= {name.replace("__", "."): value for name, value in changes.items()}
    return saved({"state_dict": weights, "pytorch-lightning_version": "2.6.0"})


def sharded(tmp_path: Path) -> Path:
    return write_sharded(tmp_path / "folder", optimizer_0={"lr": 0.1})


def other_names(tmp_path: Path) -> Path:
    dcp.save({"weights": {"a": torch.ones(2)}}, checkpoint_id=tmp_path / "folder", no_dist=True)
    return tmp_path / "folder"


def weights(weights: Any = WEIGHTS, *, pickled: bool = False, **files: str | bytes) -> Write:
    """A folder of weights, with other files in it."""

    def write(tmp_path: Path) -> Path:
        folder = tmp_path / "folder"
        folder.mkdir()
        torch.save(weights, folder / "pytorch_model.bin") if pickled else save_file(weights, folder / SAFETENSORS[0])
        for name, content in files.items():
            (folder / name).write_bytes(content.encode() if isinstance(content, str) else content)
        return folder

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


def deepspeed(tmp_path: Path) -> Path:
    write_deepspeed(tmp_path, {})
    (tmp_path / "latest").write_bytes(b"\xff/..")
    return tmp_path


def wrong_generation_config(tmp_path: Path) -> Path:
    MODEL.save_pretrained(tmp_path)
    (tmp_path / "generation_config.json").write_text("{")
    return tmp_path


def twice(tmp_path: Path) -> Path:
    index = {"weight_map": {"weight": "model.safetensors", "bias": "more.safetensors"}}
    folder = weights(**{"model.safetensors.index.json": json.dumps(index)})(tmp_path)
    save_file(WEIGHTS, folder / "more.safetensors")
    return folder


def module() -> ModuleOf:
    made = ModuleOf()
    made.model = MODEL
    return made


def loads(write: Write) -> Callable[[Path], None]:
    return leaves_disk(write, partial(load_pretrained, LINEAR))


def exports(write: Write, **changes: Any) -> Callable[[Path], None]:
    def call(path: Path) -> None:
        export_pretrained(**{"module": module(), "ckpt_path": path, "output": path.parent / "out", **changes})

    return leaves_disk(write, call)


def beside_another(tmp_path: Path) -> Path:
    (tmp_path / "out" / "mine").mkdir(parents=True)
    return full()(tmp_path)


LOADER = resumable(DataLoader([1, 2, 3]))
IO, SINGLE = AtomicCheckpointIO(), LigerSingleDeviceStrategy()
LOADERS = (IO, SINGLE, LigerFSDPStrategy(), LigerModelParallelStrategy(), FabricLigerFSDPStrategy())
INDEXES = (
    *("{'weight_map'", "", "[1, 2]", '{"metadata": {}}', '{"weight_map": ["model.safetensors"]}', "[" * 100_000),
    *(json.dumps({"weight_map": {"weight": value}}) for value in (5, "../a", "/etc/passwd")),
)
HEADERS = (b"{'weight'", b"[]", entry(dtype="object"), entry(shape=[-2, 2]), entry(data_offsets=[0, 1600]))

# What raises ValueError, and what messages say: weights that are loaded, checkpoints that are exported, any call.
LOADS: list[tuple[Any, ...]] = [
    *((breaks(weights(), kind, "model.safetensors"), *SAFETENSORS) for kind in BREAKS),
    *((breaks(weights(pickled=True), kind, "pytorch_model.bin"), "model.bin", INCOMPLETE) for kind in BREAKS),
    *((with_header(header), *SAFETENSORS) for header in HEADERS),
    *((weights(**{"model.safetensors.index.json": text}), "safetensors.index.json", "weight_map") for text in INDEXES),
    (weights([torch.ones(2)], pickled=True), "must hold tensors by their names", "got [tensor("),
    (weights({"state_dict": WEIGHTS}, pickled=True), "must hold tensors by their names", "['state_dict']"),
    (twice, "more.safetensors has tensors that another file", "bias"),
    *(
        (weights(WEIGHTS | {"bias": bias}, pickled=pickled), "not floating-point: bias", "dtypes")
        for bias, pickled in ((torch.ones(2).int(), False), (torch.ones(2) * 1j, False), (torch.ones(2).int(), True))
    ),
]
EXPORTS: list[tuple[Any, ...]] = [
    *((breaks(full(), kind), "file.ckpt", INCOMPLETE) for kind in BREAKS),
    *((breaks(sharded, kind, ".metadata"), ".metadata", "or incomplete") for kind in BREAKS),
    *((breaks(sharded, kind, "__0_0.distcp"), "folder", "incomplete") for kind in BREAKS if "last" not in kind),
    (saved([1, 2]), "file.ckpt is not a Lightning checkpoint", "no 'state_dict'", "[1, 2]"),
    (saved({"state_dict": [1]}), "file.ckpt is not a Lightning checkpoint", "['state_dict']"),
    (full(model__model__norm__weight=5), "does not fit LlamaForCausalLM", "model.norm.weight is missing"),
    (full(model__more=WEIGHTS["bias"]), "does not fit", "more is not in the"),
    (full(model__model__norm__weight=torch.ones(8).int()), "does not fit", "is torch.int32 instead"),
    (other_names, "folder", "no name starts with"),
    (sharded, "folder does not fit LlamaForCausalLM", "is missing"),
]
CALLS: list[tuple[Any, ...]] = [
    (exports(beside_another), "new or empty folder", "mine"),
    (lambda tmp_path: export_pretrained(module(), *(full()(tmp_path),) * 2), "output must be a folder", "got the file"),
    *(
        (exports(full(), max_shard_size=size), "max_shard_size", repr(size), "such as '5GB'")
        for size in ("big", "-1GB")
    ),
    *(
        (leaves_disk(breaks(full(), kind), each.load_checkpoint), "file.ckpt", INCOMPLETE)
        for each in LOADERS
        for kind in BREAKS
    ),
    *(
        (
            leaves_disk(saved(value), SINGLE.load_checkpoint),
            "file.ckpt is not a checkpoint of Lightning's Trainer",
            text,
        )
        for value, text in (({"weight": torch.ones(2)}, "['weight']"), ([1, 2], "[1, 2]"), (None, "None"))
    ),
    *(
        (leaves_disk(breaks(sharded, kind, name), check_checkpoint), name, "incomplete")
        for name in (".metadata", "meta.pt")
        for kind in BREAKS
    ),
    (lambda tmp_path: check_checkpoint(tmp_path), "is not a checkpoint", "no file that ends in .pt"),
    (leaves_disk(deepspeed, check_checkpoint), "latest must hold the name of a folder", "/.."),
]
NOT_FOUND: list[tuple[Any, ...]] = [
    *((partial(each.load_checkpoint, "/nowhere"), "/nowhere", "no") for each in LOADERS),
    (partial(load_pretrained, LINEAR, "/nowhere"), "/nowhere", "has no weights"),
    (exports(full(), ckpt_path="/nowhere"), "ckpt_path", "/nowhere"),
    (exports(weights()), "ckpt_path must be a checkpoint file", "folder"),
]
LOADER_STATE = {STATE_KEY: True, "num_batches": 1, "epoch": None, "random_state": None}
LOADER_STATES: list[tuple[Any, ...]] = [
    (None, "state_dict must be the state of a ResumableDataLoader", "None"),
    ({"start": 3}, "state_dict must be the state of a ResumableDataLoader", "'start'"),
    *((LOADER_STATE | {"num_batches": value}, "num_batches", repr(value)) for value in (None, -1, 1.5, True)),
]
BAD_INPUTS = [
    *(row(loads(write), *mentions, error=ValueError, unchanged=sums) for write, *mentions in LOADS),
    *(row(exports(write), *mentions, error=ValueError, unchanged=sums) for write, *mentions in EXPORTS),
    *(row(call, *mentions, error=ValueError, unchanged=sums) for call, *mentions in CALLS),
    *(row(call, *mentions, error=FileNotFoundError, unchanged=sums) for call, *mentions in NOT_FOUND),
    *(
        row(partial(call, path), "path must be", "a path", repr(path))
        for call in (*(each.load_checkpoint for each in LOADERS), IO.remove_checkpoint, partial(IO.save_checkpoint, {}))
        for path in (None, 5, "", ["a"])
    ),
    row(
        leaves_disk(wrong_generation_config, partial(load_pretrained, MODEL)),
        "generation_config.json", "not a valid JSON file", error=OSError, unchanged=sums,
    ),
    row(loads(saved([1])), "folder must be a folder", "got the file", error=NotADirectoryError, unchanged=sums),
    row(partial(IO.save_checkpoint, {}, "a.ckpt", {}), "storage_options", "not supported"),
    *(row(partial(LOADER.load_state_dict, each), *mentions) for each, *mentions in LOADER_STATES),
]  # fmt: skip
