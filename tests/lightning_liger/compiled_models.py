"""Measures what ``torch.compile`` makes of a tiny model of every architecture, patched and as it is.

python -m tests.lightning_liger.compiled_models [ARCHITECTURE ...]

Adds lines to ``compiled_models.jsonl`` for those that it does not have yet. The graphs of a patched model are those of
AOT autograd, forward and backward, in which tensors with a vocabulary are looked for.
"""

import copy
import json
import math
import multiprocessing
import sys
import warnings
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor
from torch._decomp import get_decompositions
from torch._dynamo.backends.common import aot_autograd
from transformers import PreTrainedModel

from lightning_liger import apply_liger_kernels
from tests.lightning_liger.architectures import CAUSAL_LM_TYPES, UNBUILDABLE, tiny_causal_lm, tiny_inputs

PATH = Path(__file__).with_suffix(".jsonl")
SECONDS = 400
"""After which a measurement is given up."""

DECOMPOSITIONS = get_decompositions([torch.ops.aten.softplus_backward])
"""Those of ops whose results are laid out otherwise than PyTorch's compiler assumes, on a CPU."""


class Graphs:
    """A compiler that counts graphs, and keeps the sizes in memory of the tensors with a vocabulary in them."""

    def __init__(self, vocab_size: int) -> None:
        self.vocab_size, self.num_graphs = vocab_size, 0
        self.sizes: list[int] = []

    @property
    def largest(self) -> int:
        return max(self.sizes, default=0)

    def __call__(self, module: Any, inputs: Any) -> Any:
        self.num_graphs += 1
        compiler = aot_autograd(fw_compiler=self._watch, bw_compiler=self._watch, decompositions=DECOMPOSITIONS)
        return compiler(module, inputs)

    def _watch(self, module: torch.fx.GraphModule, inputs: Any) -> Any:
        for node in module.graph.nodes:
            value = node.meta.get("val")
            if node.op != "placeholder" and isinstance(value, Tensor):
                sizes, strides = hints(value.shape), hints(value.stride())
                if self.vocab_size in sizes:
                    taken = (size for size, stride in zip(sizes, strides, strict=True) if stride != 0)
                    self.sizes.append(math.prod(taken))
        return module.forward


def hints(sizes: Any) -> list[int]:
    """Sizes without guards for those that are dynamic."""
    return [size.node.hint if isinstance(size, torch.SymInt) else size for size in sizes]


def run(model: PreTrainedModel, batch: dict[str, Any], **options: Any) -> tuple[Tensor, list[Tensor]]:
    """The loss, and the gradients of all parameters that have one; compiled if ``options`` are given."""
    torch.manual_seed(0)
    forward = torch.compile(model, **options) if options else model
    loss = forward(**batch).loss
    loss.backward()
    grads = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    model.zero_grad()
    return loss.detach(), grads


def compare(model: PreTrainedModel, batch: dict[str, Any]) -> tuple[int, int, float]:
    """The graphs and the logits in them of a compiled model, and the largest distance from the eager one.

    It is that of the loss and of gradients, relative to a tensor's norm, or to a thousandth of the largest gradient's.
    """
    torch.compiler.reset()
    batch_size, num_tokens = len(batch["labels"]), batch["labels"].numel()
    vocab_size = len(next(model.get_output_embeddings().parameters()))  # of the first if these are a list
    watch = Graphs(vocab_size)
    loss, grads = run(model, batch)
    compiled_loss, compiled_grads = run(model, batch, backend=watch)
    least = torch.stack([grad.norm() for grad in grads]).max() / 1000  # as biases of keys have a gradient of rounding
    distances = [
        ((one - other).norm() / other.norm().clamp_min(least)).item()
        for one, other in zip([compiled_loss, *compiled_grads], [loss, *grads], strict=True)
    ]
    num_logits = sum(size / vocab_size in (num_tokens, num_tokens - batch_size) for size in watch.sizes)
    return watch.num_graphs, num_logits, float(f"{max(distances):.1e}")


def measure(model_type: str) -> dict[str, Any]:
    """Graphs of the stock and of the patched model, logits in them, and their distances from their eager models."""
    stock = tiny_causal_lm(model_type).train()
    for module in stock.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    stock.config.use_cache = False
    batch = tiny_inputs(stock)
    patched = copy.deepcopy(stock)
    apply_liger_kernels(patched)
    found: dict[str, Any] = {"architecture": model_type}
    if getattr(stock(**batch), "loss", None) is None:
        return found
    for name, model in (("stock", stock), ("patched", patched)):
        try:
            num_graphs, num_logits, distance = compare(model, batch)
        except Exception as error:  # whatever the compiler raises is the result
            return found | {name: f"{type(error).__name__}: {error}".splitlines()[0][:200]}
        found |= {name: num_graphs, f"{name}_logits": num_logits, f"{name}_distance": distance}
    return found


def _send(model_type: str, connection: Any) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        connection.send(measure(model_type))


def read() -> dict[str, dict[str, Any]]:
    """What was measured, by architecture."""
    lines = PATH.read_text(encoding="utf-8").splitlines() if PATH.exists() else []
    return {line["architecture"]: line for line in map(json.loads, lines)}


def main() -> None:
    """Measures those that are named, by default all that are missing, each in a process of its own."""
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    done = read()
    wanted = sys.argv[1:] or [name for name in CAUSAL_LM_TYPES if name not in done and name not in UNBUILDABLE]
    for model_type in wanted:
        receiver, sender = multiprocessing.Pipe(duplex=False)
        process = multiprocessing.get_context("fork").Process(target=_send, args=(model_type, sender))
        process.start()
        sender.close()
        try:
            found = receiver.recv() if receiver.poll(SECONDS) else {"architecture": model_type, "stock": "takes long"}
        except EOFError:  # the process ended without a result
            found = {"architecture": model_type, "stock": "failed"}
        process.kill()
        process.join()
        done[model_type] = found
        print(json.dumps(found), flush=True)
        PATH.write_text("".join(f"{json.dumps(done[name])}\n" for name in sorted(done)), encoding="utf-8")


if __name__ == "__main__":
    main()
