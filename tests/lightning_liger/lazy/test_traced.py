"""Compiled code with a patched head: the values and gradients of stock code, and no logits in its graphs."""

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from random import Random
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lightning_liger import LazyLogits, LigerLMMixin, apply_liger_kernels, lazy_logits, materialize, token_scores
from lightning_liger.lazy.traced import TracedLogits
from tests.lightning_liger.compiled_models import Graphs
from tests.lightning_liger.lazy.programs import Doubled
from tests.lightning_liger.tiny import VOCAB_SIZE, tiny_batch, tiny_model

BATCH, LENGTH, HIDDEN, VOCAB = 3, 5, 8, 37


def compiled(function: Any, **options: Any) -> tuple[Any, Graphs]:
    torch._dynamo.reset()
    graphs = Graphs(options.pop("vocab_size", VOCAB))
    return torch.compile(function, backend=graphs, **{"fullgraph": True, **options}), graphs


class Head(nn.Module):
    """A model that applies a program to its logits."""

    def __init__(self, program: Callable[..., Any], bias: bool = False) -> None:
        super().__init__()
        self.lm_head, self.program = nn.Linear(HIDDEN, VOCAB, bias=bias), program
        self.embed = nn.Embedding(VOCAB, HIDDEN)

    def get_output_embeddings(self) -> nn.Module:
        return self.lm_head

    def forward(self, ids: Tensor, targets: Tensor) -> Any:
        return self.program(self.lm_head(self.embed(ids)), targets)


def pair(program: Callable[..., Any], bias: bool = False) -> tuple[Head, Head]:
    stock = Head(program, bias)
    patched = copy.deepcopy(stock)
    apply_liger_kernels(patched)
    return stock, patched


def batch(length: int = LENGTH) -> tuple[Tensor, Tensor]:
    targets = torch.randint(VOCAB, (BATCH, length))
    targets[0, :2] = -100
    return torch.randint(VOCAB, (BATCH, length)), targets


ELEMENTWISE: list[Callable[[Tensor], Tensor]] = [
    lambda x: x * 0.5,
    lambda x: 3 * x,
    lambda x: x / 1.7,
    lambda x: x.float(),
    lambda x: x.to(torch.float64),
    lambda x: x.type(torch.float32).contiguous(),
    lambda x: x.clone(),
    lambda x: x.to(x.device).view(x.shape),
    lambda x: x if x.requires_grad == torch.is_grad_enabled() else x * 0,
]
SOFTCAPS: list[Callable[[Tensor], Tensor]] = [
    lambda x: torch.tanh(x / 4) * 4,
    lambda x: (x / 2).tanh().mul(2),
    lambda x: F.tanh(x / 3) * 3,
]
CRITERION = nn.CrossEntropyLoss()
LOSSES: list[Callable[[Tensor, Tensor], Tensor]] = [
    lambda x, y: F.cross_entropy(x.view(-1, x.shape[-1]), y.view(-1)),
    lambda x, y: F.cross_entropy(x.transpose(1, 2), y, reduction="sum", label_smoothing=0.1),
    lambda x, y: CRITERION(x[..., :-1, :].contiguous().flatten(0, 1), y[..., 1:].reshape(-1)),
    lambda x, y: F.cross_entropy(input=x[:, 1:].reshape(-1, x.size(-1)), target=y[:, 1:].flatten()),
    lambda x, y: F.nll_loss(F.log_softmax(x, dim=-1).flatten(0, -2), y.flatten(), reduction="none").sum() / len(x),
    lambda x, y: F.cross_entropy(x[1], y[1], weight=torch.arange(1.0, VOCAB + 1, dtype=x.dtype)),
    lambda x, y: F.cross_entropy(x.permute(0, 2, 1).unsqueeze(-1), y.unsqueeze(-1)),
    lambda x, y: F.cross_entropy(x[..., :30].flatten(0, 1), y.clamp(max=29).flatten()),
]


