"""linear_cross_entropy against plain float64 PyTorch; test_chunked_loss says what it computes and allocates."""

import importlib
import inspect
import itertools

import pytest
import torch
import torch.nn.functional as F

from liger_ops import TokenStats, backend, cross_entropy, linear_cross_entropy
from liger_ops.cross_entropy import TokenLossOptions
from tests.liger_ops.accuracy import assert_as_accurate
from tests.liger_ops.test_cross_entropy import DTYPES, OPTIONS, make_options, plain_cross_entropy

MODULE = importlib.import_module("liger_ops.linear_cross_entropy")  # the package's attribute is the function
HIDDEN = 16
NAMES = ("input", "linear_weight", "linear_bias")


@pytest.fixture(params=["kernel", "reference"])
def device(request, triton_device, monkeypatch):
    """Each test runs on the Triton path and on the PyTorch path of the same device."""
    if request.param == "reference":
        monkeypatch.setattr(backend, "use_triton", lambda tensor: False)
    return triton_device


def make_batch(num_tokens, vocab_size, *, dtype=torch.float32, device="cpu", ignore_index=-100):
    """Hidden states, a head whose logits spread by about 2, its bias, and labels of which every fourth is ignored."""
    shapes = ((num_tokens, HIDDEN), (vocab_size, HIDDEN), (vocab_size,))
    tensors = tuple(torch.randn(shape).to(device, dtype) for shape in shapes)
    tensors[1].mul_(0.5)
    labels = torch.randint(vocab_size, (num_tokens,))
    labels[:1] = vocab_size - 1
    labels[2:3] = 0
    labels[3::4] = ignore_index
    return tensors, labels.to(device)


def plain_linear_cross_entropy(input, linear_weight, labels, *, linear_bias=None, **options):
    return plain_cross_entropy(F.linear(input, linear_weight, linear_bias), labels, **options)


def loss_and_gradients(function, tensors, labels, upstream=None, *, needed=(True, True, True), **options):
    leaves = [
        None if tensor is None else tensor.detach().requires_grad_(need)
        for tensor, need in zip(tensors, needed, strict=True)
    ]
    loss = function(leaves[0], leaves[1], labels, linear_bias=leaves[2], **options)
    wanted = [leaf for leaf in leaves if leaf is not None and leaf.requires_grad]
    return loss, *torch.autograd.grad(loss, wanted, None if upstream is None else upstream.to(loss))


def chunks_of(num_rows, tensors):
    """The option that makes chunks hold ``num_rows`` rows at most."""
    return {"chunk_bytes": num_rows * tensors[1].shape[0] * tensors[1].element_size()}


def assert_matches_plain(tensors, labels, upstream=None, *, rows=3, needed=(True, True, True), **options):
    in_double = [None if tensor is None else tensor.double().cpu() for tensor in tensors]
    on_cpu = {name: value.cpu() if name == "weight" else value for name, value in options.items()}
    run = {"upstream": upstream, "needed": needed}
    truth = loss_and_gradients(plain_linear_cross_entropy, in_double, labels.cpu(), **run, **on_cpu)
    eager = loss_and_gradients(plain_linear_cross_entropy, tensors, labels, **run, **options)
    chunks = chunks_of(rows, tensors)
    actual = loss_and_gradients(linear_cross_entropy, tensors, labels, **run, **chunks, **options)
    names = ["loss", *(name for name, need in zip(NAMES, needed, strict=True) if need)]
    assert [result.dtype for result in actual] == [torch.float32] + [tensors[0].dtype] * sum(needed)
    for name, *results in zip(names, actual, eager, truth, strict=True):
        assert_as_accurate(name, *results)


# Every option meets every dtype in test_cross_entropy; here half precision meets the loop.
@pytest.mark.parametrize(
    ("name", "dtype"),
    [(name, torch.float32) for name in OPTIONS] + list(itertools.product(["plain", "everything"], DTYPES[1:])),
    ids=str,
)
def test_loss_and_every_gradient_match_plain_pytorch(name, dtype, device):
    options = make_options(name, 123, device)
    tensors, labels = make_batch(7, 123, dtype=dtype, device=device, ignore_index=options.get("ignore_index", -100))
    assert_matches_plain(tensors, labels, **options)


