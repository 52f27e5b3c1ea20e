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
from tests.lightning_liger.files import BREAKS, broken, leaves_disk
from tests.lightning_liger.malicious import write_deepspeed, write_sharded
from tests.valid_calls import Module as ModuleOf

SIZES = {"hidden_size": 8, "intermediate_size": 8, "num_attention_heads": 2, "num_key_value_heads": 2, "vocab_size": 16}
MODEL = LlamaForCausalLM(LlamaConfig(num_hidden_layers=1, **SIZES))
LINEAR, WEIGHTS = nn.Linear(2, 2), {"weight": torch.ones(2, 2), "bias": torch.ones(2)}
NORM = "model.model.norm.weight"
INCOMPLETE = "is not a file of torch.save, or incomplete"
SAFETENSORS = ("model.safetensors", "is not a complete safetensors file")
FLOATING = ("not floating-point: bias", "dtypes")
Change = Callable[[Path], Any]


def sums() -> list[float]:
    """What a failed call must leave of models."""
    return [float(parameter.sum()) for model in (MODEL, LINEAR) for parameter in model.parameters()]


def module() -> ModuleOf:
    made = ModuleOf()
    made.model = MODEL
    return made


def saved(value: Any) -> Callable[[Path], Path]:
    def write(tmp_path: Path) -> Path:
        torch.save(value, tmp_path / "file.ckpt")
        return tmp_path / "file.ckpt"

    return write


def full(change: Callable[[dict[str, Any]], Any] = lambda weights: None) -> Callable[[Path], Path]:
    """The checkpoint of ``MODEL``."""
    weights = {f"model.{name}": tensor.clone() for name, tensor in MODEL.state_dict().items()}
    change(weights)
    return saved({"state_dict": weights, "pytorch-lightning_version": "2.6.0"})


def sharded(change: Change = lambda folder: None) -> Callable[[Path], Path]:
    def write(tmp_path: Path) -> Path:
        folder = write_sharded(tmp_path / "folder", optimizer_0={"lr": 0.1})
        change(folder)
        return folder

    return write


def breaks(write: Callable[[Path], Path], kind: str, name: str = "") -> Callable[[Path], Path]:
    def write_broken(tmp_path: Path) -> Path:
        path = write(tmp_path)
        broken(path / name if name else path, kind)
        return path

    return write_broken


def other_names(tmp_path: Path) -> Path:
    dcp.save({"weights": {"a": torch.ones(2)}}, checkpoint_id=tmp_path / "folder", no_dist=True)
    return tmp_path / "folder"


def filled(tmp_path: Path) -> Path:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine.txt").write_text("keep")
    return tmp_path / "out"


def deepspeed(tmp_path: Path) -> Path:
    write_deepspeed(tmp_path, {})
    (tmp_path / "latest").write_bytes(b"\xff/..")
    return tmp_path


def loads(change: Change, weights: Any = WEIGHTS, *, pickled: bool = False) -> Callable[[Path], None]:
    """Loads a folder of weights, after ``change``, into ``LINEAR``."""

    def write(tmp_path: Path) -> Path:
        folder = tmp_path / "folder"
        folder.mkdir()
        if pickled:
            torch.save(weights, folder / "pytorch_model.bin")
        else:
            save_file(weights, folder / "model.safetensors")
        change(folder)
        return folder

    return leaves_disk(write, partial(load_pretrained, LINEAR))


def indexed(content: Any) -> Callable[[Path], None]:
    text = content if isinstance(content, str) else json.dumps(content)
    return loads(lambda folder: (folder / "model.safetensors.index.json").write_text(text))


def with_header(header: bytes) -> Callable[[Path], None]:
    content = len(header).to_bytes(8, "little") + header + bytes(16)
    return loads(lambda folder: (folder / "model.safetensors").write_bytes(content))


def entry(**changes: Any) -> bytes:
    return json.dumps({"weight": {"dtype": "F32", "shape": [2, 2], "data_offsets": [0, 16], **changes}}).encode()


