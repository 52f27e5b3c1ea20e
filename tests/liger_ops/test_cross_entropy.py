"""cross_entropy against plain float64 PyTorch, on the Triton kernels and on the PyTorch reference."""

import importlib
import inspect

import pytest
import torch
import torch.nn.functional as F

from liger_ops import backend, cross_entropy
from liger_ops.cross_entropy import (
    TokenLossOptions,
    TokenStats,
    choose_launch,
    cross_entropy_reference,
    loss_and_gradient_in_place,
)
from tests.liger_ops.accuracy import assert_as_accurate

MODULE = importlib.import_module("liger_ops.cross_entropy")  # the package's attribute of that name is the function
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
BLOCK = 4096  # the largest block of one program: past it a row takes several

OPTIONS = {
    "plain": {},
    "ignore_index=0": {"ignore_index": 0},
    "ignore_index=-1": {"ignore_index": -1},
    "label_smoothing": {"label_smoothing": 0.1},
    "label_smoothing=1": {"label_smoothing": 1.0},
    "class_weight": {"weight": "random"},
    "class_weight+smoothing": {"weight": "random", "label_smoothing": 0.2},
    "softcap": {"softcap": 3.0},
    "logit_scale": {"logit_scale": 0.25},
    "z_loss": {"z_loss_weight": 1e-2},
    "everything": {
        "ignore_index": -1, "weight": "random", "label_smoothing": 0.1, "softcap": 8.0, "logit_scale": 0.5,
        "z_loss_weight": 1e-2,
    },
}  # fmt: skip


@pytest.fixture(params=["kernel", "reference"])
def device(request, triton_device, monkeypatch):
    """Each test runs on the Triton path and on the PyTorch path of the same device."""
    if request.param == "reference":
        monkeypatch.setattr(backend, "use_triton", lambda tensor: False)
    return triton_device


def make_options(name, vocab_size, device):
    options = dict(OPTIONS[name])
    if "weight" in options:
        options["weight"] = torch.rand(vocab_size, device=device) + 0.5
    return options


def make_batch(num_tokens, vocab_size, *, dtype=torch.float32, device="cpu", ignore_index=-100):
    """Logits of spread 4 and labels that hold the first class, the last class and, from 4 tokens on, ignored ones."""
    logits = (4 * torch.randn(num_tokens, vocab_size)).to(device, dtype)
    labels = torch.randint(vocab_size, (num_tokens,))
    labels[:1] = vocab_size - 1
    labels[2:3] = 0
    labels[3::4] = ignore_index
    return logits, labels.to(device)


def plain_cross_entropy(
    logits, labels, *, reduction="mean", softcap=None, logit_scale=1.0, z_loss_weight=0.0, **options
):
    """What the loss means, in PyTorch's words; half logits are widened first, as Hugging Face's loss does."""
    z = logits.to(torch.promote_types(logits.dtype, torch.float32)) * logit_scale
    if softcap is not None:
        z = softcap * torch.tanh(z / softcap)
    options = {name: value.to(z) if name == "weight" else value for name, value in options.items()}
    loss = F.cross_entropy(z, labels, reduction=reduction, **options)
    kept = labels != options.get("ignore_index", -100)
    z_losses = z_loss_weight * (torch.logsumexp(z, -1) ** 2).where(kept, 0.0)
    if reduction == "none":
        return loss + z_losses
    weight = options.get("weight", z.new_ones(z.shape[-1]))
    return loss + z_losses.sum() / (1.0 if reduction == "sum" else weight[labels[kept]].sum())


def loss_and_gradient(function, logits, labels, upstream=None, **options):
    leaf = logits.detach().requires_grad_()
    loss = function(leaf, labels, **options)
    (gradient,) = torch.autograd.grad(loss, leaf, None if upstream is None else upstream.to(loss))
    return loss, gradient


def assert_matches_plain(logits, labels, upstream=None, **options):
    on_cpu = {name: value.cpu() if name == "weight" else value for name, value in options.items()}
    truth = loss_and_gradient(plain_cross_entropy, logits.double().cpu(), labels.cpu(), upstream, **on_cpu)
    eager = loss_and_gradient(plain_cross_entropy, logits, labels, upstream, **options)
    actual = loss_and_gradient(cross_entropy, logits, labels, upstream, **options)
    assert (actual[0].dtype, actual[1].dtype) == (torch.float32, logits.dtype)
    assert_as_accurate("loss", actual[0], eager[0], truth[0])
    assert_as_accurate("gradient", actual[1], eager[1], truth[1])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", OPTIONS)
