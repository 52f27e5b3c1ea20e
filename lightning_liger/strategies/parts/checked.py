"""The arguments of strategies are checked when one is made, also those that Lightning hands on to an engine unseen."""

import difflib
import inspect
import json
import numbers
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from lightning.fabric.accelerators import Accelerator
from lightning.fabric.plugins import CheckpointIO, ClusterEnvironment
from lightning.fabric.plugins.precision import Precision
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import BackwardPrefetch, CPUOffload, MixedPrecision
from torch.nn import Module

from liger_ops.arguments import check_bool, check_choice, check_integer, check_number, shown, wrong_type, wrong_value
from lightning_liger.strategies.parts.policies import check_policy

_Check = Callable[[str, Any], None]


class CheckedArguments:
    """Checks the arguments that a strategy is made with, before anything is made. A mixin for all strategies.

    Raises:
        TypeError: For an argument of a wrong type, with its name, its value and what was expected.
        ValueError: For a value that is not among those that the argument takes.
    """

    # Not in __init__: the command line finds the options of a yaml by what each __init__ does with its kwargs.
    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        bound = inspect.signature(cls.__init__).bind_partial(None, *args, **kwargs).arguments
        check_arguments({**bound, **bound.pop("kwargs", {})})
        return super().__new__(cls)


def check_arguments(given: Mapping[str, Any]) -> None:
    """Raises TypeError or ValueError for a wrong value among the arguments ``given``, and for those at odds."""
    for name, value in given.items():
        if name in _CHECKS:
            _CHECKS[name](name, value)
    _check_together(given)


def _check_together(given: Mapping[str, Any]) -> None:
    replaced = [name for name in _REPLACED_BY_CONFIG if name in given]
    if given.get("config") is not None and replaced:
        raise ValueError(
            f"config must have all settings of DeepSpeed, got config and {replaced[0]}={shown(given[replaced[0]])},"
            f" which it would replace: write {replaced[0]} into config"
        )
    chosen = [name for name in _CHOOSE_LAYERS if given.get(name) is not None]
    if len(chosen) > 1:
        first, second = chosen[:2]
        raise ValueError(f"{first}={shown(given[first])} must be None if {second} is given: both choose layers")


def _instance(expected: str, *types: type, optional: bool = True) -> _Check:
    def check(name: str, value: Any) -> None:
        if not isinstance(value, types) and not (optional and value is None):
            raise wrong_type(name, f"{expected}{' or None' if optional else ''}", value)

    return check


def _choice(*choices: Any) -> _Check:
    return lambda name, value: check_choice(name, value, choices)


def _at_least(smallest: int, optional: bool = False) -> _Check:
    return lambda name, value: check_integer(name, value, at_least=smallest, optional=optional)


def _number(optional: bool = False, **bounds: float) -> _Check:
    return lambda name, value: check_number(name, value, optional=optional, **bounds)


def _callable(name: str, value: Any) -> None:
    if value is not None and not callable(value):
        raise wrong_type(name, "a function or None", value)


def _check_kernels(name: str, kernels: Any) -> None:
    """Only the type: names and options are checked where kernels are applied."""
    if not isinstance(kernels, str | Mapping | list | tuple | set | frozenset):
        raise wrong_type(name, "'auto', 'none', a name, or a list or dict of names", kernels)


def _check_size_or_auto(name: str, size: Any) -> None:
    expected = "'auto' or an integer of at least 1"
    if isinstance(size, str):
        if size != "auto":
            raise wrong_value(name, expected, size)
    elif isinstance(size, bool) or not isinstance(size, int):
        raise wrong_type(name, expected, size)
    elif size < 1:
        raise wrong_value(name, expected, size)


def _check_backend(name: str, backend: Any) -> None:
    _instance("the name of a backend of torch.distributed", str)(name, backend)
    known = dist.Backend.backend_list
    if backend is not None and not all(part.rpartition(":")[2].lower() in known for part in backend.split(",")):
        raise wrong_value(name, f"one of {', '.join(map(repr, known))}, or such as 'cpu:gloo,cuda:nccl'", backend)


def _check_timeout(name: str, timeout: Any) -> None:
    _instance("a datetime.timedelta", timedelta)(name, timeout)
    if timeout is not None and timeout <= timedelta(0):
        raise wrong_value(name, "a datetime.timedelta above 0", timeout)


