"""Properties of every public op: one table of ops, and each property for all of them.

Sizes at which kernels change, options and messages are in each op's own file.
"""

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import liger_ops
from liger_ops import backend
from liger_ops.self_check import CASES as CHECKS
from liger_ops.self_check import Case, Sizes, make_logits, unit_case
from tests.liger_ops.accuracy import DTYPES, LAYOUTS, assert_as_accurate, few, lay_out
from tests.liger_ops.loss.cases import EVERYTHING, plain_cross_entropy
from tests.liger_ops.operators import OperatorLog
from tests.liger_ops.test_sizes import plain_gated_rms_norm, plain_rms_norm

EPS = 1e-5
VOCAB_SIZE = 11
SIZES = (2, 3, 16)  # batch_size, seq_len and width of most tests


class Tensors(NamedTuple):
    """Arguments of an op, in its order."""

    inputs: list[Tensor]  # differentiable
    constants: list[Tensor]


class OpCase(NamedTuple):
    """One way to call a public op."""

    op: Callable[..., Any]
    case: Case

    def fused(self, *tensors: Tensor) -> Any:
        return self.case.call(self.op, *tensors)

    def plain(self, *tensors: Tensor) -> Any:
        return self.case.plain(*tensors)

    def make(self, batch_size: int, seq_len: int, width: int) -> Tensors:
        return Tensors(*self.case.make(Sizes(batch_size, seq_len, width, VOCAB_SIZE)))


def rms_norm_case(casting: str) -> Case:
    return CHECKS["rms_norm"]._replace(
        call=lambda op, x, weight: op(x, weight.shape, weight, EPS, casting=casting),
        plain=functools.partial(plain_rms_norm, casting=casting),
    )


def packed_case(case: OpCase) -> Case:
    """Gate and up in one tensor."""

    def make(sizes: Sizes) -> tuple[list[Tensor], list[Tensor]]:
        return [torch.cat(case.make(sizes)[0], dim=-1)], []

    return case._replace(plain=lambda packed: case.plain(*packed.chunk(2, dim=-1)), make=make)


def quarters(low: int, *shape: int) -> Tensor:
    """Numbers from ``low / 4`` to 2 that every dtype holds."""
    return torch.randint(low, 9, shape) / 4


def everything_of_logits(sizes: Sizes) -> tuple[list[Tensor], list[Tensor]]:
    """Logits of sequences, labels, and weights of classes and tokens."""
    (logits,), (labels,) = make_logits(sizes)
    weights = [quarters(1, sizes.width), quarters(0, *sizes[:2])]
    return [logits.view(sizes[:3]).mT.contiguous()], [labels.view(sizes[:2]), *weights]


def everything_of_a_head(sizes: Sizes) -> tuple[list[Tensor], list[Tensor]]:
    """A head with its adapter, labels, and weights of classes and tokens."""
    inputs, constants = CHECKS["linear_cross_entropy"].make(sizes)
    adapter = [quarters(-8, *sizes[:2], 2), quarters(-8, sizes.vocab_size, 2)]
    return [*inputs, *adapter], [*constants, quarters(1, sizes.vocab_size), quarters(0, *sizes[:2])]


def losses(op: Callable[..., Any], logits: Tensor, labels: Tensor, weight: Tensor, token_weight: Tensor) -> Tensor:
    options = {**EVERYTHING, "reduction": "none", "return_stats": True}
    return op(logits, labels, weight, token_weight=token_weight, **options)[0]


def plain_losses(logits: Tensor, labels: Tensor, weight: Tensor, token_weight: Tensor) -> Tensor:
    flat = logits.flatten(0, -2), labels.flatten(), {"weight": weight, "token_weight": token_weight.flatten()}
    return plain_cross_entropy(*flat[:2], reduction="none", **flat[2], **EVERYTHING).view(labels.shape)


def head_losses(op: Callable[..., Any], x: Tensor, weight: Tensor, bias: Tensor, *others: Tensor) -> Tensor:
    *adapter, labels, class_weight, token_weight = others
    return op(
        x, weight, labels, linear_bias=bias, adapter=tuple(adapter), weight=class_weight, token_weight=token_weight,
        reduction="none", chunk_bytes=2**20, saved_logits_bytes=2**20, return_stats=True, **EVERYTHING,
    )[0]  # fmt: skip