@pytest.mark.parametrize("seed", range(8))
def test_recorded_programs_have_stock_values_and_no_logits(seed: int) -> None:
    random = Random(seed)
    steps, loss_of = random.choices(ELEMENTWISE, k=random.randrange(4)), LOSSES[seed % len(LOSSES)]
    if random.random() < 0.5:
        steps.insert(random.randint(0, len(steps)), random.choice(SOFTCAPS))
    bias, dynamic, autocast = random.random() < 0.5, seed % 4 == 1, random.choice([None, None, torch.bfloat16])

    def program(logits: Tensor, targets: Tensor) -> Tensor:
        for step in steps:
            logits = step(logits)
        return loss_of(logits, targets)

    stock, patched = pair(program, bias)
    is_around = random.random() < 0.5
    fused, graphs = compiled((lambda *inputs: patched(*inputs)) if is_around else patched, dynamic=dynamic)
    inputs = batch()
    with torch.autocast("cpu", autocast, enabled=autocast is not None):
        want, got = stock(*inputs), fused(*inputs)
    rtol = 1e-5 if autocast is None else 2e-2
    torch.testing.assert_close(got, want, rtol=rtol, atol=rtol)
    want.backward()
    got.backward()
    for expected, found in zip(stock.parameters(), patched.parameters(), strict=True):
        torch.testing.assert_close(found.grad, expected.grad, rtol=rtol, atol=rtol / 10)
    assert 0 < graphs.largest <= VOCAB * HIDDEN


@torch.library.custom_op("lightning_liger_tests::double", mutates_args=())
def double(x: Tensor) -> Tensor:
    """Of the name of a method that is recorded, and another meaning."""
    return x * 2


double.register_fake(torch.empty_like)
double.register_autograd(lambda ctx, grad: grad * 2)


NEED_VALUES: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "reads": lambda x, y: (x.softmax(-1).square().sum(), x.argmax(-1)),
    "added": lambda x, y: F.cross_entropy((torch.ones_like(x) + x).flatten(0, 1), y.flatten()),
    "concatenated": lambda x, y: F.cross_entropy(torch.cat([x, x], dim=1).flatten(0, 1), y.repeat(1, 2).flatten()),
    "columns": lambda x, y: F.nll_loss(x.log_softmax(-1)[..., :30].flatten(0, 1), y.clamp(max=29).flatten()),
    "columns and rows": lambda x, y: x.view(-1).square().sum() + x.transpose(1, 2).reshape(BATCH, -1).sum(),
    "written": lambda x, y: (x.mul_(2), x[..., 3].sum(), F.cross_entropy(x.flatten(0, 1), y.flatten()))[2],
    "masked": lambda x, y: (x.__setitem__((..., slice(0, 4)), -1e4), F.cross_entropy(x[1], y[1].clamp(min=4)))[1],
    "functions of methods": lambda x, y: (F.sigmoid(x) + F.hardswish(x) + F.tanh(x.tanh())).square().sum(),
    "custom op": lambda x, y: torch.ops.lightning_liger_tests.double(x).sum(),
    "function": lambda x, y: Doubled.apply(x).square().sum(),
    "checkpoint": lambda x, y: checkpoint(lambda z: z.softmax(-1)[..., 3].sum(), x * 2, use_reentrant=False),
    "multiplied by a tensor": lambda x, y: F.cross_entropy((x * x[..., :1].detach()).flatten(0, 1), y.flatten()),
}


NEED_VALUES_INSIDE: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "in a tuple": lambda x, y: torch.cat((x, x)).softmax(-1)[..., 2].sum(),
    "criterion": lambda x, y: nn.CrossEntropyLoss()(x.flatten(0, 1), y.flatten()),
    "vmap": lambda x, y: torch.vmap(lambda row: row.square().sum())(x).sum(),
    "a view written": lambda x, y: (x[0].mul_(2), F.cross_entropy(x.flatten(0, 1), y.flatten()))[1],
    "a view kept": lambda x, y: ((view := x[0]), x.mul_(2), F.cross_entropy(view, y[0].clamp(min=0)))[2],
}


