"""Wrong arguments of commands, estimates and lazy logits that signatures do not tell."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from lightning_liger import divergence, token_loss, token_scores, topk_log_probs
from lightning_liger.commands.bench import run_bench
from lightning_liger.commands.init import run_init
from lightning_liger.commands.writing import check_output
from lightning_liger.estimate import inspect_model
from lightning_liger.hardware import measure_matmul_flops
from lightning_liger.monitor.flops import count_flops
from tests.bad_inputs import row
from tests.lightning_liger.lazy.twin import LABELS, Twin
from tests.valid_calls import negative_log_probs

IDS = LABELS[..., None]
TOKEN_LOSS = partial(token_loss, loss=negative_log_probs)
BENCH: list[tuple[Any, ...]] = [
    ({"arms": "of"}, "arms", "'of'", "'off', 'on'"),
    ({"memory_budget": "auto,-1"}, "memory_budget", "-1.0", "a number of GiB above 1"),
    ({"memory_budget": "half"}, "memory_budget", "'half'", "'auto'"),
    ({"steps": 0}, "steps", "at least 1", "0"),
    ({"warm_up": -1}, "warm_up", "at least 0", "-1"),
    ({"time_limit": 0}, "time_limit", "above 0", "0"),
    ({"output": ""}, "output", "a path", "''"),
]
INSPECT: list[tuple[Any, ...]] = [
    ({"model": "lama"}, "model", "'lama'", "did you mean 'llama'"),
    ({"model": "vit"}, "model_type", "'vit'", "causal"),
    ({"config": {"hiden_size": 1}}, "config", "hiden_size", "hidden_size"),
    ({"num_gpus": 2, "strategy": "single"}, "num_gpus", "2", "single"),
    ({"precision": "bf16-mixed"}, "precision", "bf16-mixed", "fsdp"),
    ({"memory_budget": 0.5}, "memory_budget", "0.5", "gpu"),
    ({"fp8": True, "gpu": "a100-80gb"}, "fp8", "True", "A100 80GB (SXM), on which no float8"),
    ({"fp8": True, "gpu": "mi300x-192gb"}, "fp8", "True", "AMD Instinct MI300X 192GB, on which no float8"),
    ({"fp8": True, "strategy": "deepspeed_stage_3"}, "fp8", "True", "frees weights"),
    ({"memory_budget": 100, "gpu": "h100-80gb"}, "memory_budget", "100", "at most 79.1 GiB"),
]


def lazy() -> torch.Tensor:
    return Twin().lazy


def real() -> torch.Tensor:
    return Twin().real.detach()


# Functions of logits, their other arguments, and what messages say.
LOGITS: list[tuple[Any, ...]] = [
    *(
        (function, arguments, *mentions)
        for function in (token_scores, TOKEN_LOSS)
        for arguments, *mentions in (
            ({"labels": LABELS[:, 1:]}, "labels", "(2, 4)", "(2, 5)"),
            ({"labels": LABELS + 20}, "labels", "38", "vocab_size - 1 = 36"),
            ({"labels": LABELS, "temperature": torch.ones(3)}, "temperature", "(3,)", "(2, 5)"),
        )
    ),
    (topk_log_probs, {"ids": IDS + 20}, "ids", "38", "vocab_size - 1 = 36"),
    (divergence, {"teacher_logits": real()[..., 1:]}, "vocab", "36", "'common'"),
]

BAD_INPUTS = [
    row(partial(count_flops, "llama", 10), "model", "torch.nn.Module", "'llama'"),
    row(partial(count_flops, torch.nn.Linear(1, 1), 0), "seq_len", "at least 1", "0"),
    row(partial(count_flops, torch.nn.Linear(1, 1), 1, 1.5), "batch_size", "an integer", "1.5"),
    row(partial(measure_matmul_flops, "cpu", "float32"), "dtype", "torch.float32", "'float32'"),
    *(row(partial(run_bench, "--config=a.yaml", **each), *mentions) for each, *mentions in BENCH),
    row(
        partial(run_bench, "--config=a.yaml", output=__file__), "output must be a folder", "File exists", error=OSError
    ),
    row(partial(run_bench, "--trainer.devices=2"), "--config", "user.yaml"),
    *(
        row(partial(inspect_model, **{"model": "llama", **each}), *mentions, error=(ValueError, FileNotFoundError))
        for each, *mentions in INSPECT
    ),
    row(partial(run_init, "sft", output="a.txt"), "output", "the name of a yaml file", "'a.txt'"),
    row(partial(check_output, "no/a.json"), "output", "in a folder that exists", "no/a.json", error=FileNotFoundError),
    row(lambda tmp_path: check_output(tmp_path), "output", "the name of a file"),
    row(lambda tmp_path: inspect_model(str(tmp_path)), "model", "config.json", error=FileNotFoundError),
    row(partial(inspect_model, "no/such-model"), "model", "'no/such-model'", "cache", error=ConnectionError),
    *(
        row(lambda function=function, make=make, each=each: function(make(), **each), *mentions)
        for function, each, *mentions in LOGITS
        for make in (lazy, real)
    ),
    *(
        row(lambda function=function, make=make: function(make()), "logits", *mentions)
        for function in (partial(token_scores, labels=LABELS), partial(topk_log_probs, ids=IDS))
        for make, *mentions in (
            (lambda: real()[..., :0], "(2, 5, 0)", "at least one class"),
            (lambda: lazy().mT, "(2, 37, 5)", "dimension -2", "movedim(-2, -1)"),
        )
    ),
    row(lambda: divergence(real(), teacher_logits=lazy().mT), "teacher_logits.movedim(-2, -1)", "(2, 37, 5)"),
]
