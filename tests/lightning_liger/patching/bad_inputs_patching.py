"""Bad inputs of ``apply_liger_kernels``, the auto classes and the precision plugins."""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler
from transformers import LlamaForCausalLM

from lightning_liger import (
    AutoLigerModelForCausalLM,
    AutoLigerModelForImageTextToText,
    FabricLigerPrecisionPlugin,
    LigerPrecisionPlugin,
    apply_liger_kernels,
)
from lightning_liger.patching import check_kernels
from tests.bad_inputs import BadInput
from tests.lightning_liger.tiny import tiny_llama

model = functools.cache(tiny_llama)


def state() -> list[Any]:
    """What patching changes: classes, attributes and hooks."""
    return [(type(module), list(vars(module)), len(module._forward_hooks)) for module in model().modules()]


class NoModel:
    """Where a pretrained model is looked for, if ever."""

    def __fspath__(self) -> str:
        raise AssertionError("was read before its arguments were checked")


CALLS: dict[str, Callable[[Any], Any]] = {
    "apply": lambda kernels: apply_liger_kernels(model(), kernels),
    "check_kernels": check_kernels,
    "from_config": lambda kernels: AutoLigerModelForCausalLM.from_config(model().config, kernels=kernels),
    "from_pretrained": lambda kernels: AutoLigerModelForCausalLM.from_pretrained(NoModel(), kernels=kernels),
    "image_text": lambda kernels: AutoLigerModelForImageTextToText.from_pretrained(NoModel(), kernels=kernels),
    "plugin": lambda kernels: LigerPrecisionPlugin("32-true", kernels=kernels),
    "fabric_plugin": lambda kernels: FabricLigerPrecisionPlugin("32-true", kernels=kernels),
}
NAMES = "a list or dict of names out of ['rms_norm'"
KERNELS: dict[str, tuple[Any, str]] = {
    "number": (5, "got 5"),
    "none": (None, "got None"),
    "bool": (True, "got True"),
    "unknown": ("flash", "['flash']"),
    "list_of_unknown": (["x"], "['x']"),
    "list_of_numbers": ([5], "got [5]"),
}
MORE_KERNELS: dict[str, tuple[Any, str]] = {
    "float": (float("nan"), "got nan"),
    "bytes": (b"rope", "got b'rope'"),
    "capitals": ("RoPE", "['RoPE']"),
    "empty": ("", "['']"),
    "commas": ("rope,rms_norm", "['rope,rms_norm']"),
    "auto_in_list": (["auto"], "['auto']"),
    "none_in_list": ([None], "got [None]"),
    "nested": ([["rope"]], "got [['rope']]"),
    "pairs": ([("rope", True)], "got [('rope', True)]"),
    "iterator": (iter(["rope"]), "iterator"),
    "class": (dict, "got <class 'dict'>"),
    "tensor": (torch.ones(2), "a tensor of shape (2,)"),
    "module": (nn.ModuleList(), "the module ModuleList"),
    "dict_of_numbers": ({5: True}, "got {5: True}"),
    "dict_of_unknown": ({"loss": True}, "['loss']"),
    "typo": (["rms_nrm"], "(did you mean 'rms_norm'?)"),
}
CHOICES: dict[str, tuple[str, Any, str]] = {
    "one": ("rope", 1, "must be True or False, got 1"),
    "text": ("rope", "no", "must be True or False, got 'no'"),
    "no_options": ("rms_norm", {}, "must be True or False, got {}"),
    "options_of_others": ("silu_mul", {"chunk_bytes": 1}, "must be True or False, got {'chunk_bytes': 1}"),
    "list": ("linear_cross_entropy", ["chunk_bytes"], "a dict with any of chunk_bytes, accumulate_dtype"),
    "loss_number": ("linear_cross_entropy", 2**20, "accumulate_dtype, saved_logits_bytes, got 1048576"),
    "loss_text": ("linear_cross_entropy", "auto", "accumulate_dtype, saved_logits_bytes, got 'auto'"),
    "loss_unknown": ("linear_cross_entropy", {"chunk_size": 3}, "got {'chunk_size': 3}"),
}
CHUNK_BYTES = (0, -1, 1.5, 2.0**20, float("nan"), float("inf"), True, "1MB", None, [1], torch.tensor(8))
DTYPES = (
    "int8",
    "f32",
    "torch.float32",
    "float8_e4m3fn",
    torch.int32,
    torch.bool,
    torch.complex64,
    float,
    32,
    None,
    [],
)
MODELS: dict[str, tuple[Any, str]] = {
    "none": (None, "a torch.nn.Module, got None"),
    "number": (5, "a torch.nn.Module, got 5"),
    "name": ("gpt2", "a torch.nn.Module, got 'gpt2'"),
    "class": (LlamaForCausalLM, "an instance of torch.nn.Module, such as LlamaForCausalLM(...)"),
    "base_class": (nn.Module, "an instance of torch.nn.Module"),
    "list": ([nn.Linear(2, 2)], "a torch.nn.Module, got [Linear"),
    "tensor": (torch.ones(2), "a torch.nn.Module, got a tensor of shape (2,)"),
    "state_dict": ({"weight": 1}, "a torch.nn.Module, got {'weight': 1}"),
    "parameter": (nn.Parameter(torch.ones(2)), "a torch.nn.Module, got a tensor of shape (2,)"),
    "function": (abs, "a torch.nn.Module, got <built-in function abs>"),
    "scripted": (torch.jit.trace(nn.ReLU(), torch.ones(1)), "TorchScript has not compiled, got the module"),
}
UNFIT: dict[str, tuple[Any, Any, str]] = {
    "list": (model, ["rope", "gelu_mul"], "'gelu_mul', but nothing in the model can be replaced by it"),
    "dict": (model, {"layer_norm": True}, "'layer_norm', but nothing in the model can be replaced by it"),
    "no_parameters": (nn.ReLU, ["rms_norm"], "'rms_norm', but nothing in the model can be replaced by it"),
    "empty": (nn.ModuleList, "rope", "'rope', but nothing in the model can be replaced by it"),
}
PLUGINS = {"plugin": LigerPrecisionPlugin, "fabric_plugin": FabricLigerPrecisionPlugin}

