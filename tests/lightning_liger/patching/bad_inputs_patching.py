"""Wrong names and options of kernels, models that do not fit, and arguments of the precision plugins."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler

from lightning_liger import (
    AutoLigerModelForCausalLM,
    AutoLigerModelForImageTextToText,
    FabricLigerPrecisionPlugin,
    LigerPrecisionPlugin,
    apply_liger_kernels,
)
from tests.bad_inputs import row
from tests.valid_calls import model

PLUGINS = (LigerPrecisionPlugin, FabricLigerPrecisionPlugin)
NAMES = "a list or dict of names out of ['rms_norm'"
HEAD = "linear_cross_entropy"


def state() -> list[Any]:
    """What patching changes: classes, attributes and hooks."""
    return [(type(module), list(vars(module)), len(module._forward_hooks)) for module in model().modules()]


class NoModel:
    """Where a pretrained model is looked for, if ever."""

    def __fspath__(self) -> str:
        raise AssertionError("was read before its arguments were checked")


KERNELS: list[tuple[Any, ...]] = [
    ("", NAMES, "['']"),
    (["auto"], NAMES, "['auto']"),
    ([("rope", True)], NAMES, "got [('rope', True)]"),
    (iter(["rope"]), NAMES, "iterator"),
    (["rms_nrm"], NAMES, "(did you mean 'rms_norm'?)"),
    ({"rope": 1}, "kernels['rope']", "must be True or False, got 1"),
    ({"silu_mul": {"chunk_bytes": 1}}, "kernels['silu_mul']", "must be True or False, got {'chunk_bytes': 1}"),
    ({HEAD: ["chunk_bytes"]}, f"kernels['{HEAD}']", "a dict with any of chunk_bytes, accumulate_dtype"),
    ({HEAD: {"chunk_size": 3}}, f"kernels['{HEAD}']", "got {'chunk_size': 3}"),
    *(
        ({HEAD: {option: value}}, f"kernels['{HEAD}']['{option}']", repr(value))
        for option, values in (
            ("chunk_bytes", (0, 1.5, True, "1MB")),
            ("saved_logits_bytes", (-1, 1.5, None)),
            ("accumulate_dtype", ("int8", "f32", torch.int32, float, None)),
        )
        for value in values
    ),
]  # fmt: skip

BAD_INPUTS = [
    *(row(partial(apply_liger_kernels, model(), each), *mentions, unchanged=state) for each, *mentions in KERNELS),
    *(
        row(partial(call, kernels=kernels), "kernels must be", NAMES, text)
        for kernels, text in ((5, "got 5"), (["x"], "['x']"))
        for call in (
            partial(AutoLigerModelForCausalLM.from_config, model().config),
            partial(AutoLigerModelForCausalLM.from_pretrained, NoModel()),
            partial(AutoLigerModelForImageTextToText.from_pretrained, NoModel()),
        )
    ),
    row(
        partial(apply_liger_kernels, torch.jit.trace(nn.ReLU(), torch.ones(1))),
        *("model must be", "TorchScript has not compiled, got the module"),
    ),
    *(
        row(partial(apply_liger_kernels, *call), "kernels asks for", f"'{name}', but nothing", unchanged=state)
        for name, *call in (
            ("gelu_mul", model(), ["rope", "gelu_mul"]),
            ("layer_norm", model(), {"layer_norm": True}),
            ("rms_norm", nn.ReLU(), ["rms_norm"]),
            ("rope", nn.ModuleList(), "rope"),
        )
    ),
    *(
        row(partial(plugin, value), f"precision={value!r}", "bf16-true")
        for plugin in PLUGINS
        for value in (None, 16, "bf16", "64-true", [])
    ),
    *(
        row(partial(plugin, precision, scaler), "scaler", *mentions)
        for plugin in PLUGINS
        for precision, scaler, *mentions in (
            ("bf16-mixed", ShardedGradScaler(), "'16-mixed' only", "'bf16-mixed'"),
            ("16-mixed", "dynamic", "ShardedGradScaler or None", "got 'dynamic'"),
            ("16-mixed", torch.amp.GradScaler("cpu"), "ShardedGradScaler or None", "GradScaler object"),
        )
    ),
    row(
        partial(LigerPrecisionPlugin, "16-mixed", on_nonfinite_grad="raise"),
        "on_nonfinite_grad='raise'", "precision='16-mixed'", "expected 'skip' or 'ignore'",
    ),
    row(AutoLigerModelForCausalLM, "AutoLigerModelForCausalLM", "from_pretrained or from_config", error=OSError),
]  # fmt: skip
