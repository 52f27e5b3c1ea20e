"""Wrong arguments of every strategy, for Trainer and Fabric, which are refused when the strategy is made."""

import itertools
from collections.abc import Callable, Iterator
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
from lightning.pytorch.demos.boring_classes import BoringModel
from torch import nn

from lightning_liger import LigerModelParallelStrategy
from lightning_liger.strategies.registration import REGISTRATIONS
from tests.bad_inputs import BadInput

CLASSES = {
    cls.__name__: cls for registration in REGISTRATIONS for cls in (registration.of_trainer, registration.of_fabric)
}
SINGLE, DDP, FSDP, FSDP2, DEEPSPEED = "SingleDevice", "DDP", "FSDP", "ModelParallel", "DeepSpeed"
ALL = (SINGLE, DDP, FSDP, FSDP2, DEEPSPEED)
DISTRIBUTED = (DDP, FSDP, FSDP2, DEEPSPEED)

NOT_OF_FSDP2 = ("accelerator", "cluster_environment", "parallel_devices")
NOT_BOOLS = ((5, "True or False"), ("no", "True or False"))
SIZES = ((0, "an integer of at least 1"), (-2, "an integer of at least 1"), (1.5, "an integer"), ("x", "an integer"))

WRONG: list[tuple[tuple[str, ...], str, tuple[tuple[Any, ...], ...]]] = [
    (ALL, "kernels", ((5, "'auto', 'none', a name, or a list or dict"), (["rms_nrom"], "names out of"))),
    (ALL, "kernels", (({"rope": {"no": 1}}, "rope", "'no': 1"),)),
    (ALL, "fault_tolerance", NOT_BOOLS),
    (ALL, "accelerator", (("cpu", "an Accelerator"),)),
    (ALL, "precission", ((5, "unexpected keyword argument", "'precission'"),)),
    (DISTRIBUTED, "process_group_backend", ((5, "a backend"), ("nccll", "'nccl'"))),
    (DISTRIBUTED, "timeout", ((5, "datetime.timedelta"), (timedelta(0), "above 0"))),
    (DISTRIBUTED, "cluster_environment", (("slurm", "a ClusterEnvironment"),)),
    (DISTRIBUTED, "parallel_devices", (("cpu", "a list of torch.device"), ([], "not empty"))),
    ((SINGLE,), "device", (("gpu5", "a torch.device"), (1.5, "a torch.device"), (True, "a torch.device"))),
    ((DDP,), "find_unused_parameters", NOT_BOOLS),
    ((DDP,), "static_graph", NOT_BOOLS),
    ((DDP,), "bucket_cap_mb", ((0, "above 0"), ("x", "a finite number"), (float("nan"), "a finite number"))),
    ((DDP,), "start_method", (("thread", "'spawn'"), (5, "'spawn'"))),
    ((DDP,), "ddp_comm_hook", (("fp16", "a function"),)),
    ((DDP,), "device_ids", (([0], "unexpected keyword argument", "'device_ids'"),)),
    ((FSDP,), "sharding_strategy", (("FULL", "FULL_SHARD"), (5, "FULL_SHARD"), (None, "FULL_SHARD"))),
    ((FSDP,), "state_dict_type", (("foo", "'full', 'sharded'"), (5, "'full', 'sharded'"), (["full"], "'full'"))),
    ((FSDP,), "cpu_offload", (("no", "a CPUOffload"), (5, "a CPUOffload"))),
    ((FSDP,), "mixed_precision", (("bf16", "a MixedPrecision"),)),
    ((FSDP,), "backward_prefetch", (("pre", "a BackwardPrefetch"),)),
    ((FSDP,), "device_mesh", ((5, "a tuple of two sizes"), ((2, 0), "a tuple of two sizes"), ((2,), "two sizes"))),
    ((FSDP,), "use_orig_params", NOT_BOOLS),
    (
        ALL,
        "activation_checkpointing",
        (
            *((-1, "a number of layers"), (2.5, "a number of layers"), (True, "a number of layers")),
            *(("all", "'none', 'full'"), ("LlamaDecoderLayer", "a list or set of layer classes")),
            *(([5], "a class or its name"), ({int}, "a class or its name"), (["no.Layer"], "cannot be imported")),
            *((int, "a list or set of layer classes"), ({"layers": 2}, "a list or set", "'layers': 2")),
        ),
    ),
    (
        ALL,
        "memory_budget",
        (
            *((0, "a share of the GPU's memory"), (-0.5, "a share"), (float("nan"), "a number of GiB above 1")),
            *((float("inf"), "GiB"), ("80%", "'auto'"), ("half", "'auto'"), (True, "a share"), ([0.5], "a share")),
        ),
    ),
    ((FSDP,), "device_id", ((0, "unexpected keyword argument", "'device_id'"),)),
    (
        (FSDP, FSDP2),
        "auto_wrap_policy",
        (("Layer", "a list or set"), (5, "a list or set"), ([5], "a class or its name")),
    ),
    ((FSDP, FSDP2), "auto_wrap_policy", ((["no.Layer"], "cannot be imported"), (nn.Linear, "a list or set"))),
    ((FSDP, FSDP2), "activation_checkpointing_policy", (("Layer", "a list or set"), (True, "a list or set"))),
    ((FSDP, FSDP2), "activation_checkpointing_policy", (([5], "a class or its name"), ({int}, "a class or its name"))),
    ((FSDP2,), "auto_wrap_policy", ((len, "a list or set of layer classes or None"),)),
    ((FSDP2,), "tensor_parallel_size", SIZES),
    ((FSDP2,), "data_parallel_size", (*SIZES, ("all", "'auto'"), (None, "'auto'"))),
    ((FSDP2,), "save_distributed_checkpoint", NOT_BOOLS),
    ((DEEPSPEED,), "stage", ((4, "at most 3"), (-1, "at least 0"), ("2", "an integer"), (True, "an integer"))),
    ((DEEPSPEED,), "offload_optimizer", NOT_BOOLS),
    ((DEEPSPEED,), "offload_parameters", NOT_BOOLS),
    ((DEEPSPEED,), "offload_params_device", (("gpu", "'cpu', 'nvme'"),)),
    ((DEEPSPEED,), "reduce_bucket_size", ((0, "an integer of at least 1"), (2e8, "an integer"))),
    ((DEEPSPEED,), "loss_scale", ((-1, "at least 0"), (float("inf"), "a finite number"), ("x", "a finite number"))),
    ((DEEPSPEED,), "config", ((5, "a dict"), ([], "a dict"), ("no/such.json", "No such file"))),
    ((DEEPSPEED,), "config", (({"zero_optimisation": {}}, "did you mean 'zero_optimization'", "'zero_optimisation'"),)),
]
"""The strategies, the argument, its wrong values, what was expected of each, and how it is shown unless by its repr."""