@pytest.mark.filterwarnings("ignore:.*materializes the logits")
@pytest.mark.parametrize(("place", "name"), enumerate([*NEED_VALUES, *NEED_VALUES_INSIDE]))
def test_other_programs_have_stock_values(place: int, name: str) -> None:
    is_around = name in NEED_VALUES_INSIDE or place % 2 == 1  # the compiler passes logits by that leave its graph
    stock, patched = pair((NEED_VALUES | NEED_VALUES_INSIDE)[name])
    inputs = batch()
    want = stock(*inputs)
    got = compiled((lambda *inputs: patched(*inputs)) if is_around else patched)[0](*inputs)
    torch.testing.assert_close(got, want)
    for loss in (want, got):
        (loss[0] if isinstance(loss, tuple) else loss).backward()
    for expected, found in zip(stock.parameters(), patched.parameters(), strict=True):
        torch.testing.assert_close(found.grad, expected.grad)


def test_logits_that_need_memory_are_named_once() -> None:
    _, patched = pair(lambda x, y: x.softmax(-1).sum())
    with pytest.warns(UserWarning, match=rf"softmax on an LM head's output .*\.\.\., {VOCAB}\] torch.float32"):
        compiled(patched)[0](*batch())


def test_writes_to_views_are_refused() -> None:
    _, patched = pair(lambda x, y: x.view(-1, VOCAB).mul_(2).sum() + x.sum())
    with pytest.raises(Exception, match=r"mul_ writes, in compiled code, .* write to logits.clone\(\)"):
        compiled(patched)[0](*batch())


# Head and loss in different graphs


def mean_loss(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def broken(*results: Any) -> Any:
    """The last of them, after a graph break."""
    torch._dynamo.graph_break()
    return results[-1]


@torch.compiler.disable
def outside(function: Callable[..., Any], *inputs: Any) -> Any:
    return function(*inputs)


ACROSS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "as they are": lambda x, y: mean_loss(broken(x), y),
    "scaled": lambda x, y: mean_loss(broken(x * 2).float() / 3, y),
    "views": lambda x, y: mean_loss(broken(x[:, :-1]), y[:, 1:]),
    "two losses": lambda x, y: broken(mean_loss(x, y)) + mean_loss(x / 2, y),
    "read": lambda x, y: (outside(lambda z: z.argmax(-1), x), mean_loss(x, y))[1],
    "recorded": lambda x, y: mean_loss(outside(lambda z: z * 2, x), y),
    "written": lambda x, y: (outside(lambda z: z.mul_(2), x), mean_loss(x, y))[1],
}
ACROSS_WITH_VALUES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "values": lambda x, y: broken(x).softmax(-1).square().sum(),
    "function": lambda x, y: Doubled.apply(broken(x)).softmax(-1).square().sum(),
    "written after": lambda x, y: (broken(x).mul_(2), mean_loss(x, y))[1],
    "written before": lambda x, y: mean_loss(broken(x.mul_(2), x), y),
    "masked": lambda x, y: (outside(lambda z: z.__setitem__((..., 0), -1.0), x), mean_loss(x, y))[1],
    "view written": lambda x, y: (outside(lambda z: z[0].mul_(2), x), mean_loss(x, y))[1],
    "earlier view written": lambda x, y: (outside(lambda z: z.mul_(2), x.transpose(0, 1)[1:]), mean_loss(x, y))[1],
    "earlier view of written": lambda x, y: (z := x.detach(), outside(lambda x: x.mul_(2), x), z.sum() * x.sum())[2],
}


@pytest.mark.filterwarnings("ignore:.*materializes the logits")
@pytest.mark.parametrize(("place", "name"), list(enumerate([*ACROSS, *ACROSS_WITH_VALUES])))
def test_graph_breaks_change_nothing(place: int, name: str) -> None:
    program = (ACROSS | ACROSS_WITH_VALUES)[name]
    is_around = place % 2 == 1
    lengths = (LENGTH, LENGTH, LENGTH + 2) if place < 2 else (LENGTH, LENGTH)  # both places compile again alike
    results = []
    for model in pair((lambda x, y: x) if is_around else program, bias=place % 3 == 0):
        function: Any = (lambda *inputs, model=model: program(model(*inputs), inputs[1])) if is_around else model
        if results:
            function, graphs = compiled(function, fullgraph=False)
        optimizer, losses = torch.optim.SGD(model.parameters(), 0.1), []
        torch.manual_seed(place)
        for number, length in enumerate(lengths):
            if results and number == 2:
                assert 2 <= graphs.num_graphs <= 3
            losses.append(function(*batch(length)))
            losses[-1].backward()
            optimizer.step()
            optimizer.zero_grad()
        results.append((losses, list(model.parameters())))
    torch.testing.assert_close(results[1], results[0], rtol=1e-5, atol=1e-6)
    assert graphs.largest <= VOCAB * HIDDEN or is_around or name in ACROSS_WITH_VALUES


