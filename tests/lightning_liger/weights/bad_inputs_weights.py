"""Wrong arguments and files of ``load_pretrained`` and ``export_pretrained``."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L
import torch
from safetensors.torch import save_file
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from lightning_liger import export_pretrained, load_pretrained
from tests.bad_inputs import BadInput
from tests.lightning_liger.files import BREAKS, broken, leaves_disk
from tests.lightning_liger.malicious import write_sharded

SIZES = {"hidden_size": 8, "intermediate_size": 8, "num_attention_heads": 2, "num_key_value_heads": 2, "vocab_size": 16}
MODEL = LlamaForCausalLM(LlamaConfig(num_hidden_layers=1, **SIZES))
LINEAR = nn.Linear(2, 2)
WEIGHTS = {"weight": torch.ones(2, 2), "bias": torch.ones(2)}


def sums() -> list[float]:
    """What a failed call must leave."""
    return [float(parameter.sum()) for model in (MODEL, LINEAR) for parameter in model.parameters()]


class Module(L.LightningModule):
    """Holds ``MODEL``."""

    def __init__(self) -> None:
        super().__init__()
        self.model = MODEL


# load_pretrained


def pretrained(change: Callable[[Path], Any], weights: dict[str, Any] = WEIGHTS) -> Callable[[Path], None]:
    """Loads a folder, after ``change``, into ``LINEAR``."""

    def write(tmp_path: Path) -> Path:
        folder = tmp_path / "folder"
        folder.mkdir()
        save_file(weights, folder / "model.safetensors")
        change(folder)
        return folder

    return leaves_disk(write, lambda folder: load_pretrained(LINEAR, folder))


def pickled(change: Callable[[Path], Any], weights: Any = WEIGHTS) -> Callable[[Path], None]:
    """The same with ``pytorch_model.bin``."""

    def replace(folder: Path) -> None:
        (folder / "model.safetensors").unlink()
        torch.save(weights, folder / "pytorch_model.bin")
        change(folder)

    return pretrained(replace)


def indexed(content: Any) -> Callable[[Path], None]:
    """The same with an index."""
    text = content if isinstance(content, str) else json.dumps(content)
    return pretrained(lambda folder: (folder / "model.safetensors.index.json").write_text(text))


def with_header(header: bytes) -> Callable[[Path], None]:
    content = len(header).to_bytes(8, "little") + header + bytes(16)
    return pretrained(lambda folder: (folder / "model.safetensors").write_bytes(content))


def entry(**changes: Any) -> bytes:
    return json.dumps({"weight": {"dtype": "F32", "shape": [2, 2], "data_offsets": [0, 16], **changes}}).encode()


def twice(folder: Path) -> None:
    save_file(WEIGHTS, folder / "more.safetensors")
    index = {"weight_map": {"weight": "model.safetensors", "bias": "more.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def wrong_generation_config(tmp_path: Path) -> Path:
    MODEL.save_pretrained(tmp_path)
    (tmp_path / "generation_config.json").write_text("{")
    return tmp_path


def a_file(tmp_path: Path) -> Path:
    (tmp_path / "file").write_text("no folder")
    return tmp_path / "file"


SAFETENSORS = ("model.safetensors", "is not a complete safetensors file")
INDEX = ("model.safetensors.index.json", "weight_map")
NO_PATH = {"None": (None, "None"), "5": (5, "5"), "list": (["a"], "['a']"), "bytes": (b"a", "b'a'")}

NOT_FLOATING = ("not floating-point: bias", "dtypes")

LOADING = [
    *(
        BadInput(f"load_pretrained-model-{name}", lambda value=value: load_pretrained(value, "."), ("model", text))
        for name, value, text in [("None", None, "None"), ("str", "llama", "'llama'"), ("class", nn.Linear, "Linear")]
    ),
    *(
        BadInput(
            f"load_pretrained-folder-{name}",
            lambda value=value: load_pretrained(LINEAR, value),
            ("folder must be a path", text),
            unchanged=sums,
        )
        for name, (value, text) in {**NO_PATH, "empty": ("", "''")}.items()
    ),
    BadInput(
        "load_pretrained-folder-is a file",
        leaves_disk(a_file, lambda path: load_pretrained(LINEAR, path)),
        ("folder must be a folder", "got the file"),
        NotADirectoryError,
        sums,
    ),
    BadInput(
        "load_pretrained-folder-missing",
        lambda: load_pretrained(LINEAR, "/nowhere"),
        ("/nowhere", "has no weights"),
        FileNotFoundError,
        sums,
    ),
    *(
        BadInput(
            f"load_pretrained-safetensors-{kind}",
            pretrained(lambda folder, kind=kind: broken(folder / "model.safetensors", kind)),
            SAFETENSORS,
            ValueError,
            sums,
        )
        for kind in BREAKS
    ),
    *(
        BadInput(f"load_pretrained-safetensors-{name}", with_header(header), SAFETENSORS, ValueError, sums)
        for name, header in {
            "header is no JSON": b"{'weight'",
            "header is a list": b"[]",
            "unknown dtype": entry(dtype="object"),
            "overlapping": b'{"a": {"dtype": "F32", "shape": [4], "data_offsets": [0, 16]}, '
            b'"b": {"dtype": "F32", "shape": [4], "data_offsets": [0, 16]}}',
            "negative shape": entry(shape=[-2, 2]),
            "beyond the end": entry(shape=[200, 2], data_offsets=[0, 1600]),
            "key twice": b'{"weight": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}, '
            b'"weight": {"dtype": "F32", "shape": [4], "data_offsets": [0, 16]}, '
            b'"bias": {"dtype": "F32", "shape": [2], "data_offsets": [8, 16]}}',
        }.items()
    ),
    *(
        BadInput(
            f"load_pretrained-pickled-{kind}",
            pickled(lambda folder, kind=kind: broken(folder / "pytorch_model.bin", kind)),
            ("pytorch_model.bin", "is not a file of torch.save, or incomplete"),
            ValueError,
            sums,
        )
        for kind in BREAKS
    ),
    *(
        BadInput(
            f"load_pretrained-pickled-{name}",
            pickled(lambda folder: None, value),
            ("pytorch_model.bin must hold tensors by their names", text),
            ValueError,
            sums,
        )
        for name, value, text in [
            ("list", [torch.ones(2)], "got [tensor("),
            ("nested", {"state_dict": WEIGHTS}, "got ['state_dict']"),
            ("number", 5, "got 5"),
        ]
    ),
    *(
        BadInput(f"load_pretrained-index-{name}", indexed(content), INDEX, ValueError, sums)
        for name, content in {
            "no JSON": "{'weight_map'",
            "empty": "",
            "list": [1, 2],
            "number": 5,
            "no weight_map": {"metadata": {}},
            "weight_map is a list": {"weight_map": ["model.safetensors"]},
            "weight_map has numbers": {"weight_map": {"weight": 5}},
            "file elsewhere": {"weight_map": {"weight": "../model.safetensors"}},
            "absolute path": {"weight_map": {"weight": "/etc/passwd"}},
            "nested deeply": "[" * 100_000,
        }.items()
    ),
    BadInput(
        "load_pretrained-index-missing file",
        indexed({"weight_map": {"weight": "gone.safetensors"}}),
        ("model.safetensors.index.json", "'gone.safetensors', which does not exist"),
        FileNotFoundError,
        sums,
    ),
    BadInput(
        "load_pretrained-tensors in two files",
        pretrained(twice),
        ("more.safetensors has tensors that another file", "bias"),
        ValueError,
        sums,
    ),
    *(
        BadInput(f"load_pretrained-tensors-{name}", write(lambda folder: None, weights), mentions, ValueError, sums)
        for name, write, weights, mentions in [
            ("missing", pretrained, {"bias": torch.ones(2)}, ("lacks tensors of the model", "weight")),
            ("shape", pretrained, WEIGHTS | {"bias": torch.ones(3)}, ("bias (3,) instead of (2,)", "other shapes")),
            ("scalar", pretrained, WEIGHTS | {"bias": torch.ones(())}, ("bias () instead of (2,)", "other shapes")),
            ("integers", pretrained, WEIGHTS | {"bias": torch.ones(2).int()}, NOT_FLOATING),
            ("bool", pretrained, WEIGHTS | {"bias": torch.ones(2).bool()}, NOT_FLOATING),
            ("pickled integers", pickled, WEIGHTS | {"bias": torch.ones(2).int()}, NOT_FLOATING),
            ("complex", pickled, WEIGHTS | {"bias": torch.ones(2) * 1j}, NOT_FLOATING),
        ]
    ),
    BadInput(
        "load_pretrained-generation_config-no JSON",
        leaves_disk(wrong_generation_config, lambda folder: load_pretrained(MODEL, folder)),
        ("generation_config.json", "not a valid JSON file"),
        OSError,
        sums,
    ),
]


# export_pretrained


def full(tmp_path: Path, change: Callable[[dict[str, Any]], Any] = lambda checkpoint: None) -> Path:
    """The checkpoint of ``MODEL``."""
    weights = {f"model.{name}": tensor.clone() for name, tensor in MODEL.state_dict().items()}
    checkpoint: Any = {"state_dict": weights, "pytorch-lightning_version": "2.6.0"}
    checkpoint = change(checkpoint) or checkpoint
    torch.save(checkpoint, tmp_path / "file.ckpt")
    return tmp_path / "file.ckpt"


def sharded(change: Callable[[Path], Any]) -> Callable[[Path], Path]:
    def write(tmp_path: Path) -> Path:
        folder = write_sharded(tmp_path / "folder", optimizer_0={"lr": 0.1})
        change(folder)
        return folder

    return write


def other_names(tmp_path: Path) -> Path:
    from torch.distributed import checkpoint

    checkpoint.save({"weights": {"a": torch.ones(2)}}, checkpoint_id=tmp_path / "folder", no_dist=True)
    return tmp_path / "folder"


def filled(tmp_path: Path) -> Path:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine.txt").write_text("keep")
    return tmp_path / "out"


def exported(write: Callable[[Path], Path]) -> Callable[[Path], None]:
    return leaves_disk(write, lambda path: export_pretrained(Module(), path, path.parent / "out"))


def exported_with(**wrong: Any) -> Callable[[Path], None]:
    def call(path: Path) -> None:
        module, output = wrong.pop("module", None) or Module(), path.parent / "out"
        export_pretrained(module, **{"ckpt_path": path, "output": output, **wrong})

    return leaves_disk(full, call)


def of_state_dict(change: Callable[[dict[str, Any]], Any]) -> Callable[[Path], None]:
    return exported(lambda tmp_path: full(tmp_path, lambda checkpoint: (change(checkpoint["state_dict"]), None)[1]))


NO_FIT = "does not fit LlamaForCausalLM"
NORM = "model.model.norm.weight"
EXPORTING = [
    *(
        BadInput(
            f"export_pretrained-module-{name}", exported_with(module=value), ("module must be a LightningModule", text)
        )
        for name, value, text in [("int", 5, "5"), ("str", "a", "'a'"), ("model", MODEL, "LlamaForCausalLM")]
    ),
    *(
        BadInput(
            f"export_pretrained-{argument}-{name}",
            exported_with(**{argument: value}),
            (f"{argument} must be a path", text),
        )
        for argument in ("ckpt_path", "output")
        for name, (value, text) in {**NO_PATH, "empty": ("", "''")}.items()
    ),
    *(
        BadInput(
            f"export_pretrained-{argument}-{value!r}",
            exported_with(**{argument: value}),
            (argument, repr(value), expected),
        )
        for argument, expected, values in [
            ("tokenizer", "a Hugging Face tokenizer or None", ("folder", 5)),
            ("max_shard_size", "such as '5GB'", ("big", "-1GB", "5", "", "5GiB")),
            ("max_shard_size", "an integer", (None, 0.5, -1, 0, True)),
            ("weights_only", "True or False", (None, "no", 1)),
        ]
        for value in values
    ),
    BadInput(
        "export_pretrained-ckpt_path-missing",
        exported_with(ckpt_path="/nowhere"),
        ("ckpt_path", "/nowhere"),
        FileNotFoundError,
    ),
    BadInput(
        "export_pretrained-ckpt_path-folder of other files",
        exported(lambda tmp_path: filled(tmp_path).rename(tmp_path / "folder")),
        ("ckpt_path must be a checkpoint file or the folder of a sharded one", "folder"),
        FileNotFoundError,
    ),
    BadInput(
        "export_pretrained-output-filled",
        leaves_disk(
            lambda tmp_path: (full(tmp_path), filled(tmp_path)), lambda paths: export_pretrained(Module(), *paths)
        ),
        ("output must be a new or empty folder", "mine.txt"),
        ValueError,
    ),
    BadInput(
        "export_pretrained-output-is a file",
        leaves_disk(full, lambda path: export_pretrained(Module(), path, path)),
        ("output must be a folder", "got the file"),
        ValueError,
    ),
    *(
        BadInput(
            f"export_pretrained-file-{kind}",
            exported(lambda tmp_path, kind=kind: broken(full(tmp_path), kind)),
            ("file.ckpt", "is not a file of torch.save, or incomplete"),
            ValueError,
        )
        for kind in BREAKS
    ),
    *(
        BadInput(
            f"export_pretrained-file-{name}",
            exported(lambda tmp_path, value=value: full(tmp_path, lambda _: value)),
            ("file.ckpt is not a Lightning checkpoint", "no 'state_dict'", text),
            ValueError,
        )
        for name, value, text in [
            ("list", [1, 2], "[1, 2]"),
            ("weights", {"lm_head.weight": torch.ones(2)}, "['lm_head.weight']"),
            ("state_dict is a list", {"state_dict": [1]}, "['state_dict']"),
        ]
    ),
    *(
        BadInput(f"export_pretrained-tensors-{name}", of_state_dict(change), (NO_FIT, text), ValueError, sums)
        for name, change, text in [
            ("missing", lambda weights: weights.pop(NORM), "model.norm.weight is missing"),
            ("no tensor", lambda weights: weights.update({NORM: 5}), "model.norm.weight is missing"),
            ("other", lambda weights: weights.update({"model.more": torch.ones(2)}), "more is not in the model"),
            ("shape", lambda weights: weights.update({NORM: torch.ones(2)}), "is (2,) instead of (8,)"),
            ("dtype", lambda weights: weights.update({NORM: torch.ones(8).int()}), "is torch.int32 instead of"),
            ("none", lambda weights: weights.clear(), "is missing"),
        ]
    ),
    *(
        BadInput(
            f"export_pretrained-metadata-{kind}",
            exported(sharded(lambda folder, kind=kind: broken(folder / ".metadata", kind))),
            (".metadata", "is not the metadata of a sharded checkpoint, or incomplete"),
            ValueError,
        )
        for kind in BREAKS
    ),
    *(
        BadInput(
            f"export_pretrained-shard-{kind}",
            exported(sharded(lambda folder, kind=kind: broken(folder / "__0_0.distcp", kind))),
            ("folder", "incomplete"),
            ValueError,
        )
        for kind in BREAKS
        if kind != "last byte missing"  # of the padding
    ),
    BadInput(
        "export_pretrained-shard-missing",
        exported(sharded(lambda folder: (folder / "__0_0.distcp").unlink())),
        ("__0_0.distcp", "No such file"),
        OSError,
    ),
    BadInput(
        "export_pretrained-sharded-other names", exported(other_names), ("folder", "no name starts with"), ValueError
    ),
    BadInput(
        "export_pretrained-sharded-another model",
        exported(sharded(lambda folder: None)),
        ("folder does not fit LlamaForCausalLM", "is missing"),
        ValueError,
        sums,
    ),
]

BAD_INPUTS = LOADING + EXPORTING
