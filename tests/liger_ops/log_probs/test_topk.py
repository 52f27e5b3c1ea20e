"""linear_topk_log_probs against float64 autograd on whole logits."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from liger_ops import linear_topk_log_probs
from tests.liger_ops.accuracy import few
from tests.liger_ops.loss.cases import no_waits

TOKENS, CLASSES, HIDDEN, RANK, GIVEN = 9, 37, 7, 2, 5
CHUNK_BYTES = 4 * CLASSES * 4  # four tokens
NAMES = ("x", "weight", "bias", "adapter_x", "adapter_weight")
OPTIONS: list[dict[str, Any]] = [{}, {"temperature": 1.3}, {"temperature": 0.7, "softcap": 3.0, "logit_scale": 0.8}]

Head = dict[str, Tensor]


def make_head(trained: tuple[str, ...] = NAMES, device: torch.device | str = "cpu", dtype: Any = torch.float32) -> Head:
    generator = torch.Generator().manual_seed(3)
    shapes = ((TOKENS, HIDDEN), (CLASSES, HIDDEN), (CLASSES,), (TOKENS, RANK), (CLASSES, RANK))
    tensors = [torch.randn(shape, generator=generator).to(device, dtype) for shape in shapes]
    return {name: each.requires_grad_(name in trained) for name, each in zip(NAMES, tensors, strict=True)}


def make_ids(device: torch.device | str = "cpu") -> Tensor:
    """With a class twice, some padding, a token with nothing but padding, and the first and the last class."""
    ids = torch.randint(CLASSES, (TOKENS, GIVEN), generator=torch.Generator().manual_seed(5))
    ids[:, 1] = ids[:, 0]
    ids[2, 3:], ids[4], ids[5, 0], ids[6, :2] = -1, -1, -7, torch.tensor([0, CLASSES - 1])
    return ids.to(device)


def run(head: Head, ids: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
    return linear_topk_log_probs(
        head["x"], head["weight"], ids, linear_bias=head["bias"], with_lse=True,
        adapter=(head["adapter_x"], head["adapter_weight"]), **{"chunk_bytes": CHUNK_BYTES, **options},
    )  # type: ignore[return-value]  # fmt: skip


def plain(
    head: Head,
    ids: Tensor,
    *,
    temperature: float = 1.0,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    renormalize: bool = False,
    mask: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    logits = F.linear(head["x"], head["weight"], head["bias"]) + head["adapter_x"] @ head["adapter_weight"].T
    z = logits * logit_scale
    z = (z if softcap is None else softcap * torch.tanh(z / softcap)) / temperature
    given = z.gather(1, ids.clamp(min=0))
    allowed = given.masked_fill(ids < 0, -1e5) if renormalize else z  # not -inf, whose gradient is NaN
    lse = allowed.logsumexp(1)
    log_probs = (given - lse[:, None]).masked_fill(ids < 0, -torch.inf)
    if renormalize:
        lse = lse.masked_fill((ids < 0).all(1), -torch.inf)
    if mask is not None:
        log_probs, lse = log_probs.where(mask[:, None], 0.0), lse.where(mask, 0.0)
    return log_probs, lse


def with_gradients(results: tuple[Tensor, Tensor], head: Head, hidden: tuple[Tensor, Tensor], fill: float) -> Any:
    """Results and gradients, for an upstream gradient of ``fill`` where the results are hidden."""
    generator = torch.Generator().manual_seed(6)
    upstream = [torch.randn(each.shape, generator=generator).to(each) for each in results]
    upstream = [each.masked_fill(places, fill) for each, places in zip(upstream, hidden, strict=True)]
    leaves = [each for each in head.values() if each.requires_grad]
    return [*(each.detach() for each in results), *torch.autograd.grad(results, leaves, upstream)]


@given(
    trained=st.sampled_from(
        [
            NAMES,
            NAMES,
            ("x",),
            ("x",),
            ("x", "adapter_x"),
            ("adapter_x",),
            ("weight",),
            ("adapter_weight", "x"),
            ("bias",),
        ]
    ),
    renormalize=st.booleans(),
    options=st.sampled_from(OPTIONS),
    masked=st.sampled_from([None, 0, 1, TOKENS]),  # so many neighbors of three; all
    chunk_bytes=st.sampled_from([CHUNK_BYTES, CHUNK_BYTES, 1, None]),
    saved=st.sampled_from([0, CHUNK_BYTES, 2**30]),
)
@few(40)
def test_log_probs_and_gradients_are_those_of_whole_logits(
    trained: tuple[str, ...],
    renormalize: bool,
    options: dict[str, Any],
    masked: int | None,
    chunk_bytes: int | None,
    saved: int,
    device: torch.device,
) -> None:
    head, ids = make_head(trained, device), make_ids(device)
    mask = None if masked is None else torch.arange(TOKENS, device=device) % (3 if masked < 3 else 1) >= masked
    kept = torch.ones(TOKENS, dtype=torch.bool, device=device) if mask is None else mask
    has_lse = kept & (ids >= 0).any(1) if renormalize else kept
    hidden = (ids < 0) | ~kept[:, None], ~has_lse
    found = run(
        head, ids, renormalize=renormalize, mask=mask, chunk_bytes=chunk_bytes, saved_logits_bytes=saved, **options
    )
    truth = {name: each.detach().double().requires_grad_(each.requires_grad) for name, each in head.items()}
    expected = plain(truth, ids, renormalize=renormalize, mask=mask, **options)
    torch.testing.assert_close(
        with_gradients(found, head, hidden, torch.nan), with_gradients(expected, truth, hidden, 0.0), rtol=2e-5,
        atol=1e-4, check_dtype=False,
    )  # fmt: skip


@pytest.mark.gpu
@pytest.mark.parametrize("trained", [("x",), NAMES])
def test_without_a_mask_the_host_never_waits(trained: tuple[str, ...]) -> None:
    head, ids = make_head(trained, "cuda"), make_ids("cuda").clamp(min=0)
    with no_waits():
        run(head, ids)[0].sum().backward()


def test_gradients_of_confident_tokens_do_not_cancel_in_half_precision(device: torch.device) -> None:
    """A frozen head keeps the mean of its rows by probability: with the given classes in it, rounding would remain."""
    generator = torch.Generator().manual_seed(0)
    x, weight = (torch.randint(-4, 5, (rows, HIDDEN), generator=generator).double() for rows in (TOKENS, CLASSES))
    logits = x @ weight.T  # integers, which bfloat16 holds
    ids = logits.argmax(1, keepdim=True).to(device)
    probabilities = logits.softmax(1)
    expected = weight[ids[:, 0].cpu()] - probabilities @ weight
    assert probabilities.amax(1).max() > 0.999
    half = x.to(device, torch.bfloat16).requires_grad_()
    log_probs = linear_topk_log_probs(half, weight.to(device, torch.bfloat16), ids)
    (found,) = torch.autograd.grad(log_probs.sum(), half)
    assert ((found.double().cpu() - expected).norm(dim=1) <= 0.2 * expected.norm(dim=1)).all()


@pytest.mark.gpu
def test_ids_out_of_range_are_nan_on_the_gpu() -> None:
    head, ids = make_head((), "cuda"), make_ids("cuda")
    ids[3, 2] = CLASSES
    for renormalize in (False, True):
        log_probs = run(head, ids, renormalize=renormalize)[0]
        assert log_probs[3, 2].isnan()
        assert log_probs.isnan().sum() == 1


@pytest.mark.gpu
@pytest.mark.parametrize("trained", [False, True])
@pytest.mark.parametrize("renormalize", [False, True])
def test_large_heads_on_the_gpu(renormalize: bool, trained: bool) -> None:
    """8192 tokens, 64 of 128256 classes each: neither whole logits nor whole gathered rows of the head."""
    torch.manual_seed(0)
    tokens, hidden, classes, given = 8192, 4096, 128256, 64
    x = torch.randn(tokens, hidden, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    weight = (0.02 * torch.randn(classes, hidden, device="cuda", dtype=torch.bfloat16)).requires_grad_(trained)
    ids = torch.randint(classes, (tokens, given), device="cuda")
    upstream = torch.randn(tokens, given, device="cuda")
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    log_probs = linear_topk_log_probs(x, weight, ids, renormalize=renormalize)
    gradients = torch.autograd.grad(log_probs, (x, weight) if trained else (x,), upstream)
    assert torch.cuda.max_memory_allocated() - before < (4500 if trained else 1200) * 2**20
    some = slice(100, 164)
    part = x.detach()[some].requires_grad_()
    z = part.float() @ weight.detach().float().T
    given = ids[some]
    expected = z.gather(1, given).log_softmax(-1) if renormalize else z.log_softmax(-1).gather(1, given)
    (gradient,) = torch.autograd.grad(expected, part, upstream[some])
    torch.testing.assert_close(log_probs[some], expected, rtol=0.01, atol=0.05)
    assert (gradients[0][some] - gradient).norm() <= 0.02 * gradient.norm()
