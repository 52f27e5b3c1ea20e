"""Optimizer states in checkpoints of sharded models, also of optimizers that have no state.

No optimizer has a state before its first step, and plain SGD never has one. Lightning 2.6 fails to load a checkpoint of
such an optimizer under FSDP and FSDP2. PyTorch, asked for its state under FSDP2, makes one by a step with zero
gradients, which Adam counts, so it is not asked. The learning-rate finder saves before the first step, and loads that
after some steps.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch.distributed.checkpoint as dcp
from lightning.pytorch.trainer.states import TrainerFn
from torch.distributed.checkpoint.optimizer import load_sharded_optimizer_state_dict
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.fsdp import FullyShardedDataParallel, OptimStateKeyType
from torch.nn import Module
from torch.optim import Optimizer

from liger_ops.optim.adamw import OWN_OPTIONS
from liger_ops.optim.moments import has_codes, relaid
from lightning_liger.strategies.parts.tensor_parallel import is_distributed


def load_in_trainer(strategy: Any, path: Path, read: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """A checkpoint that Lightning's strategy reads, which has loaded the sharded model and then its optimizers."""
    state, optimizers = strategy.lightning_module.trainer.state, strategy.optimizers
    if state.fn != TrainerFn.FITTING:
        return read()
    # Lightning loads no optimizers for evaluation (FSDP), and none if there are none (FSDP2).
    state.fn, strategy.optimizers = TrainerFn.VALIDATING, []
    try:
        checkpoint = read()
    finally:
        state.fn, strategy.optimizers = TrainerFn.FITTING, optimizers
    states = checkpoint.get("optimizer_states")
    if path.is_file() and states is None:  # only weights were saved
        return checkpoint
    if states is not None and len(states) != len(optimizers):
        raise ValueError(
            f"the checkpoint {path} has the states of {len(states)} optimizers, but configure_optimizers returns"
            f" {len(optimizers)}"
        )
    for index, optimizer in enumerate(optimizers):
        load_optimizer_state(strategy.model, optimizer, path, f"optimizer_{index}", states and states[index])
    return checkpoint


def load_in_fabric(path: Path, state: Any, read: Callable[..., dict[str, Any]]) -> dict[str, Any]:
    """What :meth:`fabric.load` returns, after Lightning's strategy has read the checkpoint into ``state``."""
    parts = state if isinstance(state, dict) else {}
    optimizers = {key: part for key, part in parts.items() if isinstance(part, Optimizer)}
    if not optimizers:
        return read(state)
    others = {key: part for key, part in parts.items() if key not in optimizers}
    rest = read(others)  # refuses all but one sharded model
    parts.update(others)
    model = next(part for part in others.values() if isinstance(part, Module) and is_sharded(part))
    for key, optimizer in optimizers.items():
        load_optimizer_state(model, optimizer, Path(path), key, rest.pop(key, None))
    return rest


def load_optimizer_state(
    model: Module, optimizer: Optimizer, path: Path, key: str, whole: dict[str, Any] | None = None
) -> None:
    """Loads the state of an optimizer of a sharded model, also an empty one.

    It is ``key`` in a folder of shards; ``whole`` is that of a file, or an empty one next to shards.
    """
    if path.is_dir():
        reader = dcp.FileSystemReader(path)
        names = [name for name in reader.read_metadata().state_dict_metadata if name.startswith(f"{key}.")]
        if any(name.startswith(f"{key}.state.") for name in names):
            shards: dict[str, Any] = {key: get_optimizer_state_dict(model, optimizer)}
            own = {name: has_codes(state) for name, state in shards[key]["state"].items()}
            _relay(shards[key], {name: f"{key}.state.{name}.exp_avg_codes" in names for name in own})
            for index, group in enumerate(shards[key]["param_groups"]):
                for name in OWN_OPTIONS:
                    if f"{key}.param_groups.{index}.{name}" not in names:  # of an AdamW that has no such option
                        group.pop(name, None)
            dcp.load(shards, storage_reader=reader)
            _relay(shards[key], own)
            set_optimizer_state_dict(model, optimizer, shards[key])
            return
        whole = load_sharded_optimizer_state_dict({}, key, reader)[key] if names else whole
    if whole is None:
        raise ValueError(f"the checkpoint {path} has no state of the optimizer {key!r}")
    if not whole.get("state"):
        optimizer.load_state_dict({**whole, "state": {}})
        return
    if isinstance(next(iter(whole["state"])), int):  # of a model that is not sharded
        whole = FullyShardedDataParallel.rekey_optim_state_dict(whole, OptimStateKeyType.PARAM_NAME, model)
    wanted: Any = get_optimizer_state_dict(model, optimizer)["state"] if is_distributed(model) else {}
    _relay(whole, {name: has_codes(wanted.get(name, {})) for name in whole["state"]})
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=is_distributed(model))
    set_optimizer_state_dict(model, optimizer, whole, options=options)


def _relay(states: dict[str, Any], to_codes: dict[str, bool]) -> None:
    """Gives moments of AdamW's the layout that is wanted for each parameter: checkpoints are matched by names."""
    states["state"] = {name: relaid(state, to_codes[name]) for name, state in states["state"].items()}


def is_sharded(model: Module) -> bool:
    """Whether ``model`` has FSDP units or DTensors."""
    return is_distributed(model) or any(isinstance(module, FullyShardedDataParallel) for module in model.modules())
