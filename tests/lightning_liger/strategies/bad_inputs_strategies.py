"""Wrong arguments of every strategy, for Trainer and Fabric, which are refused when the strategy is made."""

import itertools
from collections.abc import Iterator
from functools import partial
from typing import Any

import lightning as L
from lightning.pytorch.demos.boring_classes import BoringModel
from torch import nn

from lightning_liger import LigerModelParallelStrategy
from lightning_liger.strategies.registration import REGISTRATIONS
from tests.bad_inputs import BadInput

CLASSES = {cls.__name__: cls for registration in REGISTRATIONS for cls in (registration.trainer, registration.fabric)}
SINGLE, DDP, FSDP, FSDP2, DEEPSPEED = "SingleDevice", "DDP", "FSDP", "ModelParallel", "DeepSpeed"
ALL = (SINGLE, DDP, FSDP, FSDP2, DEEPSPEED)
SIZES = ((0, "an integer of at least 1"), (-2, "an integer of at least 1"), (1.5, "an integer"), ("x", "an integer"))

WRONG: list[tuple[tuple[str, ...], str, tuple[tuple[Any, ...], ...]]] = [
    (ALL, "kernels", ((5, "'auto', 'none', a name, or a list or dict"), (["rms_nrom"], "names out of"))),
    (ALL, "kernels", (({"rope": {"no": 1}}, "rope", "'no': 1"),)),
    (ALL, "fault_tolerance", ((5, "True or False"), ("no", "True or False"))),
    (ALL, "precission", ((5, "unexpected keyword argument", "'precission'"),)),
    ((DDP,), "device_ids", (([0], "unexpected keyword argument", "'device_ids'"),)),
    ((FSDP,), "device_id", ((0, "unexpected keyword argument", "'device_id'"),)),
    ((FSDP,), "sharding_strategy", (("FULL", "FULL_SHARD"), (5, "FULL_SHARD"), (None, "FULL_SHARD"))),
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
    ((FSDP2,), "data_parallel_size", SIZES),
]
"""The strategies, the argument, its wrong values, what was expected of each, and how it is shown unless by its repr."""

OF_TRAINER: list[tuple[tuple[str, ...], str, tuple[tuple[Any, ...], ...]]] = [
    (
        (SINGLE, DDP, FSDP, FSDP2),
        "on_nonfinite_grad",
        (("stop", "'raise', 'skip'"), (5, "'raise', 'skip'"), (None, "'skip'")),
    ),
    ((DDP, FSDP, FSDP2), "context_parallel_size", SIZES),
    ((DEEPSPEED,), "on_nonfinite_grad", (("skip", "only 'ignore'"),)),
    ((DEEPSPEED,), "context_parallel_size", ((2, "only 1"),)),
]
OF_FABRIC: list[tuple[tuple[str, ...], str, tuple[tuple[Any, ...], ...]]] = [
    ((FSDP2,), "parallelize_fn", (("shard", "a function"),)),
]


def _engine(name: str) -> str:
    return name.removeprefix("Fabric").removeprefix("Liger").removesuffix("Strategy")


def _rows() -> Iterator[BadInput]:
    for name, cls in CLASSES.items():
        for engines, argument, values in [*WRONG, *(OF_FABRIC if name.startswith("Fabric") else OF_TRAINER)]:
            if _engine(name) not in engines:
                continue
            for value, expected, *shown in values:
                mentions = (argument, *(shown or [_shown(value)]), expected)
                yield BadInput(f"{name}-{argument}-{_id(value)}", partial(cls, **{argument: value}), mentions)


def _two_choices() -> Iterator[BadInput]:
    """Each two of the arguments that choose the layers to recompute."""
    values = {"activation_checkpointing": "full", "activation_checkpointing_policy": ["Layer"], "memory_budget": 0.5}
    for name, cls in CLASSES.items():
        taken = [argument for argument in values if "policy" not in argument or _engine(name) in (FSDP, FSDP2)]
        for first, second in itertools.combinations(taken, 2):
            call = partial(cls, **{first: values[first], second: values[second]})
            mentions = (f"{first}={values[first]!r}", second, "must be None")
            yield BadInput(f"{name}-{first}-with-{second}", call, mentions)


def _shown(value: Any) -> str:
    """The value, or what is in it: a message may name the wrong item only."""
    return getattr(value, "__name__", repr(value)).strip("[]{}'")


def _id(value: Any) -> str:
    return value.__name__ if callable(value) else repr(value).replace(" ", "")


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

BAD_INPUTS = [*_rows(), *_two_choices(), *_OF_THE_TRAINER]