def test_logits_that_a_function_takes_across_a_graph_break_are_named() -> None:
    _, patched = pair(lambda x, y: x)
    with pytest.warns(UserWarning, match="a graph break on an LM head's output materializes the logits"):
        compiled(lambda *inputs: ACROSS["as they are"](patched(*inputs), inputs[1]), fullgraph=False)[0](*batch())


@pytest.mark.parametrize("is_around", [False, True], ids=["model", "function"])
def test_logits_of_a_graph_are_those_of_its_time_in_another(is_around: bool) -> None:
    stock, patched = pair(lambda x, y: x)
    inputs = batch()
    logits = compiled((lambda *i: patched(*i)) if is_around else patched)[0](*inputs)
    loss_of = torch.compile(mean_loss, backend="aot_eager")
    want = mean_loss(stock(*inputs), inputs[1])
    torch.testing.assert_close(loss_of(logits, inputs[1]), want)
    want.backward()
    loss_of(logits, inputs[1]).backward()
    torch.testing.assert_close([p.grad for p in patched.parameters()], [p.grad for p in stock.parameters()])
    torch.optim.SGD(patched.parameters(), 0.1).step()
    if is_around:
        torch.testing.assert_close(loss_of(logits, inputs[1]), want)
    else:
        with pytest.raises(RuntimeError, match="an optimizer has changed its parameters since the head was called"):
            loss_of(logits, inputs[1])


