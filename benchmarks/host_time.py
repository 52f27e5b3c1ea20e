"""``python -m benchmarks.host_time [--profile ARM]``: what a layer costs the host, without a GPU.

A tiny Llama runs on the CPU as it would on a GPU, but that the last call of each launch, into the driver, does nothing.
So the numbers of a model are garbage, and its time is the host's: of PyTorch's dispatcher, of Python, of ops and of
bookkeeping. Prints microseconds of processor time a layer, the least of several runs; ``--profile`` by function too.
"""

import argparse
import cProfile
import pstats
import sys
import time
from typing import Any

import torch
import triton
from rich.console import Console
from rich.table import Table
from transformers import LlamaConfig, LlamaForCausalLM

from liger_ops import backend
from lightning_liger import apply_liger_kernels
from lightning_liger.activations.layers import control_layers

NUM_LAYERS = 16
ARMS = {
    "stock": "transformers, eager",
    "kernels": "with our kernels",
    "cheap": "and bookkeeping of cheap tensors, the default",
    "recompute": "all layers recomputed",
}
"""And what they are."""
IDS = torch.arange(16)[None]


def make(arm: str) -> Any:
    """A model of tiny sizes, which ran once, with real kernels' references."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=256, num_hidden_layers=NUM_LAYERS, use_cache=False, **sizes))
    if arm != "stock":
        apply_liger_kernels(model)
    if arm in ("cheap", "recompute"):
        control: Any = control_layers(model)
        control.modes = [arm] * NUM_LAYERS
    step(model)
    return model


def step(model: Any) -> tuple[float, float]:
    """Seconds of forward and of backward."""
    start = time.process_time()
    loss = model(input_ids=IDS, labels=IDS).loss
    middle = time.process_time()
    loss.backward()
    end = time.process_time()
    model.zero_grad()
    return middle - start, end - middle


def launch_nothing() -> None:
    """From now on ops on CPU tensors launch kernels, whose launch ends before the driver's part."""

    class Driver:
        get_current_stream = staticmethod(lambda device: 0)

    def launch_first(kernel: Any, key: Any, num_programs: int, num_warps: int, arguments: Any) -> None:
        kernel._compiled[key] = (lambda *arguments: None, None, None, None)

    old = backend.use_triton
    for module in [module for name, module in sys.modules.items() if name.startswith(("liger_ops", "lightning_liger"))]:
        for name, value in list(vars(module).items()):
            if value is old:
                setattr(module, name, lambda tensor: tensor.dtype in backend._TRITON_DTYPES)
    triton.runtime.driver._active = Driver()
    torch.cuda.current_device = lambda: -1  # as of a tensor on the CPU
    backend._knows_launcher = lambda: True
    backend.Kernel._launch_first = launch_first  # type: ignore[method-assign]


def main() -> None:
    """The module's docstring says what is printed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--profile", choices=ARMS)
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.set_flush_denormal(True)  # uninitialized outputs are full of them, and slow
    models = {arm: make(arm) for arm in ARMS}
    launch_nothing()
    times: dict[str, list[tuple[float, float]]] = {arm: [] for arm in ARMS}
    for _ in range(20):
        for arm, model in models.items():
            times[arm].append(step(model))
    table = Table("model", "forward, us", "backward, us")
    for arm, text in ARMS.items():
        table.add_row(text, *(f"{1e6 * min(each) / NUM_LAYERS:.0f}" for each in zip(*times[arm], strict=True)))
    Console().print(table)
    if options.profile:
        profile = cProfile.Profile()
        profile.enable()
        for _ in range(20):
            step(models[options.profile])
        profile.disable()
        pstats.Stats(profile).sort_stats("tottime").print_stats(40)


if __name__ == "__main__":
    main()
