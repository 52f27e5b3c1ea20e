"""Wrong arguments and files where checkpoints are saved and loaded, and training resumes."""

import io
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from lightning.pytorch.trainer.states import TrainerFn
from torch.utils.data import DataLoader

from lightning_liger import (
    FabricLigerFSDPStrategy,
    LigerFSDPStrategy,
    LigerModelParallelStrategy,
    LigerSingleDeviceStrategy,
)
from lightning_liger.resuming.atomic_io import AtomicCheckpointIO
from lightning_liger.resuming.dataloader import STATE_KEY, resumable
from lightning_liger.resuming.random_state import random_state, set_random_state
from lightning_liger.resuming.rank_state import CHECKPOINT_KEY, RankStates
from lightning_liger.resuming.safe_loading import check_checkpoint
from tests.bad_inputs import BadInput
from tests.lightning_liger.files import BREAKS, broken, leaves_disk
from tests.lightning_liger.malicious import write_deepspeed, write_sharded

NO_PATH = {"None": (None, "None"), "5": (5, "5"), "empty": ("", "''"), "list": (["a"], "['a']")}


def a_file(tmp_path: Path) -> Path:
    torch.save({"state_dict": {}, "pytorch-lightning_version": "2.6.0"}, tmp_path / "file.ckpt")
    return tmp_path / "file.ckpt"


def a_folder(tmp_path: Path) -> Path:
    return write_sharded(tmp_path / "folder", optimizer_0={"lr": 0.1})


LOADERS: dict[str, Callable[[Any], Any]] = {
    "AtomicCheckpointIO.load_checkpoint": lambda path: AtomicCheckpointIO().load_checkpoint(path),
    "LigerSingleDeviceStrategy.load_checkpoint": lambda path: LigerSingleDeviceStrategy().load_checkpoint(path),
    "LigerFSDPStrategy.load_checkpoint": lambda path: LigerFSDPStrategy().load_checkpoint(path),
    "LigerModelParallelStrategy.load_checkpoint": lambda path: LigerModelParallelStrategy().load_checkpoint(path),
    "FabricLigerFSDPStrategy.load_checkpoint": lambda path: FabricLigerFSDPStrategy().load_checkpoint(path),
}


def dict_of(value: Any) -> Callable[[Path], Path]:
    def write(tmp_path: Path) -> Path:
        torch.save(value, tmp_path / "file.ckpt")
        return tmp_path / "file.ckpt"

    return write


def sharded(change: Callable[[Path], Any]) -> Callable[[Path], Path]:
    def write(tmp_path: Path) -> Path:
        folder = a_folder(tmp_path)
        change(folder)
        return folder

    return write


FILES = [
    *(
        BadInput(f"{name}-path-{kind}", lambda load=load, value=value: load(value), ("path must be a path", text))
        for name, load in LOADERS.items()
        for kind, (value, text) in NO_PATH.items()
    ),
    *(
        BadInput(f"{name}-path-missing", lambda load=load: load("/nowhere"), ("/nowhere", "no"), FileNotFoundError)
        for name, load in LOADERS.items()
    ),
    *(
        BadInput(
            f"{name}-file-{kind}",
            leaves_disk(lambda tmp_path, kind=kind: broken(a_file(tmp_path), kind), load),
            ("file.ckpt", "is not a file of torch.save, or incomplete"),
            ValueError,
        )
        for name, load in LOADERS.items()
        for kind in BREAKS
    ),
    *(
        BadInput(
            f"{name}-path-is a folder",
            leaves_disk(a_folder, LOADERS[name]),
            ("path must be a file", "folder"),
            ValueError,
        )
        for name in ("AtomicCheckpointIO.load_checkpoint", "LigerSingleDeviceStrategy.load_checkpoint")
    ),
    *(
        BadInput(
            f"LigerSingleDeviceStrategy.load_checkpoint-{kind}",
            leaves_disk(dict_of(value), LOADERS["LigerSingleDeviceStrategy.load_checkpoint"]),
            ("file.ckpt is not a checkpoint of Lightning's Trainer", text),
            ValueError,
        )
        for kind, value, text in [
            ("only weights", {"weight": torch.ones(2)}, "['weight']"),
            ("list", [1, 2], "[1, 2]"),
            ("tensor", torch.ones(2), "a tensor of shape (2,)"),
            ("nothing", None, "None"),
        ]
    ),
    *(
        BadInput(
            f"check_checkpoint-{name}-{kind}",
            leaves_disk(
                sharded(lambda folder, name=name, kind=kind: broken(folder / name, kind)),
                lambda folder: check_checkpoint(folder),
            ),
            (name, "incomplete"),
            ValueError,
        )
        for name in (".metadata", "__0_0.distcp", "meta.pt")
        for kind in BREAKS
        if not (name == "__0_0.distcp" and kind == "last byte missing")  # of what fills a block
    ),
    BadInput(
        "check_checkpoint-entry missing",
        leaves_disk(sharded(lambda folder: (folder / "__0_0.distcp").unlink()), check_checkpoint),
        ("__0_0.distcp", "No such file"),
        FileNotFoundError,
    ),
    BadInput(
        "check_checkpoint-empty folder",
        lambda tmp_path: check_checkpoint(tmp_path),
        ("is not a checkpoint", "no file that ends in .pt"),
        ValueError,
    ),
    BadInput(
        "check_checkpoint-deepspeed-no name of a folder",
        leaves_disk(
            lambda tmp_path: [write_deepspeed(tmp_path, {}), (tmp_path / "latest").write_bytes(b"\xff/..")][0],
            check_checkpoint,
        ),
        ("latest must hold the name of a folder", "/.."),
        ValueError,
    ),
    *(
        BadInput(
            f"AtomicCheckpointIO.{method}-path-{kind}",
            leaves_disk(lambda tmp_path: None, lambda _, method=method, arguments=arguments: call(method, *arguments)),
            ("path must be a path", text),
        )
        for kind, (value, text) in NO_PATH.items()
        for method, arguments in (("save_checkpoint", ({}, value)), ("remove_checkpoint", (value,)))
    ),
    BadInput(
        "AtomicCheckpointIO.save_checkpoint-storage_options",
        leaves_disk(
            lambda tmp_path: tmp_path / "a.ckpt", lambda path: AtomicCheckpointIO().save_checkpoint({}, path, {})
        ),
        ("storage_options", "not supported"),
        TypeError,
    ),
]


