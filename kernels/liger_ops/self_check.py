"""Self-checks of the public ops: forward and backward against plain PyTorch in float64, on this machine.

Those of float8 compare each kind of product with the one that a CPU emulates in float32: only rounding differs.
That of AdamW's small moments compares with the same random numbers on a CPU.

``python -m liger_ops.self_check [--device cuda:0] [op ...]`` prints lines of JSON, one for each op and GPU. Sizes are
small: a GPU spends its time in compiling kernels, which Triton caches on disk. Needs torch and Triton only.
"""

import argparse
import functools
import itertools
import json
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, replace
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

import liger_ops
from liger_ops.backend import wide
from liger_ops.fp8.gated_mlp import scaled_gated_mlp
from liger_ops.fp8.linear import scaled_linear
from liger_ops.fp8.products import unsupported
from liger_ops.mhc.streams import mix_streams_reference
from liger_ops.moe.experts import experts_reference
from liger_ops.moe.gate import Gate
from liger_ops.moe.router import router_reference
from liger_ops.norm.dyt import dyt_reference
from liger_ops.norm.poly_norm import poly_norm_reference
from liger_ops.norm.sliced_norm import sliced_norm_reference
from liger_ops.optim import AdamW
from liger_ops.softmax import softmax_reference

_EPS = 1e-5


class Sizes(NamedTuple):
    """Sizes of arguments; by default, no block divides the rows or the vocabulary."""

    batch_size: int = 2
    seq_len: int = 60
    width: int = 64
    vocab_size: int = 515


def _call(op: Callable[..., Any], *tensors: Tensor, **options: Any) -> Any:
    return op(*tensors, **options)


class Case(NamedTuple):
    """An op, the same in plain PyTorch, and arguments."""

    plain: Callable[..., Any]  # the op of tensors; returns a tensor or several
    make: Callable[[Sizes], tuple[list[Tensor], list[Tensor]]]  # differentiable tensors and others, float32 on the CPU
    call: Callable[..., Any] = _call  # calls the op, which is its first argument, with the tensors
    magnitude: float = 0.0  # of what the first output is a difference of, whose rounding it cannot be without


@dataclass(frozen=True)
class Result:
    """What a self-check found."""

    op: str
    device: str
    dtype: str
    path: str  # "triton", "pytorch", the reference that ops run elsewhere, or "emulated", of float8 on CPUs
    error: float  # largest difference from float64, where it is the largest part of what is allowed; NaN without result
    allowed: float
    seconds: float  # with the compilation of kernels
    message: str = ""  # what is wrong; empty if nothing is
    is_error: bool = False  # whether the op raised an error
    is_unsupported: bool = False  # whether the device cannot run it, for the reason in message


def _rows(sizes: Sizes) -> Tensor:
    return 2 * torch.randn(sizes[:3])


def _grid(*shape: int) -> Tensor:
    """Quarters, of which every dtype holds the logits: their rounding would be left to chance."""
    return torch.randint(-4, 5, shape) / 4


def _with_ignored(labels: Tensor) -> Tensor:
    labels[..., 1::4] = liger_ops.IGNORE_INDEX
    return labels


def _norm(num_inputs: int, num_parameters: int) -> Callable[[Sizes], tuple[list[Tensor], list[Tensor]]]:
    def make(sizes: Sizes) -> tuple[list[Tensor], list[Tensor]]:
        parameters = [1 + 0.5 * torch.randn(sizes.width) for _ in range(num_parameters)]
        return [*(_rows(sizes) for _ in range(num_inputs)), *parameters], []

    return make


def _modulated(sizes: Sizes) -> tuple[list[Tensor], list[Tensor]]:
    scales = [torch.randn(sizes.batch_size, 1, sizes.width) for _ in range(2)]
    return [*_norm(1, 1)(sizes)[0], *scales], []