OF_TRAINER: list[tuple[tuple[str, ...], str, tuple[tuple[Any, ...], ...]]] = [
    (
        (SINGLE, DDP, FSDP, FSDP2),
        "on_nonfinite_grad",
        (("stop", "'raise', 'skip'"), (5, "'raise', 'skip'"), (None, "'skip'")),
    ),
    ((DDP, FSDP, FSDP2), "context_parallel_size", SIZES),
    ((SINGLE, DDP, FSDP, DEEPSPEED), "precision_plugin", (("bf16", "a Precision plugin"),)),
    ((SINGLE, DDP, FSDP), "checkpoint_io", (("atomic", "a CheckpointIO"),)),
]
OF_FABRIC: list[tuple[tuple[str, ...], str, tuple[tuple[Any, ...], ...]]] = [
    (ALL, "on_nonfinite_grad", (("skip", "only 'ignore'"),)),
    (ALL, "context_parallel_size", ((2, "only 1"), ("x", "an integer"))),
    ((SINGLE, DDP, FSDP, DEEPSPEED), "precision", (("bf16", "a Precision plugin"),)),
    ((FSDP2,), "parallelize_fn", (("shard", "a function"),)),
]


def _rows() -> Iterator[BadInput]:
    for name, cls in CLASSES.items():
        engine = name.removeprefix("Fabric").removeprefix("Liger").removesuffix("Strategy")
        for engines, argument, values in [*WRONG, *(OF_FABRIC if name.startswith("Fabric") else OF_TRAINER)]:
            if engine not in engines or (engine == FSDP2 and argument in NOT_OF_FSDP2):
                continue
            for value, expected, *shown in values:
                mentions = (argument, *(shown or [_shown(value)]), expected)
                yield BadInput(f"{name}-{argument}-{_id(value)}", partial(cls, **{argument: value}), mentions)