def test_loss_and_gradient_match_plain_pytorch_for_every_option(name, dtype, device):
    options = make_options(name, 123, device)
    logits, labels = make_batch(7, 123, dtype=dtype, device=device, ignore_index=options.get("ignore_index", -100))
    assert_matches_plain(logits, labels, torch.randn(7), reduction="none", **options)


# The fewest classes that say something, odd sizes below a block, a full block, and rows that take two blocks.
@pytest.mark.parametrize(
    ("num_tokens", "vocab_size"),
    [(37, 2), (1, 507), (37, 507), (7, 1000), (1, BLOCK), (2, BLOCK + 1)],
    ids=lambda size: str(size),
)
@pytest.mark.parametrize(("reduction", "name"), [("none", "everything"), ("mean", "class_weight"), ("sum", "plain")])
def test_loss_and_gradient_match_plain_pytorch_for_every_size(num_tokens, vocab_size, reduction, name, device):
    options = make_options(name, vocab_size, device)
    logits, labels = make_batch(num_tokens, vocab_size, device=device, ignore_index=options.get("ignore_index", -100))
    upstream = torch.randn(num_tokens) if reduction == "none" else None
    assert_matches_plain(logits, labels, upstream, reduction=reduction, **options)


def test_one_class_leaves_nothing_to_learn(device):
    logits, labels = make_batch(7, 1, device=device)
    loss, gradient = loss_and_gradient(cross_entropy, logits, labels, torch.randn(7), reduction="none")
    assert not loss.any()
    assert not gradient.any()


@pytest.mark.parametrize(
    ("reduction", "upstream"),
    [
        pytest.param("none", torch.linspace(-2, 3, 7), id="per_token"),
        pytest.param("none", torch.linspace(-2, 3, 14)[::2], id="strided"),
        pytest.param("none", torch.tensor(0.3).expand(7), id="expanded"),
        pytest.param("mean", torch.tensor(-2.5), id="scalar_of_mean"),
        pytest.param("sum", torch.tensor(1024.0), id="scalar_of_sum"),
    ],
)
def test_gradient_scales_with_upstream_and_stays_for_a_second_backward(reduction, upstream, device):
    logits, labels = make_batch(7, 123, device=device)
    assert_matches_plain(logits, labels, upstream, reduction=reduction)
    before = logits.clone(), labels.clone()
    logits.requires_grad_()
    loss = cross_entropy(logits, labels, reduction=reduction)
    first, second = (torch.autograd.grad(loss, logits, upstream.to(device), retain_graph=True)[0] for _ in range(2))
    assert torch.equal(first, second)
    assert torch.equal(logits, before[0])
    assert torch.equal(labels, before[1])


