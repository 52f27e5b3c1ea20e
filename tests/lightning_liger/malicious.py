"""Files that run code when they are unpickled: the code makes a folder, whose absence shows that it did not run."""

import io
import os
import pickle
import warnings
from pathlib import Path
from typing import Any

import torch
from torch.distributed import checkpoint as sharded


class Payload:
    """Makes the folder ``marker`` when it is unpickled."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.marker),)


def saved(value: Any) -> bytes:
    """What ``torch.save`` writes."""
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def write_sharded(folder: Path, **entries: Any) -> Path:
    """A sharded checkpoint of one weight and of ``entries``, under the names of ``liger_fsdp``."""
    state = {"model": {"model.weight": torch.ones(4, 2)}, **entries}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        sharded.save(state, checkpoint_id=folder, no_dist=True)
    torch.save({"pytorch-lightning_version": "2.6.0"}, folder / "meta.pt")
    return folder


def with_metadata(folder: Path, value: Any, name: str = ".metadata") -> Path:
    """A sharded checkpoint whose metadata is the pickle of ``value``, or these bytes."""
    write_sharded(folder)
    (folder / name).write_bytes(value if isinstance(value, bytes) else pickle.dumps(value))
    return folder


def write_deepspeed(folder: Path, model_states: Any, optimizer_states: Any = None) -> Path:
    """A folder as DeepSpeed writes it."""
    (folder / "checkpoint").mkdir(parents=True)
    (folder / "latest").write_text("checkpoint")
    torch.save(model_states, folder / "checkpoint" / "mp_rank_00_model_states.pt")
    torch.save(optimizer_states, folder / "checkpoint" / "zero_pp_rank_0_mp_rank_00_optim_states.pt")
    return folder