@pytest.mark.parametrize(("num_tokens", "vocab_size"), [(1, 507), (37, 2), (3, 8193)])
@pytest.mark.parametrize(
    ("reduction", "upstream"),
    [("none", "per_token"), ("none", "expanded"), ("sum", -2.5), ("mean", 1024.0)],
    ids=lambda value: str(value),
)
def test_every_size_and_upstream_gradient_matches_plain_pytorch(num_tokens, vocab_size, reduction, upstream, device):
    tensors, labels = make_batch(num_tokens, vocab_size, device=device)
    scale = 0.3 if upstream == "expanded" else upstream
    upstream = torch.randn(num_tokens) if upstream == "per_token" else torch.tensor(scale)
    upstream = upstream.expand(num_tokens) if reduction == "none" else upstream
    assert_matches_plain(tensors, labels, upstream, rows=10, reduction=reduction, label_smoothing=0.1)


NEEDED = [needed for needed in itertools.product([True, False], repeat=3) if any(needed)]


@pytest.mark.parametrize("needed", NEEDED, ids=lambda needed: "+".join(itertools.compress(NAMES, needed)))
@pytest.mark.parametrize("reduction", ["none", "mean"])
def test_gradients_can_be_taken_alone(reduction, needed, device):
    tensors, labels = make_batch(7, 123, device=device)
    assert_matches_plain(tensors, labels, torch.ones(7) if reduction == "none" else None, needed=needed,
                         reduction=reduction)  # fmt: skip


def test_works_without_a_bias(device):
    tensors, labels = make_batch(7, 123, device=device)
    assert_matches_plain((*tensors[:2], None), labels, needed=(True, True, False))


@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
def test_second_backward_gives_the_same_and_inputs_are_left_unchanged(reduction, device):
    tensors, labels = make_batch(7, 123, device=device)
    before = [tensor.clone() for tensor in (*tensors, labels)]
    leaves = [tensor.requires_grad_() for tensor in tensors]
    loss = linear_cross_entropy(
        leaves[0], leaves[1], labels, linear_bias=leaves[2], reduction=reduction, **chunks_of(3, tensors)
    ).sum()
    first, second = (torch.autograd.grad(loss, leaves, retain_graph=True) for _ in range(2))
    assert all(torch.equal(one, two) for one, two in zip(first, second, strict=True))
    assert all(torch.equal(now, then) for now, then in zip((*tensors, labels), before, strict=True))


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize(("dtype", "scale"), [(torch.bfloat16, 1 / 3), (torch.float16, 2.0**16)], ids=str)
def test_upstream_gradient_is_not_rounded_to_the_dtype_of_the_head(dtype, scale, device):
    tensors, labels = make_batch(32, 50, dtype=dtype, device=device)
    options = {"reduction": "sum", "accumulate_dtype": dtype}
    (_, *stored), (_, *scaled) = (
        loss_and_gradients(linear_cross_entropy, tensors, labels, torch.tensor(upstream), **options)
        for upstream in (1.0, scale)
    )
    for before, after in zip(stored, scaled, strict=True):
        assert torch.equal(after, (before.float() * scale).to(dtype))


def test_layout_of_inputs_does_not_matter(device):
    (input, weight, bias), labels = make_batch(8, 123, device=device)
    expected = loss_and_gradients(linear_cross_entropy, (input, weight, bias), labels)
    strided = (
        input.t().contiguous().t(),
        F.pad(weight, (3, 5))[:, 3:-5],
        bias.repeat_interleave(2)[::2],
    )
    assert not any(tensor.is_contiguous() for tensor in strided)
    actual = loss_and_gradients(linear_cross_entropy, strided, labels.repeat_interleave(2)[::2])
    torch.testing.assert_close(actual, expected)
    by_sequence = (input.view(2, 4, HIDDEN).transpose(0, 1), weight, bias)
    loss, grad_input, *_ = loss_and_gradients(linear_cross_entropy, by_sequence, labels.view(2, 4).t())
    torch.testing.assert_close((loss, grad_input.transpose(0, 1).reshape(8, -1)), expected[:2])


