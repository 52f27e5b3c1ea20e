"""Bad arguments of the table of GPUs."""

import functools

from lightning_liger.hardware import find_gpu, get_gpu, measure_matmul_flops
from tests.bad_inputs import BadInput

BAD_INPUTS: list[BadInput] = [
    BadInput(f"{function.__name__}-{case}", functools.partial(function, *arguments), mentions)
    for function, case, arguments, mentions in (
        (get_gpu, "unknown", ("h101",), ("gpu", "h100-80gb", "'h101'")),
        (get_gpu, "none", (None,), ("gpu", "string", "None")),
        (find_gpu, "no_memory", ("NVIDIA H100", 0), ("total_memory", "at least 1", "0")),
        (find_gpu, "no_name", (None, 1), ("device_name", "string", "None")),
        (measure_matmul_flops, "device", ("gpu?", None), ("device", "'cuda:0'", "'gpu?'")),
        (measure_matmul_flops, "dtype", ("cpu", "float32"), ("dtype", "torch.float32", "'float32'")),
    )
]
