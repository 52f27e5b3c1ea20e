"""Self-checks of the public ops: forward and backward against plain PyTorch in float64, on this machine.

``python -m liger_ops.self_check [--device cuda:0] [op ...]`` prints lines of JSON, one for each op and GPU. Sizes are
small: a GPU spends its time in compiling kernels, which Triton caches on disk. Needs torch and Triton only.
"""

import argparse
import itertools
import json
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import liger_ops

_BATCH_SIZE, _SEQ_LEN, _WIDTH, _VOCAB_SIZE = 2, 60, 64, 515  # no block divides the rows or the vocabulary
_EPS = 1e-5


@dataclass(frozen=True)
class SelfCheck:
    """One op, the same in plain PyTorch, and arguments.

    Attributes:
        fused: Calls the op; returns a tensor or several.
        plain: The same in plain PyTorch.
        inputs: Makes the differentiable arguments, float32 on the CPU.
        constants: Makes the others.
        magnitude: Of what the outputs are differences of, whose rounding they cannot be without.
    """

    fused: Callable[..., Any]
    plain: Callable[..., Any]
    inputs: Callable[[], list[Tensor]]
    constants: Callable[[], list[Tensor]] = list
    magnitude: float = 0.0


@dataclass(frozen=True)
class Result:
    """What a self-check found.

    Attributes:
        op: Name of the op in ``liger_ops``.
        device: Where it ran.
        dtype: Of its arguments.
        path: ``"triton"`` or ``"pytorch"``, the reference that ops run elsewhere.
        error: Largest difference from float64, of the output or gradient where it is the largest part of ``allowed``;
            NaN if there is no result to compare.
        allowed: What that difference may be.
        seconds: Time of the test, with the compilation of kernels.
        message: What is wrong; empty if nothing is.
        is_error: Whether the op raised an error.
    """

    op: str
    device: str
    dtype: str
    path: str
    error: float
    allowed: float
    seconds: float
    message: str = ""
    is_error: bool = False


def _rows(*shape: int) -> Tensor:
    return 2 * torch.randn(_BATCH_SIZE, _SEQ_LEN, *shape)


def _scale() -> Tensor:
    return 1 + 0.5 * torch.randn(_WIDTH)


def _grid(*shape: int) -> Tensor:
    """Quarters, of which every dtype holds the logits: their rounding would be left to chance."""
    return torch.randint(-4, 5, shape) / 4


def _head(width: int = _WIDTH) -> list[Tensor]:
    return [_grid(_BATCH_SIZE, _SEQ_LEN, width), _grid(_VOCAB_SIZE, width)]


def _labels() -> Tensor:
    labels = torch.randint(_VOCAB_SIZE, (_BATCH_SIZE, _SEQ_LEN))
    labels[:, 1::4] = liger_ops.IGNORE_INDEX
    return labels