def _dynamic(sizes: Sizes) -> tuple[list[Tensor], list[Tensor]]:
    (x, *parameters), _ = _norm(1, 2)(sizes)
    return [x, torch.full((1,), 0.75), *parameters], []


def _channels(sizes: Sizes) -> tuple[list[Tensor], list[Tensor]]:
    batch_size, *positions, _ = sizes
    return [torch.randn(batch_size, 4, *positions), torch.randn(4), torch.randn(4)], []


def _heads(sizes: Sizes) -> tuple[list[Tensor], list[Tensor]]:
    batch_size, seq_len, width, _ = sizes
    angles = (6 * torch.rand(seq_len, width)).repeat(1, 2)
    return [torch.randn(batch_size, heads, seq_len, 2 * width) for heads in (3, 1)], [angles.cos(), angles.sin()]


def make_logits(sizes: Sizes) -> tuple[list[Tensor], list[Tensor]]:
    """With labels that are least likely: rounding of a loss near 0 would be left to chance."""
    logits = 3 * torch.randn(sizes.batch_size * sizes.seq_len, sizes.width)
    return [logits], [_with_ignored(logits.argmin(1))]


def _head(sizes: Sizes) -> tuple[list[Tensor], list[Tensor]]:
    *shape, width, vocab_size = sizes
    bias = torch.randint(-16, 17, (vocab_size,)) / 16
    labels = _with_ignored(torch.randint(vocab_size, shape))
    return [_grid(*shape, width), _grid(vocab_size, width), bias], [labels]


def _head_and_ids(sizes: Sizes) -> tuple[list[Tensor], list[Tensor]]:
    return _head(sizes)[0], [torch.randint(sizes.vocab_size, (*sizes[:2], 3))]