def plain_head_losses(*tensors: Tensor) -> Tensor:
    return plain_losses(F.linear(*tensors[:3]) + F.linear(*tensors[3:5]), *tensors[5:])


def frozen_head(sizes: Sizes) -> tuple[list[Tensor], list[Tensor]]:
    """A head that needs no gradient."""
    (x, *head), constants = CHECKS["linear_log_probs"].make(sizes)
    return [x], [*head, *constants]


def plain_renormalized(x: Tensor, weight: Tensor, bias: Tensor, ids: Tensor) -> Tensor:
    logits = torch.einsum("...h,...kh->...k", x, weight[ids]) + bias[ids]
    return logits.to(torch.promote_types(x.dtype, torch.float32)).log_softmax(-1)


def topk_renormalized(op: Callable[..., Tensor], x: Tensor, weight: Tensor, bias: Tensor, ids: Tensor) -> Tensor:
    return op(x, weight, ids, linear_bias=bias, renormalize=True, chunk_bytes=2**20)


def logits_and_temperatures(sizes: Sizes) -> tuple[list[Tensor], list[Tensor]]:
    (logits,), (labels,) = make_logits(sizes)
    return [logits.view(sizes[:3])], [labels.view(sizes[:2]), quarters(1, *sizes[:2])]


def token_scores(op: Callable[..., Any], logits: Tensor, labels: Tensor, temperature: Tensor) -> tuple[Tensor, ...]:
    outputs = ("log_probs", "entropy", "lse", "mean_logit")
    return tuple(op(logits, labels, temperature=temperature, softcap=2.5, logit_scale=0.75, outputs=outputs)[:4])


def plain_token_scores(logits: Tensor, labels: Tensor, temperature: Tensor) -> tuple[Tensor, ...]:
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    z = 2.5 * torch.tanh(0.75 * wide / 2.5) / temperature.to(wide.dtype)[..., None]
    first = CHECKS["token_log_probs"].plain(z, labels)
    return *first, *(each.where(labels != liger_ops.IGNORE_INDEX, 0.0) for each in (z.logsumexp(-1), z.mean(-1)))


# The self-checks, and what else ops can be asked for; linear_token_loss runs a function of its caller, so no tracer can
# see it as an op.
VARIANTS = {
    **{(name, ""): case for name, case in CHECKS.items() if name != "linear_token_loss"},
    # Not by F.rms_norm, which has NaN in other places on a GPU.
    ("rms_norm", ""): rms_norm_case("gemma"),
    ("add_rms_norm", ""): CHECKS["add_rms_norm"]._replace(
        plain=lambda x, residual, weight: (plain_rms_norm(x + residual, weight, casting="gemma"), x + residual)
    ),
    ("rms_norm", "llama"): rms_norm_case("llama"),
    ("rms_norm", "none"): rms_norm_case("none"),
    ("gated_rms_norm", "of groups"): CHECKS["gated_rms_norm"]._replace(
        call=lambda op, x, gate, weight: op(
            x, gate, weight, EPS, group_size=x.shape[-1] // 2, norm_before_gate=False, casting="llama"
        ),
        plain=functools.partial(
            plain_gated_rms_norm, groups=2, norm_before_gate=False, activation="silu", casting="llama"
        ),
        make=lambda sizes: CHECKS["gated_rms_norm"].make(sizes._replace(width=2 * sizes.width)),
    ),
    **{(name, "packed"): packed_case(CHECKS[name]) for name in ("silu_mul", "gelu_mul", "relu_squared_mul")},
    ("gelu_mul", "erf"): unit_case(F.gelu),
    ("silu_mul", "scaled"): unit_case(lambda gate: F.silu(0.375 * gate), gate_multiplier=0.375),
    ("cross_entropy", "everything"): CHECKS["cross_entropy"]._replace(
        call=losses, plain=lambda logits, *others: plain_losses(logits.mT, *others), make=everything_of_logits
    ),
    ("linear_cross_entropy", "everything"): CHECKS["linear_cross_entropy"]._replace(
        call=head_losses, plain=plain_head_losses, make=everything_of_a_head
    ),
    ("linear_log_probs", "frozen"): CHECKS["linear_log_probs"]._replace(
        call=lambda op, x, weight, bias, labels: op(x, weight, labels, linear_bias=bias, chunk_bytes=2**20).log_probs,
        plain=lambda *tensors: CHECKS["linear_log_probs"].plain(*tensors)[0],
        make=frozen_head,
    ),
    ("token_log_probs", "everything"): CHECKS["token_log_probs"]._replace(
        call=token_scores,
        plain=plain_token_scores,
        make=logits_and_temperatures,
        magnitude=10.0,  # 2.5 / a quarter
    ),
    ("linear_topk_log_probs", "renormalized"): CHECKS["linear_topk_log_probs"]._replace(
        call=topk_renormalized, plain=plain_renormalized
    ),
}
CASES = {
    f"{name} {variant}".strip(): OpCase(getattr(liger_ops, name), case) for (name, variant), case in VARIANTS.items()
}