@pytest.mark.parametrize("reduction", ["none", "mean"])
def test_stats_and_losses_have_the_shape_of_the_labels(reduction, device):
    (input, weight, bias), labels = make_batch(8, 123, device=device)
    options = {"softcap": 3.0, "z_loss_weight": 0.1, "reduction": reduction, "return_stats": True}
    loss, stats = linear_cross_entropy(
        input.view(2, 4, HIDDEN).requires_grad_(), weight, labels.view(2, 4), linear_bias=bias, **options
    )
    expected_loss, expected = cross_entropy(F.linear(input, weight, bias), labels, **options)
    assert isinstance(stats, TokenStats)
    assert not any(stat.requires_grad for stat in stats)
    torch.testing.assert_close(loss, expected_loss.view(loss.shape))
    assert loss.shape == (labels.view(2, 4).shape if reduction == "none" else ())
    for actual, flat in zip(stats, expected, strict=True):
        torch.testing.assert_close(actual, flat.view(2, 4))


@pytest.mark.parametrize("num_tokens", [0, 6], ids=["no_tokens", "all_ignored"])
@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
def test_no_kept_token_gives_no_gradient_and_the_mean_of_nothing_is_nan(reduction, num_tokens, device):
    tensors, labels = make_batch(num_tokens, 50, device=device)
    labels.fill_(-100)
    upstream = torch.ones(num_tokens) if reduction == "none" else None
    loss, *gradients = loss_and_gradients(linear_cross_entropy, tensors, labels, upstream, reduction=reduction)
    assert loss.isnan() if reduction == "mean" else not loss.any()
    for gradient, tensor in zip(gradients, tensors, strict=True):
        assert torch.equal(gradient, torch.zeros_like(tensor))


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_bfloat16_head_can_sum_in_float32(device):
    tensors, labels = make_batch(64, 50, dtype=torch.bfloat16, device=device)
    in_double = [tensor.double().cpu() for tensor in tensors]
    truth = loss_and_gradients(plain_linear_cross_entropy, in_double, labels.cpu(), reduction="sum")[2]
    errors = {}
    for dtype in (torch.float32, torch.bfloat16, None):
        _, _, gradient, _ = loss_and_gradients(
            linear_cross_entropy, tensors, labels, reduction="sum", accumulate_dtype=dtype, **chunks_of(1, tensors)
        )
        assert gradient.dtype == torch.bfloat16
        errors[dtype] = (gradient.double().cpu() - truth).norm().item()
    assert errors[torch.float32] == errors[None] < errors[torch.bfloat16] / 2


def test_signature_is_pytorchs_with_more_keywords():
    if not hasattr(F, "linear_cross_entropy"):
        pytest.skip("needs a PyTorch with torch.nn.functional.linear_cross_entropy")
    ours, theirs = (
        [(p.name, p.kind, p.default) for p in inspect.signature(function).parameters.values()]
        for function in (linear_cross_entropy, F.linear_cross_entropy)
    )
    assert ours[: len(theirs)] == theirs


CALLS = {
    "no_batch": ((HIDDEN,), (11, HIDDEN), (), {}),
    "ignore_index=None": ((7, HIDDEN), (11, HIDDEN), (7,), {"ignore_index": None, "reduction": "sum"}),
    "class_probabilities": ((7, HIDDEN), (11, HIDDEN), (7, 11), {"label_smoothing": 0.1}),
    "head_of_three_dimensions": ((7, HIDDEN), (11, 3, HIDDEN), (7, 3), {"reduction": "none"}),
    "head_of_four_dimensions": ((7, HIDDEN), (11, 3, 2, HIDDEN), (7, 3, 2), {}),
}


