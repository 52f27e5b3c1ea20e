"""Bad arguments of the monitor and of the count of FLOPs."""

import functools

from torch import nn

from lightning_liger import LigerMonitor
from lightning_liger.monitor.flops import count_flops
from tests.bad_inputs import BadInput

BAD_INPUTS: list[BadInput] = [
    BadInput(f"count_flops-{case}", functools.partial(count_flops, *arguments), mentions)
    for case, arguments, mentions in (
        ("model", ("llama", 10), ("model", "torch.nn.Module", "'llama'")),
        ("seq_len", (nn.Linear(1, 1), 0), ("seq_len", "at least 1", "0")),
        ("batch_size", (nn.Linear(1, 1), 1, 1.5), ("batch_size", "an integer", "1.5")),
    )
] + [
    BadInput(f"LigerMonitor-{argument}-{value!r}", functools.partial(LigerMonitor, **{argument: value}), mentions)
    for argument, value, mentions in (
        ("every_n_steps", 0, ("every_n_steps", "at least 1", "0")),
        ("every_n_steps", 2.5, ("every_n_steps", "an integer", "2.5")),
        ("skip_steps", -1, ("skip_steps", "at least 0", "-1")),
        ("gradient_norm", "no", ("gradient_norm", "True or False", "'no'")),
        ("page", "", ("page", "a path", "''")),
        ("page", True, ("page", "a path", "True")),
    )
]