@pytest.fixture(params=CASES)
def case(request: pytest.FixtureRequest) -> OpCase:
    return CASES[request.param]


# Running a case.


def place(
    tensors: Tensors, device: torch.device, dtype: torch.dtype = torch.float32, layout: str = "contiguous"
) -> Tensors:
    """The tensors on the case's device, in its dtype and layout."""

    def place_one(x: Tensor) -> Tensor:
        is_head = layout == "expanded" and x.dim() < 3  # a matrix of equal rows would be a degenerate one
        placed = x.to(device, dtype if x.is_floating_point() else x.dtype)
        return lay_out(placed, "contiguous" if is_head else layout)

    return Tensors([place_one(x) for x in tensors.inputs], [place_one(x) for x in tensors.constants])


def make(case: OpCase, device: torch.device, sizes: tuple[int, int, int] = SIZES) -> Tensors:
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


def assert_same(actual: list[Tensor], expected: list[Tensor], case: OpCase | None = None) -> None:
    """Bit for bit, except for ``case``: forward of a frozen head takes the gradients too, by another kernel."""
    rtol = 2.0**-22 if case is CASES["linear_log_probs frozen"] else 0.0
    torch.testing.assert_close(actual, expected, rtol=rtol, atol=0, equal_nan=True)


def record(function: Callable[..., Any], tensors: Tensors) -> list[tuple[Any, tuple[Any, ...]]]:
    """Our ops that go through the dispatcher, and their arguments."""
    with OperatorLog() as log:
        run(function, tensors)
    return log.calls


# The dispatcher and the compiler. That every public op is in the table, test_self_check says.


def test_cases_run_every_registered_op(triton_device: torch.device) -> None:
    names = torch._C._dispatch_get_all_op_names()
    registered = {name for name in names if name.startswith("liger_ops::") and not name.startswith("liger_ops::fp8_")}
    calls = [call for case in CASES.values() for call in record(case.fused, make(case, triton_device))]
    # These run only if nobody, such as the recorder, holds their inputs.
    registered -= {"liger_ops::gated_unit_backward_", "liger_ops::moe_experts_backward_"}
    assert {op.name() for op, _ in calls} == registered


def test_ops_pass_opcheck(case: OpCase, device: torch.device) -> None:
    # Not test_autograd_registration: the ops are below autograd, autograd.Functions are above.
    checks = ["test_schema", "test_faketensor"]
    if backend.use_triton(torch.empty(0, device=device)):  # graphs have nothing of what is in an op
        checks.append("test_aot_dispatch_dynamic")
    for op, arguments in record(case.fused, make(case, device)):
        torch.library.opcheck(op, arguments, test_utils=checks)


@pytest.mark.parametrize("compiler", ["aot_eager", *(["inductor"] if torch.cuda.is_available() else [])])
def test_compiles_to_one_graph_with_the_same_result(case: OpCase, compiler: str, device: torch.device) -> None:
    tensors = make(case, device)
    torch._dynamo.reset()
    actual = run(torch.compile(case.fused, fullgraph=True, backend=compiler), tensors)
    torch.testing.assert_close(actual, run(case.fused, tensors), equal_nan=True)