@pytest.mark.parametrize("call", CALLS)
def test_calls_of_pytorchs_function_give_the_same(call, device):
    input_shape, weight_shape, target_shape, options = CALLS[call]
    tensors = [torch.randn(shape, device=device) for shape in (input_shape, weight_shape, weight_shape[:-1])]
    is_probability = call == "class_probabilities"
    target = torch.rand(target_shape).softmax(-1) if is_probability else torch.randint(11, target_shape)

    def expected_function(input, linear_weight, target, linear_bias, ignore_index=-100, **options):
        if hasattr(F, "linear_cross_entropy"):
            return F.linear_cross_entropy(input, linear_weight, target, linear_bias=linear_bias, **options)
        logits = F.linear(input, linear_weight.flatten(0, -2), linear_bias.flatten())
        return F.cross_entropy(logits.unflatten(-1, linear_weight.shape[:-1]), target, **options)

    target = target.to(device)
    upstream = torch.randn(target_shape, device=device) if options.get("reduction") == "none" else None
    expected = loss_and_gradients(expected_function, tensors, target, upstream, **options)
    torch.testing.assert_close(loss_and_gradients(linear_cross_entropy, tensors, target, upstream, **options), expected)


def test_label_out_of_range_raises_on_the_cpu():
    tensors, labels = make_batch(7, 50)
    labels[1] = 50
    with pytest.raises(ValueError, match=r"target must be between 0 and .*49, or .*-100; got 50 \(1 of 7"):
        linear_cross_entropy(*tensors[:2], labels)


@pytest.mark.parametrize("reduction", ["none", "sum"])
def test_label_out_of_range_gives_nan_in_its_row_alone_where_it_is_not_looked_at(reduction, device, monkeypatch):
    monkeypatch.setattr(MODULE, "check_labels", lambda *_: None)  # as on a GPU
    tensors, labels = make_batch(7, 50, device=device)
    upstream = torch.ones(7) if reduction == "none" else None
    _, expected, *_ = loss_and_gradients(linear_cross_entropy, tensors, labels, upstream, reduction=reduction)
    labels[1] = 50
    loss, *gradients = loss_and_gradients(linear_cross_entropy, tensors, labels, upstream, reduction=reduction)
    assert (loss[1] if reduction == "none" else loss).isnan()
    assert all(gradient.isnan().any() for gradient in gradients)
    others = [0, 2, 3, 4, 5, 6]
    torch.testing.assert_close(gradients[0][others], expected[others])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"reduction": "average"}, "reduction must be one of .* got 'average'"),
        ({"label_smoothing": -0.5}, "label_smoothing must be between 0 and 1, got -0.5"),
        ({"chunk_bytes": 0}, "chunk_bytes must be a positive number of bytes, got 0"),
        ({"linear_weight": torch.ones(3)}, r"linear_weight must be \[vocab_size, hidden_size\], got shape \(3,\)"),
        ({"linear_weight": torch.ones(11, 3).bfloat16()}, "linear_weight must have .* torch.float32, got torch.bfl"),
        ({"input": torch.ones(4, 5)}, r"input must end in .* = 3, got shape \(4, 5\)"),
        ({"input": torch.tensor(1.0)}, r"input must end in .* = 3, got shape \(\)"),
        ({"target": torch.zeros(5, dtype=torch.int64)}, r"target must .* \(4,\) tokens, target has shape \(5,\)"),
        ({"target": torch.zeros(4, dtype=torch.int32)}, "target must hold class indices .* got torch.int32"),
        ({"linear_bias": torch.ones(3)}, r"linear_bias must have shape \(11,\), got \(3,\)"),
        ({"weight": torch.ones(3)}, r"weight must have shape \(11,\), got \(3,\)"),
        ({"input": torch.ones(2, 4, 3), "target": torch.ones(2, 4, 11)}, r"input must be .* got shape \(2, 4, 3\)"),
        ({"input": torch.ones(3), "linear_weight": torch.ones(11, 2, 3)}, r"input must be .* got shape \(3,\)"),
        ({"target": torch.ones(4, 11), "return_stats": True}, "target must be class indices .* return_stats"),
    ],
    ids=lambda value: "+".join(value) if isinstance(value, dict) else "",
)
def test_arguments_that_do_not_fit_raise(options, message):
    arguments = {
        "input": torch.ones(4, 3), "linear_weight": torch.ones(11, 3), "target": torch.zeros(4, dtype=torch.int64)
    }  # fmt: skip
    with pytest.raises(ValueError, match=message):
        linear_cross_entropy(**{**arguments, **options})