def _two_heads(sizes: Sizes) -> tuple[list[Tensor], list[Tensor]]:
    """The student's head, and a teacher of half its width, without bias."""
    return _head(sizes)[0], _head(sizes._replace(width=max(1, sizes.width // 2)))[0][:2]


def _log_softmax(*head: Tensor) -> Tensor:
    return wide(F.linear(*head)).log_softmax(-1)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin


def plain_cross_entropy(logits: Tensor, labels: Tensor, reduction: str = "mean") -> Tensor:
    """Cross entropy of logits ``[*, vocab_size]`` in float32 or wider."""
    losses = F.cross_entropy(wide(logits).flatten(0, -2), labels.flatten(), reduction=reduction)
    return losses.view(labels.shape) if reduction == "none" else losses


def plain_kl(student: Tensor, teacher: Tensor, reduction: str = "mean") -> Tensor:
    """KL(teacher || student) of logits for each token, or its mean, 0 for no tokens."""
    s, t = (wide(logits).log_softmax(-1) for logits in (student, teacher))
    losses = (t.exp() * (t - s)).sum(-1)
    return losses if reduction == "none" else losses.sum() / max(1, losses.numel())


def _log_probs_and_entropy(*tensors: Tensor) -> tuple[Tensor, Tensor]:
    return _scores_of(_log_softmax(*tensors[:-1]), tensors[-1])


def _scores_of(log_probs: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    kept = labels != liger_ops.IGNORE_INDEX
    entropy = -(log_probs.exp() * log_probs.masked_fill(log_probs == -torch.inf, 0.0)).sum(-1)
    return log_probs.gather(-1, labels.where(kept, 0)[..., None])[..., 0].where(kept, 0.0), entropy.where(kept, 0.0)


def _likelihoods(*tensors: Tensor) -> Tensor:
    kept = tensors[-1] != liger_ops.IGNORE_INDEX
    return -_log_probs_and_entropy(*tensors)[0][kept].exp().sum()


def relu_squared(x: Tensor) -> Tensor:
    """Relu, squared, in plain PyTorch."""
    return F.relu(x).square()


def unit_case(activation: Callable[[Tensor], Tensor], **options: Any) -> Case:
    """A gated unit: ``activation(gate) * up``."""
    return Case(lambda gate, up: activation(gate) * up, _norm(2, 0), functools.partial(_call, **options))


def _experts(sizes: Sizes) -> tuple[list[Tensor], list[Tensor]]:
    """Tokens, weights of five experts and scores of two for each token; one has no token, one may come twice."""
    weights = [torch.randn(5, 2 * 16, sizes.width), torch.randn(5, sizes.width, 16)]
    index = torch.randint(4, (*sizes[:2], 2))
    return [torch.randn(sizes[:3]), *(each / 4 for each in weights), torch.randn(index.shape)], [index]


def _plain_experts(x: Tensor, gate_up: Tensor, down: Tensor, scores: Tensor, index: Tensor) -> Tensor:
    tensors = x.flatten(0, -2), gate_up, down, index.flatten(0, -2), scores.flatten(0, -2)
    return experts_reference(*tensors, None, None, Gate(), False, False, *4 * [None]).view(x.shape)


def _router_logits(sizes: Sizes) -> tuple[list[Tensor], list[Tensor]]:
    """No two of a token are equal, also in 16 bits up to a width of 256."""
    return [torch.rand(sizes[:3]).argsort(-1) / 8 - 3], []


def _streams(sizes: Sizes) -> Tensor:
    """Four of each token."""
    return torch.randn(*sizes[:2], 4, sizes.width)


def _hyper_connections(sizes: Sizes) -> tuple[list[Tensor], list[Tensor]]:
    phi = torch.randn(4 * sizes.width, 24) * (4 * sizes.width) ** -0.5
    return [_streams(sizes), phi, torch.randn(24), *(torch.full((1,), each) for each in (0.5, -0.75, 1.25))], []


def _plain_coefficients(x: Tensor, phi: Tensor, b: Tensor, *alphas: Tensor) -> tuple[Tensor, ...]:
    rows = wide(x).flatten(-2)
    mix = rows @ wide(phi) / (rows.square().mean(-1, keepdim=True) + 1e-6).sqrt()
    columns = zip(mix.split([4, 4, 16], -1), wide(b).split([4, 4, 16]), alphas, strict=True)
    pre, post, res = (part * wide(alpha) + bias for part, bias, alpha in columns)
    matrix = res.unflatten(-1, (4, 4)).softmax(-1) + 1e-6
    for dim in (-2, *(-1, -2) * 19):
        matrix = matrix / (matrix.sum(dim, keepdim=True) + 1e-6)
    return pre.sigmoid(), 2 * post.sigmoid(), matrix


def _attention_scores(sizes: Sizes) -> tuple[list[Tensor], list[Tensor]]:
    """Of four heads in two groups, each of as many queries and keys as there are columns."""
    return [2 * torch.randn(sizes.batch_size, 4, *2 * [sizes.width]), torch.randn(2, 2, 3, 3) / 4, torch.randn(2)], []


# A budget of chunks makes at least two, however large it is.
CASES = {
    "linear_cross_entropy": Case(
        lambda *tensors: plain_cross_entropy(F.linear(*tensors[:3]), tensors[3]),
        _head,
        lambda op, x, weight, bias, labels: op(x, weight, labels, linear_bias=bias, chunk_bytes=2**20),
        magnitude=1.0,
    ),
    "cross_entropy": Case(plain_cross_entropy, make_logits, magnitude=1.0),
    "linear_divergence": Case(
        lambda *tensors: plain_kl(F.linear(*tensors[:3]), F.linear(*tensors[3:]), "none"),
        _two_heads,
        lambda op, x, weight, bias, *teacher: op(
            x, weight, *teacher, linear_bias=bias, reduction="none", chunk_bytes=2**20
        ),
        magnitude=4.0,
    ),
    "divergence": Case(plain_kl, lambda sizes: ([1.5 * _rows(sizes)], [1.5 * _rows(sizes)]), magnitude=4.0),
    "linear_log_probs": Case(
        _log_probs_and_entropy,
        _head,
        lambda op, x, weight, bias, labels: tuple(
            op(x, weight, labels, linear_bias=bias, outputs=("log_probs", "entropy"), chunk_bytes=2**20)[:2]
        ),
        magnitude=1.0,
    ),
    "token_log_probs": Case(
        lambda logits, labels: _scores_of(wide(logits).log_softmax(-1), labels),
        make_logits,
        lambda op, *tensors: tuple(op(*tensors, outputs=("log_probs", "entropy"))[:2]),
        magnitude=1.0,
    ),
    "linear_token_loss": Case(
        _likelihoods,
        _head,
        lambda op, x, weight, bias, labels: op(
            x, weight, labels, lambda scores, index: -scores.log_probs.exp(), linear_bias=bias
        )[0],
        magnitude=1.0,
    ),
    "linear_topk_log_probs": Case(
        lambda *tensors: _log_softmax(*tensors[:3]).gather(-1, tensors[3]),
        _head_and_ids,
        lambda op, x, weight, bias, ids: op(x, weight, ids, linear_bias=bias, chunk_bytes=2**20),
        magnitude=4.0,
    ),
    "rms_norm": Case(
        lambda x, weight: F.rms_norm(wide(x), weight.shape, wide(weight), _EPS).to(x.dtype),
        _norm(1, 1),
        lambda op, x, weight: op(x, weight.shape, weight, _EPS),
    ),
    "add_rms_norm": Case(
        lambda x, residual, weight: (
            F.rms_norm(wide(x + residual), weight.shape, wide(weight), _EPS).to(x.dtype),
            x + residual,
        ),
        _norm(2, 1),
        lambda op, x, residual, weight: op(x, residual, weight.shape, weight, _EPS),
    ),
    "layer_norm": Case(
        lambda x, weight, bias: F.layer_norm(x, weight.shape, weight, bias, _EPS),
        _norm(1, 2),
        lambda op, x, weight, bias: op(x, weight.shape, weight, bias, _EPS),
    ),
    "gated_rms_norm": Case(
        lambda x, gate, w: sliced_norm_reference(x, gate, w, None, None, 1, _EPS, 0.0, "last", "silu", "gemma"),
        _norm(2, 1),
        lambda op, x, gate, weight: op(x, gate, weight, _EPS),
    ),
    "modulated_rms_norm": Case(
        lambda x, w, a, b: sliced_norm_reference(x, None, w, a, b, 1, _EPS, 0.0, "none", "silu", "gemma"),
        _modulated,
        lambda op, x, weight, scale, shift: op(x, weight, scale, shift, _EPS),
    ),
    "group_norm": Case(
        lambda x, weight, bias: F.group_norm(x, 2, weight, bias, _EPS),
        _channels,
        lambda op, x, weight, bias: op(x, 2, weight, bias, _EPS),
    ),
    "apply_rotary": Case(lambda q, k, cos, sin: (_rotate(q, cos, sin), _rotate(k, cos, sin)), _heads),
    "silu_mul": unit_case(F.silu),
    "gelu_mul": unit_case(functools.partial(F.gelu, approximate="tanh"), approximate="tanh"),
    "relu_squared_mul": unit_case(relu_squared),
    "dyt": Case(dyt_reference, _dynamic),
    "poly_norm": Case(
        lambda x, weight, bias: poly_norm_reference(x, weight, bias, _EPS),
        lambda sizes: ([_rows(sizes), torch.tensor([0.5, -0.75, 1.25]), torch.full((1,), 0.5)], []),
        lambda op, *tensors: op(*tensors, _EPS),
    ),
    "softmax": Case(lambda x: wide(x).softmax(-1).to(x.dtype), _norm(1, 0)),
    "sparsemax": Case(lambda x: softmax_reference(x, True), _norm(1, 0)),
    "multi_token_attention": Case(
        lambda x, w, b: F.conv2d(softmax_reference(x, False, True), w, b, padding=1, groups=2).tril(),
        _attention_scores,
        functools.partial(_call, padding=1, groups=2),
    ),
    "mhc_coeffs": Case(_plain_coefficients, _hyper_connections),
    "mhc_pre": Case(
        lambda x, h_pre: (wide(h_pre)[..., None] * wide(x)).sum(-2).to(x.dtype),
        lambda sizes: ([_streams(sizes), torch.rand(*sizes[:2], 4)], []),
    ),
    "mhc_post_res": Case(
        lambda x, f_out, h_post, h_res: mix_streams_reference(x, f_out, h_res, h_post),
        lambda sizes: (
            [_streams(sizes), torch.randn(sizes[:3]), torch.rand(*sizes[:2], 4), torch.rand(*sizes[:2], 4, 4)],
            [],
        ),
    ),
    "relu_squared": Case(relu_squared, _norm(1, 0)),
    "moe_experts": Case(
        _plain_experts,
        _experts,
        lambda op, x, gate_up, down, scores, index: op(x, gate_up, down, index, scores),
        magnitude=4.0,
    ),
    "moe_router": Case(
        lambda logits: router_reference(logits, None, 2, "softmax", 1, 1, "max", True, 1.0)[1],
        _router_logits,
        lambda op, logits: op(logits, 2)[1],
    ),
}
"""A case of each op with its usual options, by the op's name."""


def _float8_linear(device: torch.device) -> list[Tensor]:
    """The output of two linear layers in float8, and the gradients of input and weights, of an odd number of tokens."""
    x, *weights = _float8_leaves(device, (61, 64), (48, 64), (32, 64))
    output = torch.cat(scaled_linear(x, weights), dim=1)
    grad_x, *grads = torch.autograd.grad(output, [x, *weights], torch.randn(61, 80).to(output))
    return [output, grad_x, torch.cat(grads)]


def _float8_gated_mlp(device: torch.device) -> list[Tensor]:
    x, *weights = leaves = _float8_leaves(device, (61, 64), (96, 64), (96, 64), (64, 96))
    output = scaled_gated_mlp(x, weights[:2], weights[2])
    return [output, *torch.autograd.grad(output, leaves, torch.randn(61, 64).to(output))]


def _float8_leaves(device: torch.device, *shapes: tuple[int, ...]) -> list[Tensor]:
    return [torch.randn(shape).to(device, torch.bfloat16).requires_grad_() for shape in shapes]


def _adamw(device: torch.device) -> list[Tensor]:
    """A parameter, its moments and their scales after two steps, for moments in bfloat16 and in 8 bits."""
    results = []
    for state_dtype in ("bfloat16", "8bit"):
        weight = torch.nn.Parameter(torch.randn(15, 300).to(device, torch.bfloat16))
        optimizer = AdamW([weight], lr=0.01, state_dtype=state_dtype, stochastic_rounding=True)
        for _ in range(2):
            weight.grad = torch.randn(15, 300).to(weight)
            optimizer.step()
        results += [weight.detach(), *optimizer.state[weight].values()]
    return [each.to(torch.bfloat16) for each in results]


COMPARED: dict[str, tuple[Callable[[torch.device], list[Tensor]], slice, int]] = {
    "float8_fprop": (_float8_linear, slice(0, 1), 2),
    "float8_dgrad": (_float8_linear, slice(1, 2), 2),
    "float8_wgrad": (_float8_linear, slice(2, 3), 2),
    "float8_gated_mlp": (_float8_gated_mlp, slice(0, 5), 8),  # between products, roundings to float8 may differ
    "adamw_moments": (_adamw, slice(0, 10), 1),  # a code more or less, where a sum is rounded otherwise
}
"""Checks against a CPU: a function, which results are compared, and the allowed error in roundings to bfloat16."""
NAMES = (*CASES, *COMPARED)
"""The ops that have a self-check, those first whose kernels compile for longest."""


def run_self_checks(
    names: Iterable[str] = NAMES, device: torch.device | str = "cpu", dtype: torch.dtype = torch.float32
) -> Iterable[Result]:
    """Yields the result of each op's self-check, also if it raises an error; KeyError for an op without one."""
    device = torch.device(device)
    path = "triton" if liger_ops.backend.use_triton(torch.empty(1, device=device, dtype=dtype)) else "pytorch"
    for name in names:
        start, nothing, kind = time.perf_counter(), float("nan"), str(dtype).removeprefix("torch.")
        try:
            if name in COMPARED:
                found = _compare_with_cpu(name, device)
            else:
                message, error, allowed = _compare(getattr(liger_ops, name), CASES[name], device, dtype)
                found = Result(name, str(device), kind, path, error, allowed, 0.0, message)
        except Exception as raised:  # a row of the results: the other ops may be right
            message = f"{type(raised).__name__}: {next(iter(str(raised).strip().splitlines()), '')}"
            found = Result(name, str(device), kind, path, nothing, nothing, 0.0, message, is_error=True)
        yield replace(found, seconds=time.perf_counter() - start)


def _compare_with_cpu(name: str, device: torch.device) -> Result:
    function, chosen, roundings = COMPARED[name]
    is_float8 = name.startswith("float8")
    path = "triton" if device.type == "cuda" else "emulated" if is_float8 else "pytorch"
    found = Result(name, str(device), "bfloat16", path, 0.0, 0.0, 0.0)
    if is_float8 and (reason := unsupported(device)):
        return replace(found, message=reason, is_unsupported=True)

    def run(device: torch.device) -> list[Tensor]:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            return function(device)[chosen]

    for ours, true in zip(run(device), run(torch.device("cpu")), strict=True):
        allowed = roundings * torch.finfo(true.dtype).eps * true.abs().max().item()
        error = (ours.cpu().float() - true.float()).abs().max().item()
        message = "" if error <= allowed else f"it is wrong: error {error:.2e}, allowed {allowed:.2e}"  # also NaN
        if message or error * found.allowed >= found.error * allowed:
            found = replace(found, error=error, allowed=allowed, message=message)
        if message:
            break
    return found


def _compare(op: Callable[..., Any], case: Case, device: torch.device, dtype: torch.dtype) -> tuple[str, float, float]:
    """What is wrong with the worst of all outputs and gradients, its error and what is allowed."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        inputs, constants = case.make(Sizes())

    def run(function: Callable[..., Any], in_dtype: torch.dtype) -> list[Tensor]:
        """Outputs and gradients, of the same values rounded to ``dtype``."""
        leaves = [x.to(device, dtype, copy=True).to(in_dtype).requires_grad_() for x in inputs]
        others = [x.to(device, dtype).to(in_dtype) if x.is_floating_point() else x.to(device) for x in constants]
        result = function(*leaves, *others)
        outputs = result if isinstance(result, tuple) else (result,)
        generator = torch.Generator().manual_seed(1)
        upstream = [(torch.randint(-8, 9, y.shape, generator=generator) / 4).to(y) for y in outputs]
        return [*outputs, *torch.autograd.grad(outputs, leaves, upstream)]

    actual = run(functools.partial(case.call, op), dtype)
    eager, truth = run(case.plain, dtype), run(case.plain, torch.float64)
    num_outputs = len(truth) - len(inputs)
    found: list[tuple[float, float]] = []
    for index, (ours, plain, true) in enumerate(zip(actual, eager, truth, strict=True)):
        where = f"output {index}" if index < num_outputs else f"gradient of argument {index - num_outputs}"
        if ours.shape != true.shape:
            return f"{where} has shape {tuple(ours.shape)}, expected {tuple(true.shape)}", float("nan"), float("nan")
        error = (ours.double() - true).abs().max().item()
        magnitude = max(case.magnitude if index == 0 else 0.0, true.abs().max().item())
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