def keep_ours(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if op.namespace == "liger_ops" else CheckpointPolicy.PREFER_RECOMPUTE


def test_selective_checkpointing_can_keep_what_our_ops_computed(case: OpCase, triton_device: torch.device) -> None:
    def checkpointed(*arguments: Tensor, **options: Any) -> Any:
        return checkpoint(case.fused, *arguments, use_reentrant=False, **options)

    keeping = functools.partial(
        checkpointed, context_fn=functools.partial(create_selective_checkpoint_contexts, keep_ours)
    )
    tensors = make(case, triton_device)
    assert_same(run(keeping, tensors), run(case.fused, tensors))
    once = [op for op, _ in record(case.fused, tensors)]
    assert [op for op, _ in record(keeping, tensors)] == once
    assert len(record(checkpointed, tensors)) == len(once) + 1 + (case.op is liger_ops.mhc_coeffs)  # which is two ops


# Results.


@given(
    sizes=st.tuples(st.integers(1, 3), st.integers(1, 4), st.integers(8, 70)),
    dtype=st.sampled_from(DTYPES),
    layouts=st.tuples(*2 * [st.sampled_from(LAYOUTS)]),
    seed=st.integers(0, 2**16),
)
@few(5)  # sizes and options are drawn in the file of each op that has one, there with kernels
@pytest.mark.parametrize(
    ("case", "device"),
    [(name, path) for name in CASES for path in ("reference", "kernel") if path != "kernel" or "token_log" in name],
    indirect=True,
)
def test_no_less_accurate_than_plain_pytorch(
    sizes: Any, dtype: torch.dtype, layouts: tuple[str, str], seed: int, case: OpCase, device: torch.device
) -> None:
    torch.manual_seed(seed)
    tensors = place(case.make(*sizes), device, dtype, layouts[0])
    actual = run(case.fused, tensors, layouts[1])
    eager = run(case.plain, tensors, layouts[1])
    truth = run(case.plain, place(tensors, device, torch.float64), layouts[1])
    has_several = len(actual) > len(tensors.inputs) + 1
    for index, results in enumerate(zip(actual, eager, truth, strict=True)):
        assert results[0].dtype == results[1].dtype
        if not results[2].isnan().any():  # the mean of nothing
            # Several scores are differences of the same, and their gradients cancel each other.
            magnitude = case.case.magnitude if index == 0 or has_several else 0.0
            if index and results[0].shape == (1,):  # the gradient of one number, a sum of both signs over all others
                magnitude = tensors.inputs[0].numel() ** 0.5
            if index and case.op is liger_ops.moe_experts and dtype == torch.float32:
                magnitude = 32.0  # gradients of weights are sums, of both signs and in another order, over tokens
            assert_as_accurate(f"result {index}", *results, magnitude=magnitude)


@pytest.mark.parametrize("special", [float("nan"), float("inf"), -float("inf")], ids=str)
def test_what_is_not_finite_spreads_as_in_plain_pytorch(
    special: float, case: OpCase, triton_device: torch.device
) -> None:
    inputs, constants = make(case, triton_device)
    # No token is ignored: a linear head's are never projected, so their gradient is 0 where PyTorch's is 0 * NaN.
    constants = [x if x.is_floating_point() else x.clamp(min=0) for x in constants]
    for index, x in enumerate(inputs):
        is_parameter = x.dim() == 1 or x.shape[1:-1] == (1,) or case.op is liger_ops.moe_experts
        if is_parameter and math.isinf(special):
            continue  # an infinite parameter, of a sample too: NaN or not is a matter of the order of sums
        spoilt = x.clone()
        spoilt.view(-1)[1 % x.numel()] = special
        some = Tensors([*inputs[:index], spoilt, *inputs[index + 1 :]], constants)
        # In float64, because F.gelu of infinity is NaN in float32 on some CPUs.
        expected = run(case.plain, place(some, triton_device, torch.float64))
        for number, results in enumerate(zip(run(case.fused, some), expected, strict=True)):
            is_nan, is_nan_in_pytorch = (result.isnan() for result in results)
            assert torch.equal(is_nan, is_nan_in_pytorch), f"input {index}, result {number}"


def test_no_tokens_give_what_they_give_in_plain_pytorch(case: OpCase, device: torch.device) -> None:
    tensors = make(case, device, (0, 3, 16))
    assert_same(run(case.fused, tensors), run(case.plain, tensors))


# Autograd.


def test_reference_passes_gradcheck(case: OpCase) -> None:
    inputs, constants = place(case.make(2, 3, 4), torch.device("cpu"), torch.float64)
    leaves = [x.requires_grad_() for x in inputs]
    assert torch.autograd.gradcheck(lambda *leaves: case.fused(*leaves, *constants), leaves)


def test_forward_is_the_same_without_gradients(case: OpCase, device: torch.device) -> None:
    inputs, constants = make(case, device)
    leaves = [x.requires_grad_() for x in inputs]
    expected = as_tuple(case.fused(*leaves, *constants))
    assert all(y.requires_grad for y in expected)
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            actual = as_tuple(case.fused(*leaves, *constants))
        assert not any(y.requires_grad for y in actual)
        assert_same([*actual], [*expected], case)


def test_only_inputs_that_ask_for_a_gradient_get_one(case: OpCase, device: torch.device) -> None:
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


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_results_repeat_of_a_graph_that_is_kept_too_and_arguments_stay(
    dtype: torch.dtype, case: OpCase, device: torch.device
) -> None:
    is_large = device.type == "cuda" and dtype == torch.float32
    tensors = place(make(case, device, (4, 300, 520) if is_large else SIZES), device, dtype)
    leaves = [x.detach().requires_grad_() for x in tensors.inputs]
    outputs = as_tuple(case.fused(*leaves, *tensors.constants))
    upstream, results = make_upstream(outputs), run(case.fused, tensors)
    assert_same([*outputs], results[: len(outputs)])
    expected, arguments = results[len(outputs) :], [*leaves, *tensors.constants, *upstream]
    before = [x.detach().clone() for x in arguments]
    first, second = (list(torch.autograd.grad(outputs, leaves, upstream, retain_graph=True)) for _ in range(2))
    last = torch.autograd.grad(outputs, leaves, [2 * each for each in upstream])  # may reuse what the graph held
    assert_same(first, expected)
    assert_same(second, expected)
    torch.testing.assert_close(list(last), [2 * each for each in expected])
    assert_same([x.detach() for x in arguments], before)


@pytest.mark.parametrize(
    "case",
    [name for name in CASES if any(each in name for each in ("entropy", "linear_log", "token_log", "token_loss"))],
    indirect=True,
)
def test_ignored_tokens_alone_give_no_gradient_and_a_mean_of_nan(case: OpCase, device: torch.device) -> None:
    inputs, constants = make(case, device)
    constants = [x if x.is_floating_point() else torch.full_like(x, liger_ops.IGNORE_INDEX) for x in constants]
    results = run(case.fused, Tensors(inputs, constants))
    num_outputs = len(results) - len(inputs)
    for y in results[:num_outputs]:
        assert not y.any() if y.dim() else y.isnan()
    assert not any(gradient.any() for gradient in results[num_outputs:])


def test_reentrant_checkpointing_gives_the_same_gradients(case: OpCase, triton_device: torch.device) -> None:
    tensors = make(case, triton_device)
    leaves = [x.detach().requires_grad_() for x in tensors.inputs]
    outputs = as_tuple(checkpoint(case.fused, *leaves, *tensors.constants, use_reentrant=True))
    torch.autograd.backward(outputs, make_upstream(outputs))
    assert_same([*outputs, *(x.grad for x in leaves)], run(case.fused, tensors), case)


def test_a_graph_of_the_gradients_is_refused(case: OpCase, triton_device: torch.device) -> None:
    tensors = make(case, triton_device)
    leaves = [x.detach().requires_grad_() for x in tensors.inputs]
    outputs = as_tuple(case.fused(*leaves, *tensors.constants))
    with pytest.raises(RuntimeError, match="no second derivative: create_graph must be False, got True"):
        torch.autograd.grad(outputs, leaves, make_upstream(outputs), create_graph=True)


@pytest.mark.parametrize("case", [name for name in CASES if name != "moe_experts"], indirect=True)  # keeps its scores
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_autocast_changes_nothing_but_the_products_of_a_head(
    dtype: torch.dtype, case: OpCase, device: torch.device
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