@pytest.mark.parametrize("reduction", ["none", "mean"])
def test_second_derivative_is_refused(reduction):
    tensors, labels = make_batch(7, 50)
    input, weight = (tensor.requires_grad_() for tensor in tensors[:2])
    loss = linear_cross_entropy(input, weight, labels, reduction=reduction).sum()
    (gradient,) = torch.autograd.grad(loss, input, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        (loss + gradient.square().sum()).backward()


@pytest.mark.parametrize("needs_gradient", [[True, True, True], [False, False, False]], ids=["gradients", "loss"])
@pytest.mark.parametrize("num_tokens", [0, 7])
def test_op_passes_opcheck(num_tokens, needs_gradient, device):
    tensors, labels = make_batch(num_tokens, 50, dtype=torch.bfloat16, device=device)
    arguments = (*tensors, labels, None, None, 3, torch.float32, needs_gradient, *TokenLossOptions().as_scalars())
    torch.library.opcheck(
        torch.ops.liger_ops.linear_cross_entropy.default, arguments, test_utils=("test_schema", "test_faketensor")
    )


@pytest.mark.parametrize("reduction", ["none", "mean"])
def test_compiles_to_one_graph_with_the_same_result(reduction, device):
    tensors, labels = make_batch(7, 50, device=device)
    options = {"reduction": reduction, "softcap": 3.0, "label_smoothing": 0.1, **chunks_of(3, tensors)}
    upstream = torch.randn(7) if reduction == "none" else None
    expected = loss_and_gradients(linear_cross_entropy, tensors, labels, upstream, **options)
    torch._dynamo.reset()
    compiled = torch.compile(linear_cross_entropy, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(loss_and_gradients(compiled, tensors, labels, upstream, **options), expected)


@pytest.mark.parametrize("reduction", ["none", "mean"])
def test_autocast_computes_the_products_in_its_dtype_and_returns_the_inputs(reduction, device):
    tensors, labels = make_batch(7, 50, device=device)
    options = {"reduction": reduction, "label_smoothing": 0.1}
    upstream = torch.randn(7) if reduction == "none" else None
    rounded = [tensor.bfloat16() for tensor in tensors]
    expected = loss_and_gradients(linear_cross_entropy, rounded, labels, upstream, **options)
    with torch.autocast(device.type, torch.bfloat16):
        actual = loss_and_gradients(linear_cross_entropy, tensors, labels, upstream, **options)
    assert all(result.dtype == torch.float32 for result in actual)
    torch.testing.assert_close(actual, tuple(result.float() for result in expected), rtol=0, atol=0)


@pytest.mark.gpu
def test_ignored_tokens_change_nothing_across_chunks_on_the_gpu():
    tensors, labels = make_batch(1000, 507, dtype=torch.bfloat16, device="cuda")
    labels[torch.randperm(1000)[:600]] = -100
    kept = labels != -100
    options = {"reduction": "sum", "accumulate_dtype": torch.float32, **chunks_of(128, tensors)}
    loss, grad_input, *grad_head = loss_and_gradients(linear_cross_entropy, tensors, labels, **options)
    expected_loss, expected_input, *expected_head = loss_and_gradients(
        linear_cross_entropy, (tensors[0][kept], *tensors[1:]), labels[kept], **options
    )
    torch.testing.assert_close(loss, expected_loss)
    torch.testing.assert_close(grad_input[kept], expected_input)
    torch.testing.assert_close(grad_head, expected_head)
    assert not grad_input[~kept].any()