def _rotation() -> list[Tensor]:
    angles = (6 * torch.rand(_SEQ_LEN, _WIDTH // 2)).repeat(1, 2)
    return [angles.cos(), angles.sin()]


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin


def _wide(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


def _log_softmax(x: Tensor, weight: Tensor) -> Tensor:
    return _wide(F.linear(x, weight)).log_softmax(-1)


def _label_log_probs(x: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    kept = labels != liger_ops.IGNORE_INDEX
    log_probs = _log_softmax(x, weight).gather(-1, labels.clamp(min=0)[..., None])[..., 0]
    return log_probs.where(kept, 0.0)


def _kl(student: Tensor, teacher: Tensor) -> Tensor:
    """The mean over tokens of KL(teacher || student), both log-probabilities."""
    return F.kl_div(student.flatten(0, -2), teacher.flatten(0, -2), reduction="batchmean", log_target=True)


def _relu_squared(x: Tensor) -> Tensor:
    return F.relu(x).square()


def _gelu(x: Tensor) -> Tensor:
    return F.gelu(x, approximate="tanh")


def _gated(op: Callable[..., Tensor], activation: Callable[[Tensor], Tensor], **options: Any) -> SelfCheck:
    return SelfCheck(
        lambda gate, up: op(gate, up, **options),
        lambda gate, up: activation(gate) * up,
        lambda: [_rows(_WIDTH), _rows(_WIDTH)],
    )


def _self_checks() -> dict[str, SelfCheck]:
    """By names of ops; made anew for each run, of the functions that ``liger_ops`` has then."""
    ops = liger_ops
    return {
        "linear_cross_entropy": SelfCheck(
            lambda x, weight, labels: ops.linear_cross_entropy(x, weight, labels),
            lambda x, weight, labels: F.cross_entropy(_wide(F.linear(x, weight)).flatten(0, 1), labels.flatten()),
            _head,
            lambda: [_labels()],
            magnitude=1.0,
        ),
        "cross_entropy": SelfCheck(
            lambda logits, labels: ops.cross_entropy(logits, labels.flatten()),
            lambda logits, labels: F.cross_entropy(_wide(logits), labels.flatten()),
            lambda: [_rows(_VOCAB_SIZE).flatten(0, 1)],
            lambda: [_labels()],
            magnitude=1.0,
        ),
        "linear_divergence": SelfCheck(
            lambda x, weight, *teacher: ops.linear_divergence(x, weight, *teacher),
            lambda x, weight, *teacher: _kl(_log_softmax(x, weight), _log_softmax(*teacher)),
            _head,
            lambda: _head(_WIDTH // 2),
            magnitude=4.0,
        ),
        "divergence": SelfCheck(
            lambda student, teacher: ops.divergence(student, teacher),
            lambda student, teacher: _kl(_wide(student).log_softmax(-1), _wide(teacher).log_softmax(-1)),
            lambda: [_rows(_VOCAB_SIZE)],
            lambda: [_rows(_VOCAB_SIZE)],
            magnitude=4.0,
        ),
        "linear_log_probs": SelfCheck(
            lambda x, weight, labels: ops.linear_log_probs(x, weight, labels).log_probs,
            _label_log_probs,
            _head,
            lambda: [_labels()],
            magnitude=1.0,
        ),
        "linear_token_loss": SelfCheck(
            lambda x, weight, labels: ops.linear_token_loss(
                x, weight, labels, lambda scores, index: -scores.log_probs.exp()
            )[0],
            lambda x, weight, labels: (
                -_label_log_probs(x, weight, labels).exp()[labels != liger_ops.IGNORE_INDEX].sum()
            ),
            _head,
            lambda: [_labels()],
            magnitude=1.0,
        ),
        "linear_topk_log_probs": SelfCheck(
            lambda x, weight, ids: ops.linear_topk_log_probs(x, weight, ids),
            lambda x, weight, ids: _log_softmax(x, weight).gather(-1, ids),
            _head,
            lambda: [torch.randint(_VOCAB_SIZE, (_BATCH_SIZE, _SEQ_LEN, 5))],
            magnitude=4.0,
        ),
        "rms_norm": SelfCheck(
            lambda x, weight: ops.rms_norm(x, weight.shape, weight, _EPS),
            lambda x, weight: F.rms_norm(x, weight.shape, weight, _EPS),
            lambda: [_rows(_WIDTH), _scale()],
        ),
        "add_rms_norm": SelfCheck(
            lambda x, residual, weight: ops.add_rms_norm(x, residual, weight.shape, weight, _EPS),
            lambda x, residual, weight: (F.rms_norm(x + residual, weight.shape, weight, _EPS), x + residual),
            lambda: [_rows(_WIDTH), _rows(_WIDTH), _scale()],
        ),
        "layer_norm": SelfCheck(
            lambda x, weight, bias: ops.layer_norm(x, weight.shape, weight, bias, _EPS),
            lambda x, weight, bias: F.layer_norm(x, weight.shape, weight, bias, _EPS),
            lambda: [_rows(_WIDTH), _scale(), _scale()],
        ),
        "group_norm": SelfCheck(
            lambda x, weight, bias: ops.group_norm(x, 4, weight, bias, _EPS),
            lambda x, weight, bias: F.group_norm(x, 4, weight, bias, _EPS),
            lambda: [_rows(_WIDTH), torch.randn(_SEQ_LEN), torch.randn(_SEQ_LEN)],
        ),
        "apply_rotary": SelfCheck(
            lambda q, k, cos, sin: ops.apply_rotary(q, k, cos, sin),
            lambda q, k, cos, sin: (_rotate(q, cos, sin), _rotate(k, cos, sin)),
            lambda: [torch.randn(_BATCH_SIZE, heads, _SEQ_LEN, _WIDTH) for heads in (4, 2)],
            _rotation,
        ),
        "silu_mul": _gated(ops.silu_mul, F.silu),
        "gelu_mul": _gated(ops.gelu_mul, _gelu, approximate="tanh"),
        "relu_squared_mul": _gated(ops.relu_squared_mul, _relu_squared),
        "relu_squared": SelfCheck(lambda x: ops.relu_squared(x), _relu_squared, lambda: [_rows(_WIDTH)]),
    }


NAMES = tuple(_self_checks())
"""The ops that have a self-check, those first whose kernels compile for longest."""


def run_self_checks(
    names: Iterable[str] = NAMES, device: torch.device | str = "cpu", dtype: torch.dtype = torch.float32
) -> Iterable[Result]:
    """Runs self-checks one after another.

    Args:
        names: The ops.
        device: Where they run.
        dtype: Of their floating-point arguments.

    Yields:
        The result of each op, also if it raises an error.

    Raises:
        KeyError: For an op without a self-check.
    """
    device = torch.device(device)
    tests = _self_checks()
    path = "triton" if liger_ops.backend.use_triton(torch.empty(1, device=device, dtype=dtype)) else "pytorch"
    for name in names:
        test = tests[name]
        start = time.perf_counter()
        error, allowed, is_error = float("nan"), float("nan"), False
        try:
            message, error, allowed = _compare(test, device, dtype)
        except Exception as raised:  # a row of the results: the other ops may be right
            is_error = True
            message = f"{type(raised).__name__}: {next(iter(str(raised).strip().splitlines()), '')}"
        seconds = time.perf_counter() - start
        kind = str(dtype).removeprefix("torch.")
        yield Result(name, str(device), kind, path, error, allowed, seconds, message, is_error)


def _compare(test: SelfCheck, device: torch.device, dtype: torch.dtype) -> tuple[str, float, float]:
    """What is wrong with the worst of all outputs and gradients, its error and what is allowed."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        inputs, constants = test.inputs(), test.constants()

    def run(function: Callable[..., Any], in_dtype: torch.dtype) -> list[Tensor]:
        """Outputs and gradients, of the same values rounded to ``dtype``."""
        leaves = [x.to(device, dtype, copy=True).to(in_dtype).requires_grad_() for x in inputs]
        others = [x.to(device, dtype).to(in_dtype) if x.is_floating_point() else x.to(device) for x in constants]
        result = function(*leaves, *others)
        outputs = result if isinstance(result, tuple) else (result,)
        generator = torch.Generator().manual_seed(1)
        upstream = [(torch.randint(-8, 9, y.shape, generator=generator) / 4).to(y) for y in outputs]
        return [*outputs, *torch.autograd.grad(outputs, leaves, upstream)]

    actual, eager, truth = run(test.fused, dtype), run(test.plain, dtype), run(test.plain, torch.float64)
    num_outputs = len(truth) - len(inputs)
    found: list[tuple[float, float]] = []
    for index, (ours, plain, true) in enumerate(zip(actual, eager, truth, strict=True)):
        where = f"output {index}" if index < num_outputs else f"gradient of argument {index - num_outputs}"
        if ours.shape != true.shape:
            return f"{where} has shape {tuple(ours.shape)}, expected {tuple(true.shape)}", float("nan"), float("nan")
        error = (ours.double() - true).abs().max().item()
        magnitude = max(test.magnitude if index < num_outputs else 0.0, true.abs().max().item())
        # As accurate as plain PyTorch in this dtype, but for chance and a rounding of the result.
        allowed = 4 * (plain.double() - true).abs().max().item() + 4 * torch.finfo(ours.dtype).eps * magnitude
        if not error <= allowed:  # also NaN
            return f"{where} is wrong: error {error:.2e}, allowed {allowed:.2e}", error, allowed
        found.append((error, allowed))
    return "", *max(found, key=lambda pair: pair[0] / (pair[1] or 1.0))


def main() -> None:
    """Prints the names of the ops, then a line for each op and device; ends after an op that raises an error."""
    parser = argparse.ArgumentParser(prog="python -m liger_ops.self_check", description="Test ops on this machine.")
    parser.add_argument("ops", nargs="*", metavar="op", help=f"by default all: {', '.join(NAMES)}")
    parser.add_argument("--device", help="by default all GPUs, or the CPU")
    parser.add_argument("--part", metavar="I/N", default="0/1", help="every N-th op, from number I on")
    arguments = parser.parse_args()
    if unknown := set(arguments.ops) - set(NAMES):
        parser.error(f"op must be one of {', '.join(NAMES)}, got {', '.join(sorted(unknown))}")
    first, step = map(int, arguments.part.split("/"))
    ops = (arguments.ops or NAMES)[first::step]
    print(json.dumps({"ops": ops}), flush=True)
    devices = [arguments.device] if arguments.device else [f"cuda:{i}" for i in range(torch.cuda.device_count())]
    torch.set_num_threads(1)
    for op, name in itertools.product(ops, devices or ["cpu"]):
        device = torch.device(name)
        has_bfloat16 = device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 0)
        (result,) = run_self_checks([op], device, torch.bfloat16 if has_bfloat16 else torch.float32)
        print(json.dumps(asdict(result)), flush=True)
        if result.is_error:  # which may have spoilt the GPU for this process
            break


if __name__ == "__main__":
    main()