@pytest.mark.parametrize("is_grad_first", [False, True])
def test_gradients_are_those_of_where_the_head_is_called(is_grad_first: bool) -> None:
    def program(model: nn.Module, ids: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        with torch.set_grad_enabled(is_grad_first):
            logits = model(ids, targets)
        with torch.set_grad_enabled(not is_grad_first):
            return mean_loss(logits, targets), logits

    stock, patched = pair(lambda x, y: x)
    inputs = batch()
    with lazy_logits():
        loss, logits = compiled(lambda *inputs: program(patched, *inputs))[0](*inputs)
    torch.testing.assert_close(loss, program(stock, *inputs)[0])
    assert (loss.requires_grad, logits.requires_grad) == (False, is_grad_first)


# Outside of compiled code


def returned(is_around: bool = False) -> tuple[Head, Head, Any, tuple[Tensor, Tensor]]:
    stock, patched = pair(lambda x, y: (F.cross_entropy(x.flatten(0, 1), y.flatten()), x / 2))
    return stock, patched, compiled((lambda *i: patched(*i)) if is_around else patched)[0], batch()


@pytest.mark.parametrize("is_around", [False, True], ids=["model", "function"])
def test_returned_logits_train_again(is_around: bool) -> None:
    stock, patched, fused, inputs = returned(is_around)
    (want, logits), (got, found) = stock(*inputs), fused(*inputs)
    assert isinstance(found, TracedLogits)
    assert isinstance(found * 1.0, LazyLogits) != is_around
    with torch.no_grad():  # the first touch
        assert torch.equal(found.argmax(-1), logits.argmax(-1))
    assert (found.shape, found.stride(), found.requires_grad) == (logits.shape, logits.stride(), True)
    assert torch.equal(copy.deepcopy(found.detach()), logits.detach())
    for loss, x in ((want, logits), (got, found)):
        (loss + F.cross_entropy(x.transpose(1, 2), inputs[1])).backward()
    for expected, parameter in zip(stock.parameters(), patched.parameters(), strict=True):
        torch.testing.assert_close(parameter.grad, expected.grad)
    torch.testing.assert_close(token_scores(found, inputs[1]).log_probs, token_scores(logits, inputs[1]).log_probs)
    assert torch.equal(materialize(found * 1.0).detach(), logits.detach())


def test_logits_are_refused_after_a_step_that_changed_the_head() -> None:
    _, patched, fused, inputs = returned()
    other, head = (torch.optim.SGD(module.parameters(), 0.1) for module in (nn.Linear(2, 2), patched))
    loss, kept = fused(*inputs)
    loss.backward()
    other.step()
    kept.sum()
    head.step()
    with pytest.raises(RuntimeError, match="an optimizer has changed its parameters since the head was called"):
        kept.sum()
    with torch._dynamo.config.patch(error_on_recompile=True):
        for _ in range(3):
            fused(*inputs)[0].backward()
            head.step()


@torch.no_grad()
def test_without_gradients_logits_are_lazy_where_a_loss_is_wanted() -> None:
    stock, _, fused, inputs = returned()
    assert type(fused(*inputs)[1]) is Tensor
    with lazy_logits():
        loss, logits = fused(*inputs)
    assert isinstance(logits, TracedLogits)
    torch.testing.assert_close((loss, logits + 0), stock(*inputs))
    assert not logits.requires_grad


# Models and modules


class Step(LigerLMMixin, nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.inner = model

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        return self.lm_loss(self.inner(input_ids=input_ids).logits, labels)


@contextmanager
def patched_after(model: nn.Module, is_after: bool) -> Iterator[None]:
    if not is_after:
        apply_liger_kernels(model)
    yield
    if is_after:
        apply_liger_kernels(model)


@pytest.mark.parametrize(("model_type", "is_after"), [("gemma2", True), ("qwen3_moe", False)])
def test_models_compile_to_one_graph_without_logits(model_type: str, is_after: bool) -> None:
    stock = tiny_model(model_type, num_hidden_layers=1)
    patched = copy.deepcopy(stock)
    inputs = tiny_batch(batch_size=4, seq_len=32)
    with patched_after(patched, is_after):
        fused, graphs = compiled(patched, vocab_size=VOCAB_SIZE, dynamic=is_after)
    want, got = stock(**inputs).loss, fused(**inputs).loss
    torch.testing.assert_close(got, want, rtol=1e-5, atol=0)
    want.backward()
    got.backward()
    for (name, expected), found in zip(stock.named_parameters(), patched.parameters(), strict=True):
        torch.testing.assert_close(found.grad, expected.grad, rtol=1e-3, atol=1e-5, msg=name)
    assert graphs.num_graphs == 1 + is_after  # as of stock models where sizes are dynamic
    assert graphs.largest < 4 * 32 * VOCAB_SIZE
    with torch.no_grad():
        torch.testing.assert_close(fused(**inputs).loss, want)
    assert graphs.largest < 4 * 32 * VOCAB_SIZE


class MakesCriterion(Head):
    def forward(self, ids: Tensor, targets: Tensor) -> Tensor:
        return nn.CrossEntropyLoss()(self.lm_head(self.embed(ids)).flatten(0, 1), targets.flatten())


def test_loss_of_a_model_that_makes_a_criterion_is_whole_and_says_so() -> None:
    patched = MakesCriterion(lambda *_: None)
    stock = copy.deepcopy(patched)
    apply_liger_kernels(patched)
    inputs = batch()
    with pytest.warns(UserWarning, match="loss of MakesCriterion is not fused where the model is compiled"):
        got = compiled(patched)[0](*inputs)
    torch.testing.assert_close(got, stock(*inputs))


def test_custom_ops_are_not_taken_for_methods_of_their_names() -> None:
    stock, patched = pair(lambda x, y: torch.ops.lightning_liger_tests.double(x))
    inputs = batch()
    with pytest.warns(UserWarning, match="double"):
        torch.testing.assert_close(patched(*inputs) + 0, stock(*inputs))


def test_the_loss_of_the_mixin_compiles_without_logits() -> None:
    stock = tiny_model("llama", num_hidden_layers=1)
    patched = copy.deepcopy(stock)
    apply_liger_kernels(patched)
    inputs = tiny_batch(batch_size=4, seq_len=32)
    fused, graphs = compiled(Step(patched), vocab_size=VOCAB_SIZE)
    torch.testing.assert_close(fused(**inputs), stock(**inputs).loss)
    assert graphs.largest < 4 * 32 * VOCAB_SIZE
