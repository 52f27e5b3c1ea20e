"""linear_divergence and divergence against the definitions, in float64 on whole logits."""

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from liger_ops import divergence, linear_divergence
from liger_ops.divergence import linear_divergence as module
from liger_ops.divergence.divergence import divergence_reference
from tests.liger_ops.divergence.cases import EVERYTHING, KINDS, OPTIONS, plain_divergence

TOKENS, CLASSES, HIDDEN, TEACHER_HIDDEN, RANK = 11, 37, 9, 7, 2
CHUNK_BYTES = 3 * 2 * CLASSES * 4  # three tokens of both models


class Models(NamedTuple):
    """Both models' hidden states and heads."""

    x: Tensor
    weight: Tensor
    bias: Tensor
    teacher_x: Tensor
    teacher_weight: Tensor
    teacher_bias: Tensor
    adapter_x: Tensor
    adapter_weight: Tensor
    teacher_adapter_x: Tensor
    teacher_adapter_weight: Tensor

    def logits(self, *, adapters: bool = True) -> tuple[Tensor, Tensor]:
        student = F.linear(self.x, self.weight, self.bias)
        teacher = F.linear(self.teacher_x, self.teacher_weight, self.teacher_bias)
        if adapters:
            student = student + self.adapter_x @ self.adapter_weight.T
            teacher = teacher + self.teacher_adapter_x @ self.teacher_adapter_weight.T
        return student, teacher

    def run(self, *, adapters: bool = True, **options: Any) -> Tensor:
        if adapters:
            options["adapter"] = self.adapter_x, self.adapter_weight
            options["teacher_adapter"] = self.teacher_adapter_x, self.teacher_adapter_weight
        return linear_divergence(
            self.x, self.weight, self.teacher_x, self.teacher_weight, linear_bias=self.bias,
            teacher_bias=self.teacher_bias, **{"chunk_bytes": CHUNK_BYTES, **options},
        )  # fmt: skip

    def to(self, *args: Any) -> "Models":
        return Models(*(each.detach().to(*args).requires_grad_(each.requires_grad) for each in self))


FAST = torch.cuda.is_available()  # where kernels are not interpreted
STUDENT = ("x", "weight", "bias", "adapter_x", "adapter_weight")


def make_models(
    *, trained: tuple[str, ...] = STUDENT, classes: int = CLASSES, teacher_classes: int = CLASSES, tokens: int = TOKENS
) -> Models:
    generator = torch.Generator().manual_seed(3)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    models = Models(
        normal(tokens, HIDDEN), normal(classes, HIDDEN), normal(classes), normal(tokens, TEACHER_HIDDEN),
        normal(teacher_classes, TEACHER_HIDDEN), normal(teacher_classes), normal(tokens, RANK), normal(classes, RANK),
        normal(tokens, RANK), normal(teacher_classes, RANK),
    )  # fmt: skip
    for name in trained:
        getattr(models, name).requires_grad_()
    return models


def make_tokens(tokens: int = TOKENS) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(4)
    return {
        "mask": torch.rand(tokens, generator=generator) > 0.4,
        "token_weight": torch.rand(tokens, generator=generator),
    }


def reduce(losses: Tensor, reduction: str, mask: Tensor | None = None, token_weight: Tensor | None = None) -> Tensor:
    weight = torch.ones_like(losses) if token_weight is None else token_weight.to(losses)
    if mask is not None:
        losses, weight = losses.where(mask, 0), weight.where(mask, 0)
    losses = losses * weight
    return losses if reduction == "none" else losses.sum() / (weight.sum() if reduction == "mean" else 1)


def with_gradients(loss: Tensor, leaves: list[Tensor]) -> list[Tensor]:
    upstream = torch.linspace(-1, 2, loss.numel()) if loss.dim() else torch.tensor(1.7)
    return [loss.detach(), *torch.autograd.grad(loss, leaves, upstream.to(loss).view(loss.shape))]