def _two_choices() -> Iterator[BadInput]:
    """Each two of the arguments that choose the layers to recompute."""
    values = {
        "activation_checkpointing": "full",
        "activation_checkpointing_policy": ["Layer"],
        "memory_budget": 0.5,
    }
    for name, cls in CLASSES.items():
        engine = name.removeprefix("Fabric").removeprefix("Liger").removesuffix("Strategy")
        taken = [argument for argument in values if "policy" not in argument or engine in (FSDP, FSDP2)]
        for first, second in itertools.combinations(taken, 2):
            call = partial(cls, **{first: values[first], second: values[second]})
            mentions = (f"{first}={values[first]!r}", second, "must be None")
            yield BadInput(f"{name}-{first}-with-{second}", call, mentions)


def _shown(value: Any) -> str:
    """The value, or what is in it: a message may name the wrong item only."""
    return getattr(value, "__name__", repr(value)).strip("[]{}'")


def _id(value: Any) -> str:
    return value.__name__ if callable(value) else repr(value).replace(" ", "")


def _config_rows() -> Iterator[BadInput]:
    configs: dict[str, tuple[Any, tuple[str, ...]]] = {
        "zero-is-5": ({"zero_optimization": 5}, ("zero_optimization", "a dict", "5")),
        "stage-is-x": ({"zero_optimization": {"stage": "x"}}, ("zero_optimization", "stage", "'x'")),
        "stage-is-7": ({"zero_optimization": {"stage": 7}}, ("zero_optimization", "stage", "7")),
        "bf16-is-true": ({"bf16": True}, ("bf16", "a dict", "True")),
        "clipping-is-x": ({"gradient_clipping": "x"}, ("gradient_clipping", "a finite number", "'x'")),
        "clipping-is-negative": ({"gradient_clipping": -1}, ("gradient_clipping", "at least 0", "-1")),
    }
    for name in ("LigerDeepSpeedStrategy", "FabricLigerDeepSpeedStrategy"):
        cls = CLASSES[name]
        for id, (config, mentions) in configs.items():
            yield BadInput(f"{name}-config-{id}", partial(cls, config=config), ("config", *mentions))
        yield BadInput(f"{name}-config-folder", _in_folder(cls, None), ("config", "a dict or the path of a json file"))
        yield BadInput(f"{name}-config-broken", _in_folder(cls, "{"), ("config", "ds.json", "json file"))
        yield BadInput(f"{name}-config-list", _in_folder(cls, "[1]"), ("config", "a dict", "[1]"))
        yield BadInput(f"{name}-config-and-stage", partial(cls, stage=3, config={}), ("config", "stage=3"))


def _in_folder(cls: type, text: str | None) -> Callable[[Path], Any]:
    def call(tmp_path: Path) -> Any:
        path = tmp_path if text is None else tmp_path / "ds.json"
        if text is not None:
            path.write_text(text, encoding="utf-8")
        return cls(config=path)

    return call


def _fit(**arguments: Any) -> None:
    trainer = L.Trainer(accelerator="cpu", devices=1, logger=False, barebones=True, **arguments)
    trainer.fit(BoringModel())


_OF_THE_TRAINER = [
    BadInput("LigerStrategy-gradient_clip_val", partial(_fit, strategy="liger", gradient_clip_val=-1),
             ("gradient_clip_val", "at least 0", "got -1")),
    BadInput("LigerModelParallelStrategy-tensor_parallel_size-of-more-than-there-are",
             lambda: _fit(strategy=LigerModelParallelStrategy(tensor_parallel_size=4)),
             ("tensor_parallel_size", "a divisor of the number of processes, 1", "got 4")),
]  # fmt: skip

BAD_INPUTS = [*_rows(), *_config_rows(), *_two_choices(), *_OF_THE_TRAINER]