def _check_device(name: str, device: Any) -> None:
    expected = "a torch.device, its name such as 'cuda:0', or an index"
    if device is None or isinstance(device, torch.device):
        return
    if isinstance(device, bool) or not isinstance(device, str | int):
        raise wrong_type(name, expected, device)
    try:
        torch.device(device)
    except RuntimeError as error:
        raise wrong_value(name, expected, device) from error


def _check_devices(name: str, devices: Any) -> None:
    expected = "a list of torch.device"
    if devices is None:
        return
    if not isinstance(devices, Sequence) or not all(isinstance(device, torch.device) for device in devices):
        raise wrong_type(name, f"{expected} or None", devices)
    if not devices:
        raise wrong_value(name, f"{expected} that is not empty", devices)


def _check_mesh(name: str, mesh: Any) -> None:
    expected = "a DeviceMesh, or a tuple of two sizes (replicas, shards)"
    if mesh is None or isinstance(mesh, DeviceMesh):
        return
    if not isinstance(mesh, tuple) or not all(isinstance(size, int) and not isinstance(size, bool) for size in mesh):
        raise wrong_type(name, expected, mesh)
    if len(mesh) != 2 or min(mesh) < 1:
        raise wrong_value(name, f"{expected} of at least 1", mesh)


def _check_checkpointing(name: str, layers: Any) -> None:
    expected = "'none', 'full', a number of layers, or a list or set of layer classes or their names"
    if layers is None or (isinstance(layers, type) and issubclass(layers, Module)):
        return
    if isinstance(layers, str):
        if layers not in ("none", "full"):
            raise wrong_value(name, expected, layers)
    elif isinstance(layers, list | tuple | set | frozenset):
        check_policy(name, layers, takes_functions=False)
    elif isinstance(layers, bool) or not isinstance(layers, numbers.Integral):
        raise wrong_type(name, f"{expected}, or None", layers)
    elif layers < 0:
        raise wrong_value(name, f"{expected}, or None", layers)


def _check_budget(name: str, budget: Any) -> None:
    expected = "'auto', a share of the GPU's memory up to 1, or a number of GiB above 1"
    if isinstance(budget, str):
        if budget != "auto":
            raise wrong_value(name, expected, budget)
        return
    try:
        check_number(name, budget, above=0, optional=True)
    except (TypeError, ValueError) as error:
        raise type(error)(f"{name} must be {expected}, got {shown(budget)}") from error


# DeepSpeed

_SECTIONS = ("zero_optimization", "fp16", "bf16", "optimizer", "scheduler", "activation_checkpointing", "aio")
"""Keys of a configuration whose values are dicts."""
_NUMBERS = ("gradient_clipping", "train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
_KEYS = (
    *_SECTIONS,
    *_NUMBERS,
    "zero_allow_untested_optimizer",
    "zero_force_ds_cpu_optimizer",
    "communication_data_type",
    "prescale_gradients",
    "gradient_predivide_factor",
    "sparse_gradients",
    "steps_per_print",
    "wall_clock_breakdown",
    "dump_state",
    "checkpoint",
    "data_types",
    "tensorboard",
    "flops_profiler",
)
"""Common keys; others are only refused if they look like one of these, misspelled."""


def _check_config(name: str, config: Any) -> None:
    """Checks a configuration of DeepSpeed, which ignores keys that it does not know."""
    if config is None:
        return
    if isinstance(config, str | Path):
        config = _read_config(name, Path(config))
    if not isinstance(config, dict):
        raise wrong_type(name, "a dict, the path of a json file, or None", config)
    for key, value in config.items():
        similar = [] if key in _KEYS else difflib.get_close_matches(str(key), _KEYS, cutoff=0.8)
        if similar:
            raise ValueError(f"{name} has the unknown key {key!r}; did you mean {similar[0]!r}?")
        if key in _SECTIONS:
            _instance("a dict", dict, optional=False)(f"{name}[{key!r}]", value)
        elif key in _NUMBERS and value != "auto":
            check_number(f"{name}[{key!r}]", value, at_least=0)
    _check_zero(f"{name}['zero_optimization']", config.get("zero_optimization", {}))


def _read_config(name: str, path: Path) -> Any:
    expected = "a dict or the path of a json file with one"
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"{name} must be {expected}, got {str(path)!r}: {error}") from error


