"""Properties of every public op: one table of ops, and each property for all of them.

Sizes at which kernels change, options and messages are in each op's own file.
"""

import functools
import inspect
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import liger_ops
from tests.liger_ops.accuracy import assert_as_accurate

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
LAYOUTS = ["contiguous", "transposed", "sliced", "spaced", "expanded"]
EPS = 1e-5
VOCAB_SIZE = 11
SIZES = (2, 3, 16)  # batch_size, seq_len and width of most tests


class Tensors(NamedTuple):
    """Arguments of an op, in its order."""

    inputs: list[Tensor]  # differentiable
    constants: list[Tensor]


class Case(NamedTuple):
    """One way to call a public op."""

    op: Callable[..., Any]
    call: Callable[..., Any]  # of the op and its tensors
    plain: Callable[..., Any]  # the same in plain PyTorch
    make: Callable[[int, int, int], Tensors]  # of batch_size, seq_len and width, in float32 on the CPU
    magnitude: float = 0.0  # of what the output is a difference of

    def fused(self, *tensors: Tensor) -> Any:
        return self.call(self.op, *tensors)


def widen(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


# Tensors.


def make_rows(num_parameters: int) -> Callable[[int, int, int], Tensors]:
    def make(batch_size: int, seq_len: int, width: int) -> Tensors:
        parameters = [1 + 0.5 * torch.randn(width) for _ in range(num_parameters)]
        return Tensors([2 * torch.randn(batch_size, seq_len, width), *parameters], [])

    return make


def make_sum(batch_size: int, seq_len: int, width: int) -> Tensors:
    x, residual = torch.randn(2, batch_size, seq_len, width)
    return Tensors([x, residual, 1 + 0.5 * torch.randn(width)], [])


def make_channels(batch_size: int, seq_len: int, width: int) -> Tensors:
    return Tensors([torch.randn(batch_size, 4, seq_len, width), torch.randn(4), torch.randn(4)], [])


def make_heads(batch_size: int, seq_len: int, width: int) -> Tensors:
    head_dim = 2 * width
    q, k = torch.randn(batch_size, 3, seq_len, head_dim), torch.randn(batch_size, 1, seq_len, head_dim)
    angles = torch.rand(seq_len, width).repeat(1, 2) * 6
    return Tensors([q, k], [angles.cos(), angles.sin()])


def make_gate_and_up(batch_size: int, seq_len: int, width: int) -> Tensors:
    return Tensors([2 * torch.randn(batch_size, seq_len, width) for _ in range(2)], [])


def make_packed(batch_size: int, seq_len: int, width: int) -> Tensors:
    return Tensors([2 * torch.randn(batch_size, seq_len, 2 * width)], [])


def ignore_some(labels: Tensor) -> Tensor:
    labels[..., 1::4] = liger_ops.IGNORE_INDEX
    return labels


def make_logits(batch_size: int, seq_len: int, width: int) -> Tensors:
    """With labels that are least likely: rounding of a loss near 0 would be left to chance."""
    logits = 3 * torch.randn(batch_size * seq_len, width)
    return Tensors([logits], [ignore_some(logits.argmin(1))])


def make_logits_of_sequences(batch_size: int, seq_len: int, width: int) -> Tensors:
    (logits,), (labels,) = make_logits(batch_size, seq_len, width)
    logits = logits.view(batch_size, seq_len, width).mT.contiguous()
    return Tensors([logits], [labels.view(batch_size, seq_len)])


def make_head(batch_size: int, seq_len: int, width: int) -> Tensors:
    """Sixteenths small enough that every dtype holds the logits, whose rounding would be left to chance."""
    x, weight = (torch.randint(-4, 5, shape) / 4 for shape in ((batch_size, seq_len, width), (VOCAB_SIZE, width)))
    bias = torch.randint(-16, 17, (VOCAB_SIZE,)) / 16
    return Tensors([x, weight, bias], [ignore_some(torch.randint(VOCAB_SIZE, (batch_size, seq_len)))])


def make_two_heads(batch_size: int, seq_len: int, width: int) -> Tensors:
    """The student's head, and a teacher of half its width."""
    (x, weight, bias), _ = make_head(batch_size, seq_len, width)
    (teacher_x, teacher_weight, _), _ = make_head(batch_size, seq_len, max(1, width // 2))
    return Tensors([x, weight, bias], [teacher_x, teacher_weight])


def make_head_and_ids(batch_size: int, seq_len: int, width: int) -> Tensors:
    inputs, _ = make_head(batch_size, seq_len, width)
    return Tensors(inputs, [torch.randint(VOCAB_SIZE, (batch_size, seq_len, 3))])


def make_two_logits(batch_size: int, seq_len: int, width: int) -> Tensors:
    student, teacher = 3 * torch.randn(2, batch_size, seq_len, width)
    return Tensors([student], [teacher])


# The same in plain PyTorch.


def plain_rms_norm(x: Tensor, weight: Tensor, casting: str) -> Tensor:
    wide = x if casting == "none" else widen(x)
    normalized = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + EPS)
    if casting == "gemma":
        return (normalized * widen(weight)).to(x.dtype)
    return normalized.to(x.dtype) * weight


def plain_add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    total = x + residual
    return plain_rms_norm(total, weight, "gemma"), total


def plain_rotary(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    def rotate(x: Tensor) -> Tensor:
        first, second = x.chunk(2, dim=-1)
        return x * cos + torch.cat((-second, first), dim=-1) * sin

    return rotate(q), rotate(k)


def plain_unit(activation: Callable[[Tensor], Tensor], gate: Tensor, up: Tensor | None = None) -> Tensor:
    if up is None:
        gate, up = gate.chunk(2, dim=-1)
    return activation(gate) * up


def gelu_tanh(x: Tensor) -> Tensor:
    return F.gelu(x, approximate="tanh")


def plain_divergence(student: Tensor, teacher: Tensor, reduction: str) -> Tensor:
    """KL(p || q), 0 for no tokens."""
    s, t = widen(student).log_softmax(-1), widen(teacher).log_softmax(-1)
    losses = (t.exp() * (t - s)).sum(-1)
    return losses if reduction == "none" else losses.sum() / max(1, losses.numel())


def plain_topk(x: Tensor, weight: Tensor, bias: Tensor, ids: Tensor, renormalize: bool) -> Tensor:
    if renormalize:
        return widen(torch.einsum("...h,...kh->...k", x, weight[ids]) + bias[ids]).log_softmax(-1)
    return widen(F.linear(x, weight, bias)).log_softmax(-1).gather(-1, ids)


def plain_relu_squared(x: Tensor) -> Tensor:
    return F.relu(x).square()


def plain_linear_cross_entropy(x: Tensor, weight: Tensor, bias: Tensor, labels: Tensor, reduction: str) -> Tensor:
    logits = widen(F.linear(x, weight, bias)).flatten(0, -2)
    losses = F.cross_entropy(logits, labels.flatten(), reduction=reduction)
    return losses.view(labels.shape) if reduction == "none" else losses


# The table.


def rms_norm_case(casting: str) -> Case:
    return Case(
        liger_ops.rms_norm,
        lambda op, x, weight: op(x, weight.shape, weight, EPS, casting=casting),
        lambda x, weight: plain_rms_norm(x, weight, casting),
        make_rows(1),
    )


def unit_case(
    op: Callable[..., Tensor], activation: Callable[[Tensor], Tensor], *, packed: bool = False, **options: str
) -> Case:
    return Case(
        op,
        lambda op, *tensors: op(*tensors, **options),
        lambda *tensors: plain_unit(activation, *tensors),
        make_packed if packed else make_gate_and_up,
    )


def cross_entropy_case(reduction: str, make_tensors: Callable[[int, int, int], Tensors]) -> Case:
    return Case(
        liger_ops.cross_entropy,
        lambda op, logits, labels: op(logits, labels, reduction=reduction),
        lambda logits, labels: F.cross_entropy(widen(logits), labels, reduction=reduction),
        make_tensors,
        magnitude=1.0,  # of the lse and the label's logit
    )


def linear_cross_entropy_case(reduction: str) -> Case:
    return Case(
        liger_ops.linear_cross_entropy,
        # A budget makes at least two chunks, however large it is.
        lambda op, x, weight, bias, labels: op(
            x, weight, labels, linear_bias=bias, reduction=reduction, chunk_bytes=2**20
        ),
        lambda *tensors: plain_linear_cross_entropy(*tensors, reduction),
        make_head,
        magnitude=1.0,
    )


def topk_case(renormalize: bool) -> Case:
    return Case(
        liger_ops.linear_topk_log_probs,
        lambda op, x, weight, bias, ids: op(
            x, weight, ids, linear_bias=bias, renormalize=renormalize, chunk_bytes=2**20
        ),
        lambda *tensors: plain_topk(*tensors, renormalize),
        make_head_and_ids,
        magnitude=4.0,
    )


def plain_log_probs(x: Tensor, weight: Tensor, bias: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    log_probs = F.log_softmax(widen(F.linear(x, weight, bias)), -1)
    kept = labels != liger_ops.IGNORE_INDEX
    entropy = -(log_probs.exp() * log_probs.masked_fill(log_probs == -math.inf, 0.0)).sum(-1)
    of_label = log_probs.gather(-1, labels.where(kept, 0)[..., None])[..., 0]
    return of_label.where(kept, 0.0), entropy.where(kept, 0.0)


def linear_log_probs_case() -> Case:
    return Case(
        liger_ops.linear_log_probs,
        lambda op, x, weight, bias, labels: tuple(
            op(x, weight, labels, linear_bias=bias, outputs=("log_probs", "entropy"), chunk_bytes=2**20)[:2]
        ),
        plain_log_probs,
        make_head,
        magnitude=1.0,
    )


CASES = {
    "rms_norm_gemma": rms_norm_case("gemma"),
    "rms_norm_llama": rms_norm_case("llama"),
    "rms_norm_none": rms_norm_case("none"),
    "add_rms_norm": Case(
        liger_ops.add_rms_norm,
        lambda op, x, residual, weight: op(x, residual, weight.shape, weight, EPS),
        plain_add_rms_norm,
        make_sum,
    ),
    "layer_norm": Case(
        liger_ops.layer_norm,
        lambda op, x, weight, bias: op(x, weight.shape, weight, bias, EPS),
        lambda x, weight, bias: F.layer_norm(x, weight.shape, weight, bias, EPS),
        make_rows(2),
    ),
    "group_norm": Case(
        liger_ops.group_norm,
        lambda op, x, weight, bias: op(x, 2, weight, bias, EPS),
        lambda x, weight, bias: F.group_norm(x, 2, weight, bias, EPS),
        make_channels,
    ),
    "apply_rotary": Case(liger_ops.apply_rotary, lambda op, *tensors: op(*tensors), plain_rotary, make_heads),
    "silu_mul": unit_case(liger_ops.silu_mul, F.silu),
    "silu_mul_packed": unit_case(liger_ops.silu_mul, F.silu, packed=True),
    "gelu_mul_erf": unit_case(liger_ops.gelu_mul, F.gelu),
    "gelu_mul_tanh": unit_case(liger_ops.gelu_mul, gelu_tanh, approximate="tanh"),
    "gelu_mul_tanh_packed": unit_case(liger_ops.gelu_mul, gelu_tanh, packed=True, approximate="tanh"),
    "relu_squared_mul": unit_case(liger_ops.relu_squared_mul, plain_relu_squared),
    "relu_squared_mul_packed": unit_case(liger_ops.relu_squared_mul, plain_relu_squared, packed=True),
    "relu_squared": Case(liger_ops.relu_squared, lambda op, x: op(x), plain_relu_squared, make_rows(0)),
    "cross_entropy_mean": cross_entropy_case("mean", make_logits),
    "cross_entropy_none": cross_entropy_case("none", make_logits_of_sequences),
    "linear_cross_entropy_mean": linear_cross_entropy_case("mean"),
    "linear_cross_entropy_none": linear_cross_entropy_case("none"),
    "divergence": Case(
        liger_ops.divergence,
        lambda op, student, teacher: op(student, teacher),
        lambda student, teacher: plain_divergence(student, teacher, "mean"),
        make_two_logits,
        magnitude=4.0,
    ),
    "linear_divergence": Case(
        liger_ops.linear_divergence,
        lambda op, x, weight, bias, *teacher: op(
            x, weight, *teacher, linear_bias=bias, reduction="none", chunk_bytes=2**20
        ),
        lambda x, weight, bias, teacher_x, teacher_weight: plain_divergence(
            F.linear(x, weight, bias), F.linear(teacher_x, teacher_weight), "none"
        ),
        make_two_heads,
        magnitude=4.0,
    ),
    "linear_topk_log_probs": topk_case(False),
    "linear_topk_log_probs_renormalized": topk_case(True),
    "linear_log_probs": linear_log_probs_case(),
}


@pytest.fixture(params=CASES)
def case(request: pytest.FixtureRequest) -> Case:
    return CASES[request.param]


# Running a case.


def lay_out(x: Tensor, layout: str) -> Tensor:
    """A tensor of the same shape and, unless expanded, of the same values."""
    if x.dim() == 0 or layout == "contiguous":
        return x.contiguous()
    if layout == "transposed":
        return x.transpose(0, -1).contiguous().transpose(0, -1)
    if layout == "sliced":  # also starts at an odd address
        return F.pad(x, (1, 2))[..., 1:-2]
    if layout == "spaced":
        return x.repeat_interleave(2, dim=-1)[..., ::2]
    return x[:1].expand(x.shape) if x.dim() > 2 else x  # a matrix of equal rows would be a degenerate head


def place(
    tensors: Tensors, device: torch.device, dtype: torch.dtype = torch.float32, layout: str = "contiguous"
) -> Tensors:
    """The tensors on the case's device, in its dtype and layout."""

    def place_one(x: Tensor) -> Tensor:
        return lay_out(x.to(device, dtype if x.is_floating_point() else x.dtype), layout)

    return Tensors([place_one(x) for x in tensors.inputs], [place_one(x) for x in tensors.constants])


def make(case: Case, device: torch.device, sizes: tuple[int, int, int] = SIZES) -> Tensors:
    return place(case.make(*sizes), device)


def as_tuple(result: Any) -> tuple[Tensor, ...]:
    return result if isinstance(result, tuple) else (result,)


def make_upstream(outputs: tuple[Tensor, ...], layout: str = "contiguous") -> list[Tensor]:
    """Gradients that every dtype holds exactly, the same for each call."""
    generator = torch.Generator().manual_seed(1)
    return [lay_out(torch.randint(-8, 9, y.shape, generator=generator).to(y) / 4, layout) for y in outputs]


def run(function: Callable[..., Any], tensors: Tensors, layout: str = "contiguous") -> list[Tensor]:
    """The outputs, then the gradients of the inputs."""
    leaves = [x.detach().requires_grad_() for x in tensors.inputs]
    outputs = as_tuple(function(*leaves, *tensors.constants))
    return [*outputs, *torch.autograd.grad(outputs, leaves, make_upstream(outputs, layout))]


def assert_same(actual: list[Tensor], expected: list[Tensor]) -> None:
    """Bit for bit."""
    torch.testing.assert_close(actual, expected, rtol=0, atol=0, equal_nan=True)


class Recorder(TorchDispatchMode):
    """Notes each op of ours that goes through the dispatcher, and its arguments."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, tuple[Any, ...]]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        if func.namespace == "liger_ops":
            self.calls.append((func, tree_map_only(Tensor, Tensor.detach, args)))
        return func(*args, **(kwargs or {}))


def record(function: Callable[..., Any], tensors: Tensors) -> list[tuple[Any, tuple[Any, ...]]]:
    with Recorder() as recorder:
        run(function, tensors)
    return recorder.calls


# The table is complete.


def test_table_has_every_public_op() -> None:
    public = {name for name in liger_ops.__all__ if inspect.isfunction(getattr(liger_ops, name))}
    public.remove("linear_token_loss")  # runs a function of its caller, so no tracer can see it as an op
    assert {case.op.__name__ for case in CASES.values()} == public


def test_cases_run_every_registered_op(triton_device: torch.device) -> None:
    registered = {name for name in torch._C._dispatch_get_all_op_names() if name.startswith("liger_ops::")}
    calls = [call for case in CASES.values() for call in record(case.fused, make(case, triton_device))]
    registered.remove("liger_ops::gated_unit_backward_")  # runs only if nobody, such as the recorder, holds its inputs
    assert {op.name() for op, _ in calls} == registered


# The dispatcher and the compiler.


def test_ops_pass_opcheck(case: Case, device: torch.device) -> None:
    # Not test_autograd_registration: the ops are below autograd, autograd.Functions are above.
    checks = ("test_schema", "test_faketensor", "test_aot_dispatch_dynamic")
    for op, arguments in record(case.fused, make(case, device)):
        torch.library.opcheck(op, arguments, test_utils=checks)


@pytest.mark.parametrize("compiler", ["aot_eager", pytest.param("inductor", marks=pytest.mark.gpu)])
def test_compiles_to_one_graph_with_the_same_result(case: Case, compiler: str, device: torch.device) -> None:
    tensors = make(case, device)
    torch._dynamo.reset()
    actual = run(torch.compile(case.fused, fullgraph=True, backend=compiler), tensors)
    torch.testing.assert_close(actual, run(case.fused, tensors), equal_nan=True)


def keep_ours(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if op.namespace == "liger_ops" else CheckpointPolicy.PREFER_RECOMPUTE


def test_selective_checkpointing_can_keep_what_our_ops_computed(case: Case, triton_device: torch.device) -> None:
    def checkpointed(*arguments: Tensor, **options: Any) -> Any:
        return checkpoint(case.fused, *arguments, use_reentrant=False, **options)

    keeping = functools.partial(
        checkpointed, context_fn=functools.partial(create_selective_checkpoint_contexts, keep_ours)
    )
    tensors = make(case, triton_device)
    assert_same(run(keeping, tensors), run(case.fused, tensors))
    once = [op for op, _ in record(case.fused, tensors)]
    assert [op for op, _ in record(keeping, tensors)] == once
    assert len(record(checkpointed, tensors)) == len(once) + 1


# Results.


@given(
    batch_size=st.integers(1, 3),
    seq_len=st.integers(1, 4),
    width=st.integers(8, 70),
    dtype=st.sampled_from(DTYPES),
    layout=st.sampled_from(LAYOUTS),
    upstream_layout=st.sampled_from(LAYOUTS),
    seed=st.integers(0, 2**16),
)
@settings(
    derandomize=True,
    max_examples=10,
    deadline=None,
    phases=[Phase.generate],  # examples are small as they are
    suppress_health_check=[HealthCheck.function_scoped_fixture],  # the fixtures hold no state
)
def test_no_less_accurate_than_plain_pytorch(
    batch_size: int,
    seq_len: int,
    width: int,
    dtype: torch.dtype,
    layout: str,
    upstream_layout: str,
    seed: int,
    case: Case,
    device: torch.device,
) -> None:
    torch.manual_seed(seed)
    tensors = place(case.make(batch_size, seq_len, width), device, dtype, layout)
    actual = run(case.fused, tensors, upstream_layout)
    eager = run(case.plain, tensors, upstream_layout)
    truth = run(case.plain, place(tensors, device, torch.float64), upstream_layout)
    for index, results in enumerate(zip(actual, eager, truth, strict=True)):
        assert results[0].dtype == results[1].dtype
        if not results[2].isnan().any():  # the mean of nothing
            magnitude = case.magnitude if index == 0 else 0.0
            assert_as_accurate(f"result {index}", *results, magnitude=magnitude)


def test_results_repeat_and_arguments_stay(case: Case, device: torch.device) -> None:
    tensors = make(case, device, (4, 300, 520) if device.type == "cuda" else SIZES)
    leaves = [x.detach().requires_grad_() for x in tensors.inputs]
    outputs = as_tuple(case.fused(*leaves, *tensors.constants))
    upstream = make_upstream(outputs)
    arguments = [*leaves, *tensors.constants, *upstream]
    before = [x.detach().clone() for x in arguments]
    first = [*outputs, *torch.autograd.grad(outputs, leaves, upstream)]
    assert_same(run(case.fused, tensors), first)
    assert_same([x.detach() for x in arguments], before)


@pytest.mark.parametrize("special", [float("nan"), float("inf"), -float("inf")], ids=str)
def test_what_is_not_finite_spreads_as_in_plain_pytorch(
    special: float, case: Case, triton_device: torch.device
) -> None:
    inputs, constants = make(case, triton_device)
    # No token is ignored: a linear head's are never projected, so their gradient is 0 where PyTorch's is 0 * NaN.
    constants = [x if x.is_floating_point() else x.clamp(min=0) for x in constants]
    for index, x in enumerate(inputs):
        if x.dim() == 1 and math.isinf(special):
            continue  # an infinite parameter: NaN or not is a matter of the order of sums
        spoilt = x.clone()
        spoilt.view(-1)[1] = special
        some = Tensors([*inputs[:index], spoilt, *inputs[index + 1 :]], constants)
        # In float64, because F.gelu of infinity is NaN in float32 on some CPUs.
        expected = run(case.plain, place(some, triton_device, torch.float64))
        for number, results in enumerate(zip(run(case.fused, some), expected, strict=True)):
            is_nan, is_nan_in_pytorch = (result.isnan() for result in results)
            assert torch.equal(is_nan, is_nan_in_pytorch), f"input {index}, result {number}"


def test_no_tokens_give_what_they_give_in_plain_pytorch(case: Case, device: torch.device) -> None:
    tensors = make(case, device, (0, 3, 16))
    assert_same(run(case.fused, tensors), run(case.plain, tensors))


# Autograd.


def test_reference_passes_gradcheck(case: Case) -> None:
    inputs, constants = place(case.make(2, 3, 4), torch.device("cpu"), torch.float64)
    leaves = [x.requires_grad_() for x in inputs]
    assert torch.autograd.gradcheck(lambda *leaves: case.fused(*leaves, *constants), leaves)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_forward_is_the_same_without_gradients(mode: Callable[[], Any], case: Case, device: torch.device) -> None:
    inputs, constants = make(case, device)
    leaves = [x.requires_grad_() for x in inputs]
    expected = as_tuple(case.fused(*leaves, *constants))
    with mode():
        actual = as_tuple(case.fused(*leaves, *constants))
    assert all(y.requires_grad for y in expected)
    assert not any(y.requires_grad for y in actual)
    assert_same([*actual], [*expected])


def test_only_inputs_that_ask_for_a_gradient_get_one(case: Case, device: torch.device) -> None:
    tensors = make(case, device)
    num_inputs = len(tensors.inputs)
    expected = run(case.fused, tensors)[-num_inputs:]
    for wanted in range(num_inputs):
        leaves = [x.detach().requires_grad_(index == wanted) for index, x in enumerate(tensors.inputs)]
        outputs = as_tuple(case.fused(*leaves, *tensors.constants))
        asked = [(y, grad) for y, grad in zip(outputs, make_upstream(outputs), strict=True) if y.requires_grad]
        torch.autograd.backward(*zip(*asked, strict=True))
        assert [x.grad is None for x in leaves] == [index != wanted for index in range(num_inputs)]
        torch.testing.assert_close(leaves[wanted].grad, expected[wanted])


@pytest.mark.parametrize("use_reentrant", [False, True], ids=["", "reentrant"])
def test_checkpointing_gives_the_same_gradients(use_reentrant: bool, case: Case, device: torch.device) -> None:
    tensors = make(case, device)
    leaves = [x.detach().requires_grad_() for x in tensors.inputs]
    outputs = as_tuple(checkpoint(case.fused, *leaves, *tensors.constants, use_reentrant=use_reentrant))
    torch.autograd.backward(outputs, make_upstream(outputs))
    assert_same([*outputs, *(x.grad for x in leaves)], run(case.fused, tensors))


def test_a_graph_of_the_gradients_is_refused(case: Case, triton_device: torch.device) -> None:
    tensors = make(case, triton_device)
    leaves = [x.detach().requires_grad_() for x in tensors.inputs]
    outputs = as_tuple(case.fused(*leaves, *tensors.constants))
    with pytest.raises(RuntimeError, match="no second derivative"):
        torch.autograd.grad(outputs, leaves, make_upstream(outputs), create_graph=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_autocast_changes_nothing_but_the_products_of_a_head(
    dtype: torch.dtype, case: Case, device: torch.device
) -> None:
    tensors = place(make(case, device), device, dtype)
    has_products = case.op.__name__.startswith("linear_")
    expected = run(case.fused, place(tensors, device, torch.bfloat16) if has_products else tensors)

    def under_autocast(*arguments: Tensor) -> Any:
        with torch.autocast(device.type, torch.bfloat16):
            return case.fused(*arguments)

    actual = run(under_autocast, tensors)
    if has_products:  # gradients come back as the inputs are
        num_outputs = len(actual) - len(tensors.inputs)
        expected[num_outputs:] = [gradient.to(dtype) for gradient in expected[num_outputs:]]
    assert_same(actual, expected)
