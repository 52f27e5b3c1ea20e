"""The loss whose logits lie in the memory of the head's gradient."""

import itertools
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from liger_ops import linear_cross_entropy
from liger_ops.loss import gradient_memory
from liger_ops.loss.gradient_memory import block_rows, holds_logits, num_tokens_outside
from liger_ops.loss.linear_head import LinearHead
from liger_ops.loss.options import REDUCTIONS, TokenLossOptions
from liger_ops.loss.vocab_parallel import VocabShard
from tests.liger_ops.loss import test_linear_cross_entropy
from tests.liger_ops.loss.test_cross_entropy import OPTIONS, make_options
from tests.liger_ops.loss.test_linear_cross_entropy import MODULE, loss_and_gradients, make_batch

CLASSES = 75
INSIDE, OUTSIDE = 48, 80  # numbers of tokens: all logits fit into the gradient of 64 columns, or 64 of them do


@pytest.fixture
def device(device: torch.device, small_tiles: None, monkeypatch: pytest.MonkeyPatch) -> torch.device:
    """Where small losses are computed in the gradient's memory, in small blocks."""
    monkeypatch.setattr(LinearHead, "chunk_size", lambda self, chunk_bytes: 16)
    sizes = {
        "GOOD_CHUNK_TOKENS": 64,
        "_ROW_MULTIPLE": 16,
        "_BLOCK_BYTES": 2**11,
        "_MIN_LOGITS_BYTES": 0,
        "_MIN_HIDDEN_SIZE": 0,
    }
    for name, value in sizes.items():
        monkeypatch.setattr(gradient_memory, name, value)
    monkeypatch.setattr(gradient_memory, "_is_on_gpu", lambda like: True)
    return device