LAYOUTS = {
    "transposed": lambda logits: logits.t().contiguous().t(),
    "every_other_class": lambda logits: logits.repeat_interleave(2, 1)[:, ::2],
    "rows_of_a_wider_tensor": lambda logits: F.pad(logits, (3, 5))[:, 3:-5],
    "one_row_for_all": lambda logits: logits[:1].expand(len(logits), -1),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layout_of_logits_and_labels_does_not_matter(layout, device):
    logits, labels = make_batch(7, 123, device=device)
    strided = LAYOUTS[layout](logits)
    assert not strided.is_contiguous()
    upstream = torch.randn(7, device=device)
    expected = loss_and_gradient(cross_entropy, strided.contiguous(), labels, upstream, reduction="none")
    labels = labels.repeat_interleave(2)[::2]
    actual = loss_and_gradient(cross_entropy, strided, labels, upstream, reduction="none")
    torch.testing.assert_close(actual, expected)


@pytest.mark.parametrize("with_gradient", [False, True], ids=["loss", "loss+gradient"])
@pytest.mark.parametrize("name", ["plain", "everything"])
def test_in_place_variant_overwrites_only_its_own_rows(name, with_gradient, device):
    options = make_options(name, 123, device)
    logits, labels = make_batch(7, 123, device=device, ignore_index=options.get("ignore_index", -100))
    weight = options.pop("weight", None)
    grad_losses = torch.randn(7, device=device) if name == "everything" else None
    upstream = torch.ones(7, device=device) if grad_losses is None else grad_losses
    buffer = F.pad(logits, (2, 3, 1, 1), value=7.0)
    stats = loss_and_gradient_in_place(
        buffer[1:-1, 2:-3], labels, weight, grad_losses, TokenLossOptions(**options), with_gradient
    )
    loss, gradient = loss_and_gradient(
        cross_entropy, logits, labels, upstream, reduction="none", weight=weight, **options
    )
    torch.testing.assert_close(stats[0], loss.detach())
    torch.testing.assert_close(buffer[1:-1, 2:-3], gradient if with_gradient else logits)
    buffer[1:-1, 2:-3] = 7.0
    assert (buffer == 7.0).all()


@pytest.mark.parametrize(
    ("shape", "arguments", "options"),
    [
        pytest.param((7, 11), ("weight", None, 3, None, "sum", 0.1), {}, id="all_positional"),
        pytest.param((7, 11), ("weight",), {"reduction": "none"}, id="weight_positional"),
        pytest.param((7, 11), (), {"size_average": False}, id="size_average=False"),
        pytest.param((7, 11), (None, False, -100, False), {}, id="reduce=False"),
        pytest.param((7, 11), (), {"reduce": True}, id="reduce=True"),
        pytest.param((11,), (), {}, id="no_batch"),
        pytest.param((2, 11, 5), ("weight",), {}, id="one_extra_dimension"),
        pytest.param((2, 11, 3, 2), (), {"reduction": "none", "label_smoothing": 0.2}, id="two_extra_dimensions"),
    ],
)
@pytest.mark.filterwarnings("ignore:size_average and reduce args")
def test_calls_of_pytorchs_function_give_the_same(shape, arguments, options, device):
    logits = torch.randn(shape, device=device)
    labels = torch.randint(11, shape[:1] + shape[2:] if len(shape) > 1 else (), device=device)
    arguments = tuple(torch.rand(11, device=device) if argument == "weight" else argument for argument in arguments)
    results = []
    for function in (cross_entropy, F.cross_entropy):
        leaf = logits.clone().requires_grad_()
        loss = function(leaf, labels, *arguments, **options)
        results.append((loss, *torch.autograd.grad(loss.sin().sum(), leaf)))
    torch.testing.assert_close(*results)


@pytest.mark.parametrize("options", [{}, {"label_smoothing": 0.1, "reduction": "sum"}], ids=["mean", "smoothed_sum"])
def test_class_probabilities_give_what_pytorch_gives(options, device):
    logits, probabilities = torch.randn(7, 11, device=device), torch.rand(7, 11, device=device).softmax(-1)
    expected = loss_and_gradient(F.cross_entropy, logits, probabilities, **options)
    torch.testing.assert_close(loss_and_gradient(cross_entropy, logits, probabilities, **options), expected)


def test_signature_starts_with_pytorchs():
    ours, theirs = (
        [(p.name, p.default) for p in inspect.signature(function).parameters.values()]
        for function in (cross_entropy, F.cross_entropy)
    )
    assert ours[: len(theirs)] == theirs


@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
@pytest.mark.parametrize("num_tokens", [0, 7], ids=["no_tokens", "all_ignored"])
def test_no_kept_token_gives_no_gradient_and_the_mean_of_nothing_is_nan(num_tokens, reduction, device):
    logits = torch.randn(num_tokens, 123, device=device)
    labels = torch.full((num_tokens,), -100, device=device)
    upstream = torch.ones(num_tokens) if reduction == "none" else None
    loss, gradient = loss_and_gradient(cross_entropy, logits, labels, upstream, reduction=reduction, z_loss_weight=0.1)
    assert loss.isnan() if reduction == "mean" else not loss.any()
    assert torch.equal(gradient, torch.zeros_like(logits))


@pytest.mark.parametrize("name", ["plain", "everything"])
def test_stats_hold_each_tokens_loss_lse_and_prediction(name, device):
    options = make_options(name, 123, device)
    ignore_index = options.get("ignore_index", -100)
    logits, labels = make_batch(8, 123, device=device, ignore_index=ignore_index)
    logits.requires_grad_()
    labels = labels.view(2, 4)
    loss, stats = cross_entropy(
        logits.view(2, 4, 123).movedim(-1, 1), labels, reduction="sum", return_stats=True, **options
    )
    assert isinstance(stats, TokenStats)
    assert not any(stat.requires_grad for stat in stats)
    ignored = labels == ignore_index
    losses = cross_entropy(logits, labels.flatten(), reduction="none", **options)
    torch.testing.assert_close(stats.losses, losses.detach().view(2, 4))
    torch.testing.assert_close(loss, losses.sum())
    z = logits.detach() * options.get("logit_scale", 1.0)
    z = 8.0 * torch.tanh(z / 8.0) if "softcap" in options else z
    torch.testing.assert_close(stats.lse, z.logsumexp(-1).view(2, 4).masked_fill(ignored, 0.0))
    predictions = logits.detach().argmax(-1).view(2, 4)
    assert torch.equal(stats.predictions, predictions.masked_fill(ignored, ignore_index))


@pytest.mark.parametrize("columns", [(3, 9), (7, BLOCK + 2)], ids=["one_block", "two_blocks"])
def test_prediction_is_the_first_of_equal_logits(columns, device):
    logits = torch.zeros(1, BLOCK + 5, device=device)
    logits[:, list(columns)] = 2.0
    _, stats = cross_entropy(logits, torch.tensor([0], device=device), return_stats=True)
    assert stats.predictions.tolist() == [columns[0]]


@pytest.mark.parametrize(
    ("vocab_size", "masked"),
    [(123, slice(100, None)), (123, slice(0, 60)), (BLOCK + 8, slice(0, BLOCK))],
    ids=["last_classes", "first_classes", "first_block"],
)
def test_classes_masked_with_minus_infinity_take_no_part(vocab_size, masked, device):
    logits, _ = make_batch(3, vocab_size, device=device)
    logits[:, masked] = -torch.inf
    allowed = logits[0].isfinite().nonzero()[:, 0]
    labels = allowed[torch.tensor([0, -1, 2], device=device)]
    assert_matches_plain(logits, labels, torch.randn(3), reduction="none")
    assert not loss_and_gradient(cross_entropy, logits, labels)[1][:, masked].any()


def test_confident_logits_stay_finite_and_exact(device):
    logits, labels = make_batch(7, 123, device=device)
    logits[:, 5], logits[:, 9] = 1e4, -1e4
    labels[:3] = torch.tensor([5, 9, 20])  # certain and right, as wrong as can be, wrong
    assert_matches_plain(logits, labels, torch.randn(7), reduction="none")


@pytest.mark.parametrize("offset", [64.0, -64.0])
def test_adding_a_constant_to_the_logits_changes_nothing(offset, device):
    logits, labels = make_batch(7, 123, device=device)
    logits = (logits * 256).round() / 256  # so that the sum is exact
    expected = loss_and_gradient(cross_entropy, logits, labels, torch.ones(7), reduction="none")
    actual = loss_and_gradient(cross_entropy, logits + offset, labels, torch.ones(7), reduction="none")
    # lse is rounded at the size of the shifted logits, once on its own and once in the difference.
    atol = 2 * torch.finfo(torch.float32).eps * (abs(offset) + logits.abs().max().item())
    torch.testing.assert_close(actual, expected, rtol=0, atol=atol)


@pytest.mark.parametrize("name", ["plain", "class_weight+smoothing"])
def test_gradient_sums_to_zero_over_the_vocabulary(name, device):
    logits, labels = make_batch(7, 507, device=device)
    _, gradient = loss_and_gradient(
        cross_entropy, logits, labels, torch.ones(7), reduction="none", **make_options(name, 507, device)
    )
    # Each probability is the exponential of a difference that was rounded at the size of lse.
    eps = torch.finfo(torch.float32).eps
    allowed = eps * (2 + logits.abs().amax(-1) + logits.logsumexp(-1).abs()) * gradient.abs().sum(-1)
    assert (gradient.double().sum(-1).abs() <= allowed).all()
    assert gradient.abs().amax(-1)[labels >= 0].min() > 0.1


def test_permuting_tokens_permutes_losses_and_gradients(device):
    logits, labels = make_batch(7, 123, device=device)
    order = torch.tensor([3, 0, 6, 1, 5, 2, 4], device=device)
    losses, gradient = loss_and_gradient(cross_entropy, logits, labels, torch.ones(7), reduction="none")
    permuted = loss_and_gradient(cross_entropy, logits[order], labels[order], torch.ones(7), reduction="none")
    torch.testing.assert_close(permuted, (losses[order], gradient[order]))


@pytest.mark.parametrize("label", [-1, 11, -101, 2**40])
def test_label_out_of_range_raises_on_the_cpu(label):
    labels = torch.tensor([3, label, -100])
    with pytest.raises(ValueError, match=rf"target must be between 0 and .*10, or .*-100; got {label} \(1 of 3"):
        cross_entropy(torch.randn(3, 11), labels)


@pytest.mark.parametrize("name", ["plain", "class_weight+smoothing", "label_smoothing=1"])
@pytest.mark.parametrize("label", [-1, 123, 2**40])
def test_label_out_of_range_gives_nan_in_its_row_alone_where_it_is_not_looked_at(label, name, device, monkeypatch):
    monkeypatch.setattr(MODULE, "check_labels", lambda *_: None)  # as on a GPU
    options = make_options(name, 123, device)
    logits, labels = make_batch(5, 123, device=device)
    expected = loss_and_gradient(cross_entropy, logits, labels, torch.ones(5), reduction="none", **options)
    labels[1] = label
    for result, valid in zip(
        loss_and_gradient(cross_entropy, logits, labels, torch.ones(5), reduction="none", **options),
        expected,
        strict=True,
    ):
        assert result[1].isnan().all()
        others = [0, 2, 3, 4]
        torch.testing.assert_close(result[others], valid[others])
    assert cross_entropy(logits, labels, **options).isnan()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"reduction": "average"}, "reduction must be one of .* got 'average'"),
        ({"label_smoothing": 1.5}, "label_smoothing must be between 0 and 1, got 1.5"),
        ({"softcap": 0.0}, "softcap must be positive or None, got 0.0"),
        ({"z_loss_weight": -1.0}, "z_loss_weight must not be negative, got -1.0"),
        ({"weight": torch.ones(10)}, r"weight must have shape \(11,\), got \(10,\)"),
        ({"input": torch.tensor(1.0)}, r"target must have input's shape .* \(\), target \(4,\)"),
        ({"target": torch.zeros(3, dtype=torch.int64)}, r"target must have input's shape .* \(4, 11\), target \(3,\)"),
        ({"target": torch.zeros(4, dtype=torch.int32)}, "target must hold class indices .* got torch.int32"),
        ({"target": torch.ones(4, 11), "softcap": 1.0}, "target must be class indices .* softcap"),
        ({"target": torch.ones(4, 11), "return_stats": True}, "target must be class indices .* return_stats"),
    ],
    ids=lambda value: "+".join(value) if isinstance(value, dict) else "",
)
def test_arguments_that_do_not_fit_raise(options, message):
    arguments = {"input": torch.randn(4, 11), "target": torch.zeros(4, dtype=torch.int64)}
    with pytest.raises(ValueError, match=message):
        cross_entropy(**{**arguments, **options})