def call(method: str, *arguments: Any) -> None:
    getattr(AtomicCheckpointIO(), method)(*arguments)


# Data loaders and random states

LOADER = resumable(DataLoader([1, 2, 3]))


def loader_state(**changes: Any) -> dict[str, Any]:
    return {STATE_KEY: True, "num_batches": 1, "epoch": None, "random_state": None, **changes}


def states() -> Any:
    """What a failed call must leave, in a form that can be compared."""
    buffer = io.BytesIO()
    torch.save((random_state(), LOADER._loaded), buffer)
    return buffer.getvalue()


RESUMING = [
    *(
        BadInput(
            f"ResumableDataLoader.load_state_dict-{name}",
            lambda value=value: LOADER.load_state_dict(value),
            mentions,
            unchanged=states,
        )
        for name, value, mentions in [
            ("None", None, ("state_dict must be the state of a ResumableDataLoader", "None")),
            ("int", 5, ("state_dict must be the state of a ResumableDataLoader", "5")),
            ("list", [STATE_KEY], ("state_dict must be the state of a ResumableDataLoader", "[")),
            ("empty", {}, ("expected the state of a ResumableDataLoader", "[]")),
            ("of another loader", {"start": 3}, ("expected the state of a ResumableDataLoader", "['start']")),
            *(
                (f"num_batches-{value!r}", loader_state(num_batches=value), ("num_batches", "an integer", repr(value)))
                for value in (None, -1, 1.5, "3", True)
            ),
            ("no num_batches", {STATE_KEY: True}, ("num_batches", "None")),
            ("random_state", loader_state(random_state=5), ("random_state", "got 5")),
        ]
    ),
    *(
        BadInput(
            f"set_random_state-{name}",
            lambda change=change: set_random_state(change(random_state())),
            ("random_state must be the random states of torch, Python and NumPy", text),
            ValueError,
            states,
        )
        for name, change, text in [
            ("None", lambda state: None, "got None"),
            ("list", lambda state: [], "got []"),
            ("empty", lambda state: {}, "'torch'"),
            ("no numpy", lambda state: {key: state[key] for key in ("torch", "python")}, "'numpy'"),
            ("torch is a list", lambda state: state | {"torch": [1]}, "TypeError"),
            ("torch is short", lambda state: state | {"torch": torch.zeros(3, dtype=torch.uint8)}, "RuntimeError"),
            ("torch has floats", lambda state: state | {"torch": torch.zeros(5056)}, "TypeError"),
            ("python is short", lambda state: state | {"python": (3, (1, 2), None)}, "ValueError"),
            ("python is a number", lambda state: state | {"python": 5}, "TypeError"),
            (
                "numpy of another generator",
                lambda state: state | {"numpy": state["numpy"] | {"bit_generator": "PCG64"}},
                "ValueError",
            ),
            ("numpy without a key", lambda state: state | {"numpy": state["numpy"] | {"state": {}}}, "'key'"),
        ]
    ),
]


# The states of ranks in a checkpoint

TRAINER: Any = SimpleNamespace(state=SimpleNamespace(fn=TrainerFn.FITTING), world_size=1, global_rank=0)
RANK_STATES = RankStates()


def take(**changes: Any) -> Callable[[], None]:
    def run() -> None:
        counts = {"ready": 1, "completed": 1, "started": 1, "processed": 1}
        fit_loop = {
            "epoch_loop.batch_progress": {"current": counts, "is_last_batch": False},
            "epoch_progress": {"current": counts},
            "state_dict": {},
        }
        ranks = [{"random_state": None, "module": None, "loaders": [], "other_loaders": []}]
        checkpoint = {"loops": {"fit_loop": fit_loop}, CHECKPOINT_KEY: {"ranks": ranks}, **changes}
        RANK_STATES.take_from(checkpoint, TRAINER, "some/file.ckpt")

    return run


take()()  # what the rows change is right
RANK_STATES.forget()

STATES = [
    BadInput(
        f"RankStates.take_from-{name}",
        take(**changes),
        ("some/file.ckpt must have the progress and the states of ranks", text),
        ValueError,
        lambda: RANK_STATES._loaded,
    )
    for name, changes, text in [
        ("ranks are a number", {CHECKPOINT_KEY: {"ranks": 5}}, "TypeError"),
        ("no ranks", {CHECKPOINT_KEY: {}}, "'ranks'"),
        ("not a dict", {CHECKPOINT_KEY: [1]}, "TypeError"),
        ("rank is a number", {CHECKPOINT_KEY: {"ranks": [5]}}, "TypeError"),
        ("rank is empty", {CHECKPOINT_KEY: {"ranks": [{}]}}, "'random_state'"),
        ("random state", {CHECKPOINT_KEY: {"ranks": [{"random_state": 5, "loaders": []}]}}, "random_state must be"),
        ("no loops", {"loops": {}}, "'fit_loop'"),
        ("loops are a list", {"loops": [1]}, "TypeError"),
        ("no progress", {"loops": {"fit_loop": {}}}, "epoch_loop.batch_progress"),
    ]
]

BAD_INPUTS = FILES + RESUMING + STATES
