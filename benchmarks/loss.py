"""Time and memory of the LM head and its loss, forward and backward, beside what a user could pick instead.

    python -m benchmarks.loss --out benchmarks/results/loss_h200.json

Time is the median of CUDA events. Memory is the peak above what was allocated before, gradients included. The error is
the distance of the gradient of the head from a float64 computation, relative to its norm, on a smaller problem.
"""

import argparse
import json
import statistics
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.environment import environment
from liger_ops import linear_cross_entropy

SHAPES = {
    "M8192 H4096 V128256": (8192, 4096, 128256, 0.0),
    "M8192 H2304 V256000": (8192, 2304, 256000, 0.0),
    "M4096 H896 V151936": (4096, 896, 151936, 0.0),
    "M32768 H4096 V128256": (32768, 4096, 128256, 0.0),
    "M8192 H4096 V128256, 60% ignored": (8192, 4096, 128256, 0.6),
}

Loss = Callable[[Tensor, Tensor, Tensor], Tensor]


def eager(hidden_states: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(F.linear(hidden_states, weight).float(), labels)


def contenders() -> dict[str, Loss]:
    """The losses to compare, by name; liger-kernel's if it is installed."""
    found: dict[str, Loss] = {
        "eager": eager,
        "compile": torch.compile(eager),
        "ours": linear_cross_entropy,
        "ours, 128 MiB": lambda x, w, y: linear_cross_entropy(x, w, y, chunk_bytes=128 * 2**20),
    }
    try:
        from liger_kernel.transformers import LigerFusedLinearCrossEntropyLoss
    except ImportError:
        return found
    published = LigerFusedLinearCrossEntropyLoss()
    return {**found, "liger-kernel": lambda x, w, y: published(w, x, y)}


def measure(loss: Loss, hidden_states: Tensor, weight: Tensor, labels: Tensor, repeats: int) -> tuple[float, float]:
    """Median milliseconds and peak MiB of one forward and backward."""

    def step() -> None:
        hidden_states.grad = weight.grad = None
        loss(hidden_states, weight, labels).backward()

    for _ in range(2):
        step()
    hidden_states.grad = weight.grad = None
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    step()
    torch.cuda.synchronize()
    peak = (torch.cuda.max_memory_allocated() - before) / 2**20
    times = []
    for _ in range(repeats):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        step()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end))
    return statistics.median(times), peak


def gradient_error(loss: Loss) -> float:
    """Relative distance of the head's bfloat16 gradient from float64's, on 4096 tokens and 32000 classes."""
    generator = torch.Generator(device="cuda").manual_seed(1)
    hidden_states = torch.randn(4096, 512, device="cuda", generator=generator).bfloat16().requires_grad_()
    weight = (torch.randn(32000, 512, device="cuda", generator=generator) / 512**0.5).bfloat16().requires_grad_()
    labels = torch.randint(32000, (4096,), device="cuda", generator=generator)
    (gradient,) = torch.autograd.grad(loss(hidden_states, weight, labels), weight)
    exact_weight = weight.detach().double().requires_grad_()
    exact = F.cross_entropy(F.linear(hidden_states.detach().double(), exact_weight), labels)
    (truth,) = torch.autograd.grad(exact, exact_weight)
    return ((gradient.double() - truth).norm() / truth.norm()).item()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="where to write the results, as JSON")
    parser.add_argument("--repeats", type=int, default=10)
    options = parser.parse_args()
    losses = contenders()
    errors = {name: gradient_error(loss) for name, loss in losses.items()}
    rows = []
    for shape, (num_tokens, hidden_size, vocab_size, ignored) in SHAPES.items():
        generator = torch.Generator(device="cuda").manual_seed(0)
        hidden_states = torch.randn(num_tokens, hidden_size, device="cuda", generator=generator).bfloat16()
        weight = (
            torch.randn(vocab_size, hidden_size, device="cuda", generator=generator) / hidden_size**0.5
        ).bfloat16()
        labels = torch.randint(vocab_size, (num_tokens,), device="cuda", generator=generator)
        labels[torch.rand(num_tokens, device="cuda", generator=generator) < ignored] = -100
        hidden_states.requires_grad_()
        weight.requires_grad_()
        for name, loss in losses.items():
            torch._dynamo.reset()
            milliseconds, peak = measure(loss, hidden_states, weight, labels, options.repeats)
            rows.append({"shape": shape, "loss": name, "ms": milliseconds, "peak_mib": peak})
            print(f"{shape:36}{name:16}{milliseconds:9.2f} ms{peak:9.0f} MiB", flush=True)
            torch.cuda.empty_cache()
    for name, error in errors.items():
        print(f"gradient error {name:16}{error:.2e}")
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps({"environment": environment(), "rows": rows, "gradient_error": errors}, indent=1))


if __name__ == "__main__":
    main()