def test_second_derivative_is_right_or_refused(device, request):
    logits, labels = make_batch(3, 5, device=device)
    logits.requires_grad_()
    (gradient,) = torch.autograd.grad(cross_entropy(logits, labels), logits, create_graph=True)
    if not backend.use_triton(logits):
        expected = torch.func.hessian(lambda x: F.cross_entropy(x, labels))(logits.detach()).sum((0, 1))
        torch.testing.assert_close(torch.autograd.grad(gradient.sum(), logits)[0], expected)
        return
    with pytest.raises(RuntimeError, match="once_differentiable"):
        (cross_entropy(logits, labels) + gradient.square().sum()).backward()


@pytest.mark.parametrize("name", ["plain", "class_weight+smoothing", "everything"])
def test_reference_passes_gradcheck(name):
    options = make_options(name, 7, "cpu")
    logits, labels = make_batch(5, 7, dtype=torch.float64, ignore_index=options.get("ignore_index", -100))
    weight = options.pop("weight", torch.ones(7)).double()
    token_options = TokenLossOptions(**options)
    assert torch.autograd.gradcheck(
        lambda x: cross_entropy_reference(x, labels, weight, token_options)[0], logits.requires_grad_()
    )


@pytest.mark.parametrize("num_tokens", [0, 5])
@pytest.mark.parametrize("name", ["plain", "everything"])
def test_ops_pass_opcheck(name, num_tokens, triton_device):
    options = make_options(name, 123, triton_device)
    logits, labels = make_batch(
        num_tokens, 123, dtype=torch.bfloat16, device=triton_device, ignore_index=options.get("ignore_index", -100)
    )
    weight, scalars = options.pop("weight", None), TokenLossOptions(**options).as_scalars()
    ops = torch.ops.liger_ops
    forward, backward = ops.cross_entropy_forward.default, ops.cross_entropy_backward.default
    _, lse, _, lse_error = forward(logits, labels, weight, *scalars)
    grad_losses = torch.randn_like(lse)
    for op, arguments in (
        (forward, (logits, labels, weight, *scalars)),
        (backward, (logits, labels, weight, lse, lse_error, grad_losses, *scalars)),
    ):
        torch.library.opcheck(op, arguments, test_utils=("test_schema", "test_faketensor"))