def wrong_generation_config(tmp_path: Path) -> Path:
    MODEL.save_pretrained(tmp_path)
    (tmp_path / "generation_config.json").write_text("{")
    return tmp_path


def twice(folder: Path) -> None:
    save_file(WEIGHTS, folder / "more.safetensors")
    index = {"weight_map": {"weight": "model.safetensors", "bias": "more.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def exports(write: Callable[[Path], Path]) -> Callable[[Path], None]:
    return leaves_disk(write, lambda path: export_pretrained(module(), path, path.parent / "out"))


def exports_with(**changes: Any) -> Callable[[Path], None]:
    def call(path: Path) -> None:
        export_pretrained(**{"module": module(), "ckpt_path": path, "output": path.parent / "out", **changes})

    return leaves_disk(full(), call)


LOADER = resumable(DataLoader([1, 2, 3]))
IO, SINGLE = AtomicCheckpointIO(), LigerSingleDeviceStrategy()
LOADERS = (IO, SINGLE, LigerFSDPStrategy(), LigerModelParallelStrategy(), FabricLigerFSDPStrategy())

# Calls that raise ValueError, and what messages say.
LOADING: list[tuple[Any, ...]] = [
    *((loads(lambda folder, kind=kind: broken(folder / "model.safetensors", kind)), *SAFETENSORS) for kind in BREAKS),
    *(
        (
            loads(lambda folder, kind=kind: broken(folder / "pytorch_model.bin", kind), pickled=True),
            "model.bin",
            INCOMPLETE,
        )
        for kind in BREAKS
    ),
    *(
        (with_header(header), *SAFETENSORS)
        for header in (b"{'weight'", b"[]", entry(dtype="object"), entry(shape=[-2, 2]), entry(data_offsets=[0, 1600]))
    ),
    *(
        (indexed(content), "model.safetensors.index.json", "weight_map")
        for content in (
            "{'weight_map'",
            "",
            [1, 2],
            {"metadata": {}},
            {"weight_map": ["model.safetensors"]},
            "[" * 100_000,
            {"weight_map": {"weight": 5}},
            {"weight_map": {"weight": "../a"}},
            {"weight_map": {"weight": "/etc/passwd"}},
        )
    ),
    (loads(lambda _: None, [torch.ones(2)], pickled=True), "must hold tensors by their names", "got [tensor("),
    (
        loads(lambda _: None, {"state_dict": WEIGHTS}, pickled=True),
        "must hold tensors by their names",
        "['state_dict']",
    ),
    (loads(twice), "more.safetensors has tensors that another file", "bias"),
    (loads(lambda _: None, {"bias": torch.ones(2)}), "lacks tensors of the model", "weight"),
    (loads(lambda _: None, WEIGHTS | {"bias": torch.ones(3)}), "bias (3,) instead of (2,)", "other shapes"),
    (loads(lambda _: None, WEIGHTS | {"bias": torch.ones(2).int()}), *FLOATING),
    (loads(lambda _: None, WEIGHTS | {"bias": torch.ones(2) * 1j}), *FLOATING),
    (loads(lambda _: None, WEIGHTS | {"bias": torch.ones(2).int()}, pickled=True), *FLOATING),
    *((exports(breaks(full(), kind)), "file.ckpt", INCOMPLETE) for kind in BREAKS),
    *((exports(breaks(sharded(), kind, ".metadata")), ".metadata", "or incomplete") for kind in BREAKS),
    *(
        (exports(breaks(sharded(), kind, "__0_0.distcp")), "folder", "incomplete")
        for kind in BREAKS
        if "last" not in kind
    ),
    (exports(saved([1, 2])), "file.ckpt is not a Lightning checkpoint", "no 'state_dict'", "[1, 2]"),
    (exports(saved({"state_dict": [1]})), "file.ckpt is not a Lightning checkpoint", "['state_dict']"),
    (exports(full(lambda weights: weights.pop(NORM))), "does not fit LlamaForCausalLM", "model.norm.weight is missing"),
    (exports(full(lambda weights: weights.update({NORM: 5}))), "does not fit", "model.norm.weight is missing"),
    (
        exports(full(lambda weights: weights.update({"model.more": WEIGHTS["bias"]}))),
        "does not fit",
        "more is not in the",
    ),
    (exports(full(lambda weights: weights.update({NORM: torch.ones(2)}))), "does not fit", "is (2,) instead of (8,)"),
    (
        exports(full(lambda weights: weights.update({NORM: torch.ones(8).int()}))),
        "does not fit",
        "is torch.int32 instead",
    ),
    (exports(other_names), "folder", "no name starts with"),
    (exports(sharded()), "folder does not fit LlamaForCausalLM", "is missing"),
    (
        lambda tmp_path: export_pretrained(module(), full()(tmp_path), filled(tmp_path)),
        "new or empty folder",
        "mine.txt",
    ),
    (lambda tmp_path: export_pretrained(module(), *(full()(tmp_path),) * 2), "output must be a folder", "got the file"),
    *(
        (exports_with(max_shard_size=size), "max_shard_size", repr(size), "such as '5GB'")
        for size in ("big", "-1GB", "5GiB")
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
        (leaves_disk(breaks(sharded(), kind, name), check_checkpoint), name, "incomplete")
        for name in (".metadata", "meta.pt")
        for kind in BREAKS
    ),
    (lambda tmp_path: check_checkpoint(tmp_path), "is not a checkpoint", "no file that ends in .pt"),
    (leaves_disk(deepspeed, check_checkpoint), "latest must hold the name of a folder", "/.."),
]
NOT_FOUND: list[tuple[Any, ...]] = [
    *((partial(each.load_checkpoint, "/nowhere"), "/nowhere", "no") for each in LOADERS),
    (partial(load_pretrained, LINEAR, "/nowhere"), "/nowhere", "has no weights"),
    (indexed({"weight_map": {"weight": "gone.safetensors"}}), "'gone.safetensors', which does not exist", "index.json"),
    (exports_with(ckpt_path="/nowhere"), "ckpt_path", "/nowhere"),
    (
        exports(lambda tmp_path: filled(tmp_path).rename(tmp_path / "folder")),
        "ckpt_path must be a checkpoint file",
        "folder",
    ),
    (exports(sharded(lambda folder: (folder / "__0_0.distcp").unlink())), "__0_0.distcp", "No such file"),
]
PATHS = (None, 5, "", ["a"])
LOADER_STATES: list[tuple[Any, ...]] = [
    (None, "state_dict must be the state of a ResumableDataLoader", "None"),
    ({"start": 3}, "state_dict must be the state of a ResumableDataLoader", "'start'"),
    *(
        ({STATE_KEY: True, "num_batches": value, "epoch": None, "random_state": None}, "num_batches", repr(value))
        for value in (None, -1, 1.5, True)
    ),
]
BAD_INPUTS = [
    *(row(call, *mentions, error=ValueError, unchanged=sums) for call, *mentions in LOADING),
    *(row(call, *mentions, error=FileNotFoundError, unchanged=sums) for call, *mentions in NOT_FOUND),
    *(
        row(partial(call, path), "path must be", "a path", repr(path))
        for call in (*(each.load_checkpoint for each in LOADERS), IO.remove_checkpoint, partial(IO.save_checkpoint, {}))
        for path in PATHS
    ),
    row(
        leaves_disk(wrong_generation_config, partial(load_pretrained, MODEL)),
        "generation_config.json", "not a valid JSON file", error=OSError, unchanged=sums,
    ),
    row(
        leaves_disk(saved([1]), partial(load_pretrained, LINEAR)),
        "folder must be a folder", "got the file", error=NotADirectoryError, unchanged=sums,
    ),
    row(partial(IO.save_checkpoint, {}, "a.ckpt", {}), "storage_options", "not supported"),
    *(row(partial(LOADER.load_state_dict, each), *mentions) for each, *mentions in LOADER_STATES),
]  # fmt: skip