def _check_zero(name: str, settings: dict[str, Any]) -> None:
    try:
        from deepspeed.runtime.zero.config import DeepSpeedZeroConfig
    except ImportError:  # the strategy says so
        return
    try:
        DeepSpeedZeroConfig(**settings)
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"{name} must have the settings of DeepSpeed's ZeRO, got {shown(settings)}: {error}"
        ) from error


_BOOLS_OF_ENGINES = (
    *("find_unused_parameters", "static_graph", "gradient_as_bucket_view", "init_sync"),
    *("use_orig_params", "limit_all_gathers", "forward_prefetch", "sync_module_states", "save_distributed_checkpoint"),
)
_BOOLS_OF_DEEPSPEED = (
    *("zero_optimization", "offload_optimizer", "offload_parameters", "single_submit", "overlap_events", "pin_memory"),
    *("contiguous_gradients", "overlap_comm", "allgather_partitions", "reduce_scatter"),
    *("zero_allow_untested_optimizer", "partition_activations", "cpu_checkpointing", "contiguous_memory_optimization"),
    "synchronize_checkpoint_boundary",
)
_SIZES_OF_DEEPSPEED = (
    *("params_buffer_count", "params_buffer_size", "max_in_cpu", "optimizer_buffer_count", "block_size"),
    *("queue_depth", "thread_count", "sub_group_size", "allgather_bucket_size", "reduce_bucket_size"),
)
_REPLACED_BY_CONFIG = (
    *("stage", "offload_params_device", "offload_optimizer_device", "nvme_path"),
    *_BOOLS_OF_DEEPSPEED,
    *_SIZES_OF_DEEPSPEED,
)

_CHOOSE_LAYERS = ("activation_checkpointing", "activation_checkpointing_policy", "memory_budget")

_CHECKS: dict[str, _Check] = {
    "kernels": _check_kernels,
    "context_parallel_size": _at_least(1),
    "tensor_parallel_size": _at_least(1),
    "data_parallel_size": _check_size_or_auto,
    "parallelize_fn": _callable,
    "device": _check_device,
    "parallel_devices": _check_devices,
    "accelerator": _instance("an Accelerator of Lightning", Accelerator),
    "cluster_environment": _instance("a ClusterEnvironment of Lightning", ClusterEnvironment),
    "checkpoint_io": _instance("a CheckpointIO of Lightning", CheckpointIO),
    "precision": _instance("a Precision plugin of Lightning", Precision),
    "precision_plugin": _instance("a Precision plugin of Lightning", Precision),
    "process_group_backend": _check_backend,
    "timeout": _check_timeout,
    "start_method": _choice("popen", "spawn", "fork", "forkserver"),
    "state_dict_type": _choice("full", "sharded"),
    "cpu_offload": _instance("True, False or a CPUOffload of FSDP", bool, CPUOffload),
    "mixed_precision": _instance("a MixedPrecision of FSDP", MixedPrecision),
    "backward_prefetch": _instance("a BackwardPrefetch of FSDP", BackwardPrefetch),
    "param_init_fn": _callable,
    "device_mesh": _check_mesh,
    "activation_checkpointing": _check_checkpointing,
    "memory_budget": _check_budget,
    "broadcast_buffers": lambda name, value: check_bool(name, value, optional=True),
    "bucket_cap_mb": _number(above=0, optional=True),
    "model_averaging_period": _at_least(1, optional=True),
    "ddp_comm_hook": _callable,
    "ddp_comm_wrapper": _callable,
    "stage": lambda name, value: check_integer(name, value, at_least=0, at_most=3),
    "config": _check_config,
    "offload_params_device": _choice("cpu", "nvme", "none"),
    "offload_optimizer_device": _choice("cpu", "nvme", "none"),
    "remote_device": _choice(None, "cpu", "nvme"),
    "nvme_path": _instance("a path", str, Path, optional=False),
    "loss_scale": _number(at_least=0),
    "min_loss_scale": _number(at_least=0),
    "initial_scale_power": _at_least(0),
    "loss_scale_window": _at_least(1),
    "hysteresis": _at_least(1),
    **dict.fromkeys((*_BOOLS_OF_ENGINES, *_BOOLS_OF_DEEPSPEED), check_bool),
    **dict.fromkeys(("load_full_weights", "exclude_frozen_parameters"), check_bool),
    **dict.fromkeys(_SIZES_OF_DEEPSPEED, _at_least(1)),
}
"""The check of each argument that has the same meaning in all strategies that take it."""