@pytest.mark.parametrize("name", ["plain", "everything"])
def test_compiles_to_one_graph_with_the_same_result(name, device):
    options = make_options(name, 123, device)
    logits, labels = make_batch(7, 123, device=device, ignore_index=options.get("ignore_index", -100))
    torch._dynamo.reset()
    compiled = torch.compile(cross_entropy, fullgraph=True, backend="aot_eager")
    expected = loss_and_gradient(cross_entropy, logits, labels, **options)
    torch.testing.assert_close(loss_and_gradient(compiled, logits, labels, **options), expected)


def test_autocast_does_not_lower_the_precision(device):
    options = make_options("everything", 507, device)
    logits, labels = make_batch(7, 507, device=device, ignore_index=-1)
    expected = loss_and_gradient(cross_entropy, logits, labels, **options)
    with torch.autocast(device.type, torch.bfloat16):
        actual = loss_and_gradient(cross_entropy, logits, labels, **options)
    torch.testing.assert_close(actual, expected, rtol=0, atol=0)


@pytest.mark.parametrize("vocab_size", [1, 123, BLOCK, BLOCK + 1, 262144])
def test_launch_covers_small_rows_with_one_block(vocab_size):
    launch = choose_launch(vocab_size)
    assert launch.block_size & (launch.block_size - 1) == 0
    assert min(vocab_size, BLOCK) <= launch.block_size <= max(16, min(2 * vocab_size, BLOCK))
    assert launch.num_warps in (1, 2, 4, 8, 16)


@pytest.mark.gpu
def test_rows_past_two_to_the_31_elements_are_right():
    num_tokens, vocab_size = 17000, 131072
    logits = torch.randn(num_tokens, vocab_size, dtype=torch.bfloat16, device="cuda")
    labels = torch.randint(vocab_size, (num_tokens,), device="cuda")
    losses, gradient = loss_and_gradient(
        cross_entropy, logits, labels, torch.ones(num_tokens), reduction="none", label_smoothing=0.1
    )
    rows = [0, 2**31 // vocab_size, num_tokens - 1]
    results = {
        dtype: loss_and_gradient(
            plain_cross_entropy, logits[rows].to(dtype), labels[rows], torch.ones(3), reduction="none",
            label_smoothing=0.1,
        )
        for dtype in (torch.bfloat16, torch.float64)
    }  # fmt: skip
    for name, actual, eager, truth in zip(
        ("losses", "gradient"), (losses[rows], gradient[rows]), results[torch.bfloat16], results[torch.float64],
        strict=True,
    ):  # fmt: skip
        assert_as_accurate(name, actual, eager, truth)