BAD_INPUTS = [
    *(
        BadInput(
            f"{name}-kernels-{kind}", functools.partial(call, value), ("kernels must be", NAMES, text), unchanged=state
        )
        for name, call in CALLS.items()
        for kind, (value, text) in (KERNELS | (MORE_KERNELS if name == "apply" else {})).items()
    ),
    *(
        BadInput(
            f"apply-choice-{kind}",
            functools.partial(CALLS["apply"], {name: value}),
            (f"kernels['{name}']", text),
            unchanged=state,
        )
        for kind, (name, value, text) in CHOICES.items()
    ),
    *(
        BadInput(
            f"apply-{option}-{index}",
            functools.partial(CALLS["apply"], {"linear_cross_entropy": {option: value}}),
            (f"kernels['linear_cross_entropy']['{option}']", expected, text),
            unchanged=state,
        )
        for option, values, expected in (
            ("chunk_bytes", CHUNK_BYTES, "an integer of at least 1"),
            ("saved_logits_bytes", CHUNK_BYTES[1:], "an integer of at least 0"),
            ("accumulate_dtype", DTYPES, "one of 'float16', 'bfloat16', 'float32', 'float64'"),
        )
        for index, value in enumerate(values)
        for text in [f"got {'a tensor of shape ()' if isinstance(value, torch.Tensor) else repr(value)}"]
    ),
    *(
        BadInput(f"apply-model-{kind}", functools.partial(apply_liger_kernels, value), ("model must be", text))
        for kind, (value, text) in MODELS.items()
    ),
    *(
        BadInput(
            f"apply-unfit-{kind}",
            lambda make=make, kernels=kernels: apply_liger_kernels(make(), kernels),
            ("kernels asks for", text),
            unchanged=state,
        )
        for kind, (make, kernels, text) in UNFIT.items()
    ),
    *(
        BadInput(f"{name}-precision-{value!r}", functools.partial(plugin, value), (f"precision={value!r}", "bf16-true"))
        for name, plugin in PLUGINS.items()
        for value in (None, 16, "bf16", "64-true", [], "BF16-TRUE")
    ),
    *(
        BadInput(f"{name}-scaler-{kind}", functools.partial(plugin, precision, scaler), ("scaler", *mentions))
        for name, plugin in PLUGINS.items()
        for kind, precision, scaler, mentions in (
            ("precision", "bf16-mixed", ShardedGradScaler(), ("'16-mixed' only", "'bf16-mixed'")),
            ("text", "16-mixed", "dynamic", ("ShardedGradScaler or None", "got 'dynamic'")),
            ("number", "16-mixed", 2.0**16, ("ShardedGradScaler or None", "got 65536.0")),
            (
                "of_one_rank",
                "16-mixed",
                torch.amp.GradScaler("cpu"),
                ("ShardedGradScaler or None", "GradScaler object"),
            ),
        )
    ),
    *(
        BadInput(
            f"plugin-on_nonfinite_grad-{value!r}",
            functools.partial(LigerPrecisionPlugin, "32-true", on_nonfinite_grad=value),
            ("on_nonfinite_grad must be one of 'raise', 'skip', 'ignore'", f"got {value!r}"),
        )
        for value in ("stop", None, True, [], "RAISE")
    ),
    BadInput(
        "plugin-on_nonfinite_grad-scaled",
        functools.partial(LigerPrecisionPlugin, "16-mixed", on_nonfinite_grad="raise"),
        ("on_nonfinite_grad='raise'", "precision='16-mixed'", "expected 'skip' or 'ignore'"),
    ),
    *(
        BadInput(f"{auto.__name__}-instance", auto, (auto.__name__, "from_pretrained or from_config"), error=OSError)
        for auto in (AutoLigerModelForCausalLM, AutoLigerModelForImageTextToText)
    ),
]