def leaves_of(models: Models) -> list[Tensor]:
    return [each for each in models if each.requires_grad]


def assert_same(found: list[Tensor], expected: list[Tensor], what: Any, tolerance: float = 2e-5) -> None:
    for place, (one, other) in enumerate(zip(found, expected, strict=True)):
        error = (one.double() - other.double()).abs().max().item()
        assert error <= tolerance * max(1.0, other.abs().max().item()), (what, place, error)


def assert_kinds_match_definition(models: Models, tokens: dict[str, Tensor], kinds: list[tuple[str, float]]) -> None:
    """Every kind with the options in turn; ``test_row_kernels`` has all kinds with all options."""
    truth = models.to(torch.float64)
    for place, (kind, beta) in enumerate(kinds):
        options, reduction = OPTIONS[place % 3], ("sum", "mean", "none")[place // 2 % 3]
        masks = tokens if place % 2 else {}
        found = models.run(kind=kind, beta=beta, reduction=reduction, **masks, **options)
        expected = reduce(plain_divergence(*truth.logits(), kind, beta, **options), reduction, **masks)
        what = kind, beta, reduction, options
        assert_same(with_gradients(found, leaves_of(models)), with_gradients(expected, leaves_of(truth)), what)


def test_every_kind_is_that_of_the_definition() -> None:
    assert_kinds_match_definition(make_models(), make_tokens(), KINDS)


def test_kernels_give_what_the_definition_gives(triton_device: torch.device) -> None:
    tokens = {name: each.to(triton_device) for name, each in make_tokens().items()}
    assert_kinds_match_definition(make_models().to(triton_device), tokens, KINDS[:: 1 if FAST else 3])


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("trained", [("x",), ("weight",), ("x", "adapter_x"), ("adapter_weight",), ("bias", "x"), ()])
def test_frozen_tensors_get_no_gradient_and_change_no_other(trained: tuple[str, ...], reduction: str) -> None:
    whole, some = make_models(), make_models(trained=trained)
    options = {"kind": "jsd", "beta": 0.3, "reduction": reduction, **make_tokens()}
    expected = with_gradients(whole.run(**options), leaves_of(whole))
    names = [name for name in Models._fields if name in STUDENT]
    loss = some.run(**options)
    assert loss.requires_grad == bool(trained)
    if trained:
        found = with_gradients(loss, leaves_of(some))
        assert_same(found, [expected[0], *(expected[1 + names.index(n)] for n in names if n in trained)], trained, 1e-6)


def test_a_frozen_head_costs_three_products_and_a_trained_one_four(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[bool, ...]] = []
    original = module.chunked_linear_loss

    def counted(*args: Any, **kwargs: Any) -> Any:
        calls.append(tuple(kwargs["needs_gradient"]))
        gradients = original(*args, **kwargs)
        assert bool(gradients.weight.numel()) == kwargs["needs_gradient"][1]
        return gradients

    monkeypatch.setattr(module, "chunked_linear_loss", counted)
    for trained, reduction, passes in (
        (("x",), "none", [(True, False)]),
        (("x",), "mean", [(True, False)]),
        (("x", "weight"), "mean", [(True, True)]),
        (("x", "weight"), "none", [(False, False), (True, True)]),
        ((), "mean", [(False, False)]),
    ):
        calls.clear()
        models = make_models(trained=trained)
        loss = models.run(adapters=False, reduction=reduction)
        if trained:
            loss.sum().backward()
        assert [each[:2] for each in calls] == passes, (trained, reduction)


def test_chunks_change_no_result() -> None:
    models, tokens = make_models(), make_tokens()
    results = [
        with_gradients(models.run(kind="skew_kl", beta=0.2, chunk_bytes=size, **tokens), leaves_of(models))
        for size in (1, CHUNK_BYTES, 2**20, None)
    ]
    for result in results[1:]:
        assert_same(result, results[0], "chunks", 1e-6)


def test_order_of_tokens_changes_nothing_but_the_order() -> None:
    models, tokens = make_models(trained=("x",)), make_tokens()
    order = torch.randperm(TOKENS, generator=torch.Generator().manual_seed(0))
    of_tokens = ("x", "teacher_x", "adapter_x", "teacher_adapter_x")
    moved = models._replace(**{name: getattr(models, name).detach()[order] for name in of_tokens})
    moved.x.requires_grad_()
    first = with_gradients(models.run(kind="jsd", **tokens), [models.x])
    second = with_gradients(moved.run(kind="jsd", **{k: v[order] for k, v in tokens.items()}), [moved.x])
    assert_same([second[0], second[1]], [first[0], first[1][order]], "order", 1e-6)


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_nothing_but_masked_tokens_give_a_differentiable_zero(reduction: str, device: torch.device) -> None:
    models = make_models().to(device)
    mask = torch.zeros(TOKENS, dtype=torch.bool, device=device)
    for trained in (models, models._replace(weight=models.weight.detach(), bias=models.bias.detach())):
        result = with_gradients(trained.run(kind="reverse_kl", mask=mask, reduction=reduction), leaves_of(trained))
        assert not any(each.any() for each in result)
    student, teacher = (each.detach() for each in models.logits())
    result = with_gradients(divergence(student.requires_grad_(), teacher, mask=mask, reduction=reduction), [student])
    assert not any(each.any() for each in result)


def test_masked_tokens_are_not_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    original = module.write_rows
    monkeypatch.setattr(
        module, "write_rows", lambda *args, **kwargs: (seen.append(len(args[0])), original(*args, **kwargs))
    )
    mask = torch.zeros(TOKENS, dtype=torch.bool)
    mask[[2, 3, 5, 9]] = True
    make_models().run(mask=mask)
    assert sum(seen) <= 6  # whole chunks of three


def test_masked_tokens_are_in_neither_part_of_the_mean() -> None:
    """Cosine losses of others divide the sum over all tokens by the number of those that count."""
    student, teacher = torch.randn(2, TOKENS, CLASSES)
    mask = make_tokens()["mask"]
    for kind in dict(KINDS):
        found = divergence(student, teacher, kind=kind, beta=0.3, mask=mask)
        torch.testing.assert_close(found, plain_divergence(student[mask], teacher[mask], kind, 0.3).mean())


def test_shape_of_tokens_is_kept() -> None:
    models = make_models(tokens=12)
    x, teacher_x = models.x.view(3, 4, -1), models.teacher_x.view(3, 4, -1)
    tokens = {name: each.view(3, 4) for name, each in make_tokens(12).items()}
    options: dict[str, Any] = {"kind": "jsd", "reduction": "none"}
    flat = linear_divergence(
        models.x, models.weight, models.teacher_x, models.teacher_weight, **make_tokens(12), **options
    )
    shaped = linear_divergence(x, models.weight, teacher_x, models.teacher_weight, **tokens, **options)
    assert torch.equal(shaped, flat.view(3, 4))
    logits = torch.randn(2, 3, 4, CLASSES)
    assert divergence(logits, logits.flip(-1), reduction="none").shape == (2, 3, 4)
    assert divergence(logits[0, 0, 0], logits[0, 0, 1], reduction="none").shape == ()


# Edges.


def test_equal_models_have_divergence_zero(device: torch.device) -> None:
    """No noise of two rounded log-probabilities, which forward KLs of others have."""
    models = make_models().to(device)
    for kind, beta in KINDS if FAST else KINDS[1::5]:  # all of them are tested with the kernel alone
        if kind != "cosine":
            loss = linear_divergence(
                models.x, 30 * models.weight, models.x, 30 * models.weight, kind=kind, beta=beta, reduction="none"
            )
            assert loss.abs().max() <= 1e-6, (kind, beta)


@pytest.mark.parametrize("kind", [kind for kind in dict(KINDS) if kind not in ("mse", "cosine")])
def test_classes_that_both_models_exclude_do_not_count(kind: str, device: torch.device) -> None:
    models = make_models(trained=("x", "weight")).to(device)
    excluded = torch.tensor([0, 5, CLASSES - 1], device=device)
    left = torch.ones(CLASSES, dtype=torch.bool, device=device)
    left[excluded] = False
    bias = torch.zeros(CLASSES, device=device).index_fill_(0, excluded, -torch.inf)
    fewer = models._replace(
        weight=models.weight.detach()[left].requires_grad_(), bias=torch.zeros_like(bias)[left],
        teacher_weight=models.teacher_weight[left], teacher_bias=torch.zeros_like(bias)[left],
    )  # fmt: skip
    models = models._replace(bias=bias, teacher_bias=bias)
    found = with_gradients(models.run(adapters=False, kind=kind, beta=0.3), leaves_of(models))
    expected = with_gradients(fewer.run(adapters=False, kind=kind, beta=0.3), leaves_of(fewer))
    assert not found[2][~left].any()
    assert_same([found[0], found[1], found[2][left]], expected, kind)


@pytest.mark.parametrize(("kind", "whose"), [
    ("forward_kl", "teacher"), ("jsd", "teacher"), ("jsd", "student"), ("skew_kl", "teacher"), ("skew_kl", "student"),
    ("skew_reverse_kl", "teacher"), ("skew_reverse_kl", "student"), ("reverse_kl", "student"),
    ("total_variation", "teacher"), ("total_variation", "student"),
])  # fmt: skip
def test_classes_that_one_model_excludes_have_probability_zero_in_it(
    kind: str, whose: str, device: torch.device
) -> None:
    student, teacher = (3 * torch.randn(2, 4, CLASSES, generator=torch.Generator().manual_seed(1))).to(device)
    (student if whose == "student" else teacher)[:, ::5] = -torch.inf
    low = [each.double().masked_fill(each == -torch.inf, -300.0) for each in (student, teacher)]
    expected = with_gradients(plain_divergence(low[0].requires_grad_(), low[1], kind, 0.3), [low[0]])
    found = with_gradients(
        divergence(student.requires_grad_(), teacher, kind=kind, beta=0.3, reduction="none"), [student]
    )
    assert_same(found, expected, (kind, whose))


@pytest.mark.parametrize(
    ("kind", "whose"), [("forward_kl", "student"), ("reverse_kl", "teacher"), ("mixed", "student")]
)
def test_kl_is_infinite_where_it_is(kind: str, whose: str, device: torch.device) -> None:
    student, teacher = torch.randn(2, 3, CLASSES, generator=torch.Generator().manual_seed(1)).to(device)
    (student if whose == "student" else teacher)[:, 3] = -torch.inf
    student[0, 20] = 500.0  # beyond which every other class's term underflows
    teacher[0, 20] = 500.0
    assert (divergence(student, teacher, kind=kind, reduction="none")[1:] == torch.inf).all()


@pytest.mark.parametrize("kind", [kind for kind in dict(KINDS) if kind not in ("mse", "cosine")])
def test_probabilities_that_underflow_leave_everything_finite(kind: str, device: torch.device) -> None:
    """Logits 200 nats apart, as temperatures below 1 make them: the mixture of two underflown ones has no logarithm."""
    student = torch.tensor([[0.0, -200.0, -150.0, -600.0], [0.0, -300.0, 90.0, -20.0]], device=device)
    teacher = torch.tensor([[0.0, -210.0, -400.0, -650.0], [0.0, -20.0, -300.0, 90.0]], device=device)
    true = student.double().requires_grad_()
    losses = plain_divergence(true, teacher.double(), kind, 0.4)
    expected = with_gradients(losses, [true])
    found = with_gradients(
        divergence(student.requires_grad_(), teacher, kind=kind, beta=0.4, reduction="none"), [student]
    )
    assert_same(found, expected, kind)


def test_divergences_of_close_models_are_accurate(device: torch.device) -> None:
    generator = torch.Generator().manual_seed(2)
    student = (4 * torch.randn(4, 1000, generator=generator)).to(device)
    teacher = student + (0.01 * torch.randn(4, 1000, generator=generator)).to(device)
    for kind, beta in KINDS if FAST else KINDS[::2]:
        if kind not in ("mse", "cosine"):
            found = divergence(student, teacher, kind=kind, beta=beta, reduction="none")
            expected = plain_divergence(student.double(), teacher.double(), kind, beta)
            assert (found.double() - expected).abs().max() <= 3e-7, (kind, beta)  # of about 1e-5 to 1e-2


def test_nan_in_logits_gives_nan() -> None:
    for kind in dict(KINDS):
        for place in (0, 1):
            student, teacher = torch.randn(2, 3, CLASSES)
            (student, teacher)[place][1, 5] = torch.nan
            losses = divergence(student.requires_grad_(), teacher, kind=kind, beta=0.3, reduction="none")
            (gradient,) = torch.autograd.grad(losses.sum(), student)
            assert losses.isnan().tolist() == gradient.isnan().any(1).tolist() == [False, True, False], (kind, place)


# Vocabularies.


def test_vocabularies_of_different_sizes_are_compared_where_both_are(device: torch.device) -> None:
    for classes, teacher_classes in ((CLASSES, CLASSES - 5), (CLASSES - 5, CLASSES)):
        models = make_models(classes=classes, teacher_classes=teacher_classes).to(device)
        truth = models.to(torch.float64)
        common = min(classes, teacher_classes)
        losses = plain_divergence(*(each[:, :common] for each in truth.logits()), "jsd", 0.3)
        found = with_gradients(models.run(kind="jsd", beta=0.3, vocab="common"), leaves_of(models))
        assert_same(found, with_gradients(losses.mean(), leaves_of(truth)), (classes, teacher_classes))
        student, teacher = (each.detach() for each in models.logits())
        found = with_gradients(
            divergence(student.requires_grad_(), teacher, kind="jsd", beta=0.3, vocab="common"), [student]
        )
        gradient = torch.zeros_like(student)
        gradient[:, :common] = divergence_gradient(student[:, :common], teacher[:, :common], "jsd", 0.3)
        assert_same(found, [losses.mean().detach(), gradient], "logits")


def divergence_gradient(student: Tensor, teacher: Tensor, kind: str, beta: float) -> Tensor:
    student = student.detach().double().requires_grad_()
    loss = plain_divergence(student, teacher.double(), kind, beta).mean()
    return torch.autograd.grad(1.7 * loss, student)[0]


def test_padding_of_one_vocabulary_adds_no_divergence() -> None:
    """Padding logits with 0, as others do, gives mass to classes that do not exist."""
    logits = torch.randn(3, CLASSES)
    padded = F.pad(logits, (0, 20), value=1.0)
    for student, teacher in ((logits, padded), (padded, logits)):
        assert divergence(student, teacher, vocab="common") == 0
        with pytest.raises(ValueError, match="vocab must be 'common'"):
            divergence(student, teacher)


# Dtypes.


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_no_less_accurate_than_plain_pytorch(dtype: torch.dtype, device: torch.device) -> None:
    models = make_models(tokens=5).to(device, dtype)
    truth = models.to(torch.float64)
    for kind, beta in KINDS if FAST else KINDS[2::6]:
        for reduction in ("mean", "none"):
            found = with_gradients(models.run(kind=kind, beta=beta, reduction=reduction), leaves_of(models))
            eager, true = (
                with_gradients(
                    reduce(plain_divergence(*(each.to(wide) for each in some.logits()), kind, beta), reduction),
                    leaves_of(some),
                )
                for some, wide in ((models, torch.float32), (truth, torch.float64))
            )
            assert [each.dtype for each in found] == [torch.float32] + 5 * [dtype]
            for place, (one, other, exact) in enumerate(zip(found, eager, true, strict=True)):
                # A divergence that is 0 by definition has the rounding of sums of probabilities.
                allowed = 2 * (other - exact).abs().max() + torch.finfo(dtype).eps * exact.abs().max() + 1e-6
                assert (one - exact).abs().max() <= allowed, (kind, beta, reduction, place)


def test_logits_in_float32_make_divergences_of_close_models_accurate(device: torch.device) -> None:
    models = make_models(trained=("x", "weight", "bias")).to(device, torch.bfloat16)
    close = models._replace(
        teacher_x=models.x.detach(), teacher_weight=models.weight.detach() * 1.01, teacher_bias=models.bias.detach()
    )
    truth = close.to(torch.float64)
    true = with_gradients(plain_divergence(*truth.logits(adapters=False), "forward_kl").mean(), leaves_of(truth))
    errors = {}
    for logits_dtype in (None, torch.float32):
        found = with_gradients(close.run(adapters=False, logits_dtype=logits_dtype), leaves_of(close))
        errors[logits_dtype] = [
            (one.double() - other).abs().max().item() for one, other in zip(found, true, strict=True)
        ]
        assert [each.dtype for each in found] == [torch.float32] + 3 * [torch.bfloat16]
    assert errors[torch.float32][0] < 2e-6 < errors[None][0]
    assert all(wide < 0.3 * narrow for wide, narrow in zip(errors[torch.float32], errors[None], strict=True))


def test_autocast_computes_products_in_its_dtype() -> None:
    models = make_models()
    with torch.autocast("cpu", torch.bfloat16):
        found = with_gradients(models.run(kind="jsd"), leaves_of(models))
    rounded = models.to(torch.bfloat16)
    expected = with_gradients(rounded.run(kind="jsd"), leaves_of(rounded))
    assert [each.dtype for each in found] == 6 * [torch.float32]
    assert_same(found, expected, "autocast", 1e-2)


def test_models_may_have_different_dtypes(device: torch.device) -> None:
    models = make_models(trained=("x", "weight")).to(device)
    teacher = models.teacher_x.bfloat16(), models.teacher_weight.bfloat16()
    found = linear_divergence(models.x, models.weight, *teacher, kind="mixed")
    teacher_logits = teacher[0] @ teacher[1].T
    torch.testing.assert_close(found, divergence(models.x @ models.weight.T, teacher_logits, kind="mixed"))


# The teacher, and what else is called with the same results.


def test_the_teacher_is_a_constant() -> None:
    models = make_models(trained=("x", "teacher_x", "teacher_weight", "teacher_bias"))
    models.run().backward()
    assert models.x.grad is not None
    assert models.teacher_x.grad is models.teacher_weight.grad is models.teacher_bias.grad is None
    student, teacher = torch.randn(2, 3, 5).unbind()
    divergence(student.requires_grad_(), teacher.requires_grad_()).backward()
    assert teacher.grad is None


@pytest.mark.parametrize("function", [divergence, divergence_reference])
def test_logits_give_what_the_definition_gives(function: Callable[..., Tensor], device: torch.device) -> None:
    student, teacher = (each.detach().view(1, 5, CLASSES).to(device) for each in make_models(tokens=5).logits())
    tokens = {name: each[None].to(device) for name, each in make_tokens(5).items()}
    for place, (kind, beta) in enumerate(KINDS):
        for reduction in ("mean", "sum", "none")[place % 3 :][:1]:
            student = student.detach().requires_grad_()
            found = function(student, teacher, kind=kind, beta=beta, reduction=reduction, **tokens, **EVERYTHING)
            true = student.detach().double().requires_grad_()
            losses = plain_divergence(true, teacher.double(), kind, beta, **EVERYTHING)
            expected = with_gradients(reduce(losses, reduction, **tokens), [true])
            assert_same(with_gradients(found, [student]), expected, (kind, beta, reduction))


def test_upstream_gradients_of_masked_tokens_may_be_nan() -> None:
    mask = make_tokens()["mask"]
    for trained in (("x",), ("x", "weight")):
        models = make_models(trained=trained)
        student, teacher = (each.detach() for each in models.logits())
        student.requires_grad_()
        for losses, leaves in (
            (models.run(mask=mask, reduction="none"), leaves_of(models)),
            (divergence(student, teacher, mask=mask, reduction="none"), [student]),
        ):
            ones = torch.ones(TOKENS)
            want = torch.autograd.grad(losses, leaves, ones, retain_graph=True)
            for retain_graph in (True, False):
                got = torch.autograd.grad(losses, leaves, ones.where(mask, torch.nan), retain_graph=retain_graph)
                assert_same(got, want, trained, 1e-6)


def test_backward_can_run_twice() -> None:
    for reduction in ("mean", "none"):
        models = make_models(trained=("x",))
        loss = models.run(reduction=reduction).sum()
        first, second = (torch.autograd.grad(loss, models.x, retain_graph=True)[0].clone() for _ in range(2))
        assert torch.equal(first, second)
        student, teacher = (each.detach() for each in models.logits())
        loss = divergence(student.requires_grad_(), teacher, reduction=reduction).sum()
        first, second = (torch.autograd.grad(loss, student, retain_graph=True)[0].clone() for _ in range(2))
        assert torch.equal(first, second)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", dict(KINDS))
def test_large_heads_on_the_gpu(kind: str) -> None:
    """8192 tokens of two heads of 4096 x 128256: as accurate as whole logits, in less than 3000 MiB."""
    torch.manual_seed(0)
    tokens, hidden, classes = 8192, 4096, 128256
    x, teacher_x = torch.randn(2, tokens, hidden, device="cuda", dtype=torch.bfloat16)
    weight, teacher_weight = 0.02 * torch.randn(2, classes, hidden, device="cuda", dtype=torch.bfloat16)
    x.requires_grad_()
    weight.requires_grad_()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    loss = linear_divergence(x, weight, teacher_x, teacher_weight, kind=kind, beta=0.3)
    found = torch.autograd.grad(loss, (x, weight))
    assert torch.cuda.max_memory_allocated() - before < 3000 * 2**20
    some = slice(100, 164)
    part = x.detach()[some].requires_grad_()
    losses = plain_divergence(
        part.float() @ weight.detach().float().T, teacher_x[some].float() @ teacher_weight.float().T, kind, 0.3
    )
    (expected,) = torch.autograd.grad(losses.sum() / tokens, part)
    # Where two probabilities are nearly equal, rounded logits change the sign in the total variation's gradient.
    bound = 0.05 if kind == "total_variation" else 0.02
    assert (found[0][some] - expected).norm() <= bound * expected.norm()
    alone = linear_divergence(x[some], weight, teacher_x[some], teacher_weight, kind=kind, beta=0.3, reduction="none")
    torch.testing.assert_close(alone.detach(), losses.detach(), rtol=0.02, atol=1e-3)


@pytest.mark.gpu
def test_logits_in_float32_on_the_gpu() -> None:
    test_logits_in_float32_make_divergences_of_close_models_accurate(torch.device("cuda"))
    models = make_models(classes=1003, teacher_classes=1003).to("cuda", torch.bfloat16)
    truth = models.to(torch.float64)
    found = with_gradients(models.run(kind="jsd", logits_dtype=torch.float32), leaves_of(models))
    expected = with_gradients(plain_divergence(*truth.logits(), "jsd").mean(), leaves_of(truth))
    assert_same(found, expected, "unaligned", 2e-2)