@pytest.fixture
def losses(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Grows by the number of tokens of each loss that is computed in the gradient's memory."""
    calls: list[int] = []

    def counted(hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        calls.append(len(hidden_states))
        return gradient_memory.linear_loss_in_gradient(hidden_states, *args, **kwargs)

    monkeypatch.setattr(MODULE, "linear_loss_in_gradient", counted)
    return calls


def make_head(
    num_tokens: int, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu", ignore_index: int = -100
) -> tuple[list[Tensor | None], Tensor]:
    """As ``make_batch``, with 64 hidden units and without a bias."""
    _, labels = make_batch(num_tokens, CLASSES, device=device, ignore_index=ignore_index)
    states, weight = (torch.randn(size, 64).to(device, dtype) for size in (num_tokens, CLASSES))
    return [states, weight * 0.25, None], labels


def assert_matches_plain(
    tensors: list[Tensor | None], labels: Tensor, needed: tuple[bool, bool, bool] = (True, True, False), **options: Any
) -> tuple[Tensor, ...]:
    upstream = torch.tensor(0.7)
    return test_linear_cross_entropy.assert_matches_plain(
        tensors, labels, upstream, rows=None, needed=needed, **options
    )


@pytest.mark.parametrize("num_tokens", [INSIDE, OUTSIDE], ids=["inside", "outside"])
@pytest.mark.parametrize(
    ("name", "dtype"),
    [*((name, torch.float32) for name in OPTIONS), *itertools.product(["plain", "everything"], [torch.bfloat16])],
    ids=str,
)
def test_loss_and_gradients_match_plain_pytorch(
    name: str, dtype: torch.dtype, num_tokens: int, device: torch.device, losses: list[int]
) -> None:
    options = make_options(name, num_tokens, CLASSES, device)
    tensors, labels = make_head(num_tokens, dtype, device, options.get("ignore_index", -100))
    assert_matches_plain(tensors, labels, **options)
    assert losses == [num_tokens]


@pytest.mark.parametrize("num_tokens", [INSIDE, OUTSIDE], ids=["inside", "outside"])
@pytest.mark.parametrize("num_kept", [0, 1, 15, 16, 17, 33, 47, 48, 64, 79, 80])
def test_any_number_of_tokens_may_be_ignored(
    num_kept: int, num_tokens: int, device: torch.device, losses: list[int]
) -> None:
    if num_kept > num_tokens:
        pytest.skip("not so many tokens")
    tensors, labels = make_head(num_tokens, device=device)
    labels = torch.randint(CLASSES, labels.shape, device=device)
    labels[torch.randperm(num_tokens)[num_kept:]] = -100
    actual = assert_matches_plain(tensors, labels, reduction="sum")
    ignored = labels == -100
    assert (actual[1][ignored] == 0).all()
    assert (actual[1][~ignored] != 0).any(dim=1).all()
    bounds = {num_kept, num_kept + 1, num_tokens - 1, num_tokens, num_tokens + 5}
    for bound in (each for each in bounds if each >= num_kept):
        assert_matches_plain(tensors, labels, reduction="sum", max_valid_tokens=bound)
        assert losses.pop() == num_tokens
    assert losses == [num_tokens]


@pytest.mark.parametrize("bound", [None, 0, 1, "all"])
@pytest.mark.parametrize("num_tokens", [INSIDE, OUTSIDE], ids=["inside", "outside"])
def test_states_of_ignored_tokens_may_be_nan(
    num_tokens: int, bound: int | str | None, device: torch.device, losses: list[int]
) -> None:
    (states, weight, _), labels = make_head(num_tokens, device=device)
    labels[1] = -100
    kept = labels != -100
    num_kept = int(kept.sum())
    assert num_kept % gradient_memory.TOKEN_MULTIPLE  # some ignored tokens are computed
    bounds = {None: None, "all": num_tokens}
    options = {"max_valid_tokens": bounds[bound] if bound in bounds else num_kept + bound}
    run = partial(loss_and_gradients, linear_cross_entropy, labels=labels, needed=(True, True, False), **options)
    expected = run(tensors=(states, weight, None))
    states = states.clone()
    states[~kept] = torch.nan
    actual = run(tensors=(states, weight, None))
    assert all(torch.equal(one, other) for one, other in zip(actual, expected, strict=True))
    assert not any(each.isnan().any() for each in actual)
    assert losses == [num_tokens] * 2


@pytest.mark.parametrize("num_tokens", [INSIDE, OUTSIDE], ids=["inside", "outside"])
def test_a_bound_that_leaves_tokens_out_gives_nan(num_tokens: int, device: torch.device, losses: list[int]) -> None:
    (states, weight, _), labels = make_head(num_tokens, device=device)
    labels.clamp_(min=0)
    leaves = [states.requires_grad_(), weight.requires_grad_()]
    assert linear_cross_entropy(*leaves, labels, max_valid_tokens=num_tokens - 16).isnan()
    assert losses == [num_tokens]
    assert_matches_plain([states, weight, None], labels, max_valid_tokens=num_tokens - 15)


@pytest.mark.parametrize("num_tokens", [INSIDE, OUTSIDE], ids=["inside", "outside"])
def test_frozen_states_and_stats(num_tokens: int, device: torch.device, losses: list[int]) -> None:
    tensors, labels = make_head(num_tokens, device=device)
    assert_matches_plain(tensors, labels, (False, True, False))
    assert losses == [num_tokens]
    weight = tensors[1].clone().requires_grad_()
    loss, stats = linear_cross_entropy(tensors[0], weight, labels, return_stats=True)
    expected_loss, expected = linear_cross_entropy(tensors[0], tensors[1], labels, return_stats=True)
    torch.testing.assert_close((loss, *stats), (expected_loss, *expected))
    assert losses == [num_tokens] * 2  # not without a gradient of the head


@pytest.mark.parametrize("layout", ["transposed_head", "strided_states", "expanded_states"])
def test_any_layout(layout: str, device: torch.device, losses: list[int]) -> None:
    (states, weight, _), labels = make_head(INSIDE, device=device)
    if layout == "transposed_head":
        weight = weight.t().contiguous().t()
    elif layout == "strided_states":
        states = torch.cat([states, states], dim=1)[:, :64]
    else:
        states = states[:1].expand(INSIDE, 64)
    assert_matches_plain([states, weight, None], labels)
    assert losses == [INSIDE]


def test_gradient_is_of_the_parameter_and_can_be_summed_over_steps(device: torch.device, losses: list[int]) -> None:
    (states, weight, _), labels = make_head(INSIDE, device=device)
    head = torch.nn.Parameter(weight.clone())
    for _ in range(2):
        linear_cross_entropy(states, head, labels).backward()
    once = torch.autograd.grad(linear_cross_entropy(states, head, labels), head)[0]
    torch.testing.assert_close(head.grad, 2 * once)
    assert once.is_contiguous()
    assert once.untyped_storage().nbytes() == weight.nbytes


@pytest.mark.parametrize(
    "case",
    ["bias", "adapter", "none", "chunk_bytes", "accumulate_dtype", "frozen_head", "half", "few", "many", "unaligned"],
)
def test_other_losses_are_computed_in_chunks(case: str, device: torch.device, losses: list[int]) -> None:
    num_tokens = {"few": 16, "many": 208, "unaligned": 47}.get(case, INSIDE)
    tensors, labels = make_head(num_tokens, torch.float16 if case == "half" else torch.bfloat16, device)
    states, weight, _ = tensors
    weight = weight.requires_grad_(case != "frozen_head")
    states.requires_grad_()
    options: dict[str, Any] = {
        "bias": {"linear_bias": weight[:, 0].detach()},
        "adapter": {"adapter": (states[:, :3].detach(), weight[:, :3].detach())},
        "none": {"reduction": "none"},
        "chunk_bytes": {"chunk_bytes": 2**14},
        "accumulate_dtype": {"accumulate_dtype": torch.float32},
    }.get(case, {})
    linear_cross_entropy(states, weight, labels, **options).sum().backward()
    assert losses == []


def test_loss_of_a_shard_is_computed_in_chunks(device: torch.device, losses: list[int], tmp_path: Path) -> None:
    backend = {"cuda": "nccl"}.get(device.type, "gloo")
    dist.init_process_group(backend, init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    assert dist.group.WORLD is not None
    shard = VocabShard(dist.group.WORLD, 0, CLASSES)
    tensors, labels = make_head(INSIDE, device=device)
    assert_matches_plain(tensors, labels, vocab_shard=shard)
    assert losses == []


@pytest.mark.parametrize("num_chunks", [3, 48])
def test_gradient_is_rounded_once(num_chunks: int, device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LinearHead, "chunk_size", lambda self, chunk_bytes: INSIDE // num_chunks)
    arguments: list[Any] = []

    def logged(*values: Any) -> list[Tensor]:
        arguments.append(MODULE.LossArguments(*values))
        return compute(*values)

    compute = MODULE._linear_cross_entropy
    monkeypatch.setattr(MODULE, "_linear_cross_entropy", logged)
    (states, weight, _), labels = make_head(INSIDE, torch.bfloat16, device)
    linear_cross_entropy(states, weight.requires_grad_(), labels)
    assert [(each.logits_in_gradient, each.accumulate_dtype) for each in arguments] == [(True, torch.bfloat16)]


@pytest.mark.parametrize("num_tokens", [INSIDE, OUTSIDE], ids=["inside", "outside"])
def test_op_passes_opcheck(num_tokens: int, device: torch.device) -> None:
    (states, weight, _), labels = make_head(num_tokens, torch.bfloat16, device)
    arguments = (
        states, weight, None, None, None, labels, None, None, None, 16, True, torch.bfloat16, None,
        [True, True, False, False, False], "mean", True, *TokenLossOptions().as_scalars(),
    )  # fmt: skip
    op = torch.ops.liger_ops.linear_cross_entropy.default
    torch.library.opcheck(op, arguments, test_utils=("test_schema", "test_faketensor"))


@pytest.mark.parametrize("num_tokens", [INSIDE, OUTSIDE], ids=["inside", "outside"])
def test_compiles_to_one_graph_with_the_same_result(num_tokens: int, device: torch.device, losses: list[int]) -> None:
    tensors, labels = make_head(num_tokens, device=device)
    torch._dynamo.reset()
    results = []
    for function in (linear_cross_entropy, torch.compile(linear_cross_entropy, fullgraph=True, backend="aot_eager")):
        leaves = [tensor.clone().requires_grad_() for tensor in tensors[:2]]
        loss = function(*leaves, labels)
        results.append((loss, *torch.autograd.grad(loss, leaves)))
    torch.testing.assert_close(*results)
    assert losses == [num_tokens] * 2


@pytest.mark.parametrize(
    ("num_tokens", "hidden_size", "vocab_size", "expected"),
    [
        pytest.param(4096, 4096, 128256, True, id="all_inside"),
        pytest.param(4095, 4096, 128256, False, id="no_multiple_of_16"),
        pytest.param(5888, 4096, 128256, True, id="less_than_a_chunk_outside"),
        pytest.param(6144, 4096, 128256, False, id="a_chunk_outside"),
        pytest.param(2048, 4097, 128256, False, id="unaligned_head"),
        pytest.param(4096, 2560, 262208, True, id="narrower_head"),
        pytest.param(4096, 2048, 128256, False, id="more_than_a_chunk_with_the_block"),
        pytest.param(2048, 1536, 128256, False, id="narrow_head"),
        pytest.param(2048, 4096, 32000, False, id="few_logits"),
        pytest.param(2048, 4096, 32768, True, id="128MiB"),
    ],
)
def test_where_logits_lie(num_tokens: int, hidden_size: int, vocab_size: int, expected: bool) -> None:
    weight = torch.empty(vocab_size, hidden_size, dtype=torch.bfloat16, device="meta")
    assert holds_logits(num_tokens, weight, torch.bfloat16) == expected
    assert not holds_logits(num_tokens, torch.empty(1, dtype=torch.bfloat16).expand(weight.shape), torch.bfloat16)


@pytest.mark.parametrize(
    ("num_tokens", "hidden_size", "outside"),
    [(2048, 4096, 0), (4096, 4096, 0), (4112, 4096, 256), (6144, 4096, 2048), (2064, 2048, 256)],
)
def test_tokens_outside_are_whole_tiles(num_tokens: int, hidden_size: int, outside: int) -> None:
    assert num_tokens_outside(num_tokens, hidden_size) == outside


@pytest.mark.parametrize(
    ("num_tokens", "hidden_size", "vocab_size", "rows"),
    [
        pytest.param(4096, 4096, 128256, 8192, id="64MiB"),
        pytest.param(6144, 4096, 128256, 5376, id="whole_tiles"),
        pytest.param(4096, 2048, 128256, 4096, id="32MiB"),
        pytest.param(2048, 4096, 1000, 1000, id="all"),
        pytest.param(0, 8, 5, 5, id="no_tokens"),
    ],
)
def test_blocks_of_classes(num_tokens: int, hidden_size: int, vocab_size: int, rows: int) -> None:
    assert block_rows(num_tokens, vocab_size, hidden_size, 2) == rows


# What only a GPU can show.


def make_real_head(num_tokens: int, hidden_size: int, vocab_size: int) -> tuple[list[Tensor | None], Tensor]:
    states = torch.randn(num_tokens, hidden_size, device="cuda", dtype=torch.bfloat16)
    weight = torch.randn(vocab_size, hidden_size, device="cuda").mul(hidden_size**-0.5).bfloat16()
    labels = torch.randint(vocab_size, (num_tokens,), device="cuda")
    labels[3::7] = -100
    return [states, weight, None], labels


@pytest.mark.gpu
@pytest.mark.parametrize("vocab_size", [32768, 50257, 65536])
@pytest.mark.parametrize(("num_tokens", "hidden_size"), [(2048, 2048), (2080, 2304), (2560, 2048)])
@pytest.mark.parametrize("name", ["plain", "everything"])
def test_real_heads_match_plain_pytorch(name: str, num_tokens: int, hidden_size: int, vocab_size: int) -> None:
    options = make_options(name, num_tokens, vocab_size, torch.device("cuda"))
    tensors, labels = make_real_head(num_tokens, hidden_size, vocab_size)
    labels[labels == -100] = options.get("ignore_index", -100)
    assert tensors[1] is not None
    assert holds_logits(num_tokens, tensors[1], torch.bfloat16)
    assert_matches_plain(tensors, labels, **options)


@pytest.mark.gpu
@pytest.mark.parametrize("all_count", [True, False])
@pytest.mark.parametrize("reduction", [each for each in REDUCTIONS if each != "none"])
def test_memory_beside_the_gradients_is_a_block(reduction: str, all_count: bool) -> None:
    (states, weight, _), labels = make_real_head(8192, 8192, 32000)
    gathered = 0 if all_count else states.nbytes
    if all_count:
        labels.clamp_(min=0)
    leaves = [states.requires_grad_(), weight.requires_grad_()]
    linear_cross_entropy(*leaves, labels, reduction=reduction)  # compiles
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    linear_cross_entropy(*leaves, labels, reduction=reduction).backward()
    peak = torch.cuda.max_memory_allocated() - before
    assert peak <= sum(leaf.nbytes for leaf in leaves) + gathered + 70 * 2**20


@pytest.mark.gpu
@pytest.mark.parametrize("max_valid_tokens", [None, 1900], ids=["", "max_valid_tokens"])
def test_replay_of_a_cuda_graph_computes_new_data(max_valid_tokens: int | None) -> None:
    (states, weight, _), labels = make_real_head(2048, 2048, 65536)
    leaves = [states.requires_grad_(), weight.requires_grad_()]

    def fill(num_ignored: int) -> None:
        with torch.no_grad():
            states.normal_()
        labels.random_(65536)
        labels[torch.randperm(2048, device="cuda")[:num_ignored]] = -100

    def step(bound: int | None) -> tuple[Tensor, ...]:
        loss = linear_cross_entropy(*leaves, labels, max_valid_tokens=bound)
        return loss, *torch.autograd.grad(loss, leaves)

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step(2048)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = step(max_valid_tokens)
    for num_ignored in (148, 1000, 200):
        fill(num_ignored)
        graph.replay()
        # Counted exactly, and in another order of the tokens than the graph's.
        torch.testing.assert_close(results, step(None))
        assert not results[0].isnan()


@pytest.mark.gpu
def test_host_never_waits_for_the_device_that_need_not_count() -> None:
    (states, weight, _), labels = make_real_head(2048, 2048, 65536)
    leaves = [states.requires_grad_(), weight.requires_grad_()]
    torch.cuda.set_sync_debug_mode("error")
    try:
        loss = linear_cross_entropy(*leaves, labels, max_valid_tokens=1900)
        loss.backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert not loss.isnan()
