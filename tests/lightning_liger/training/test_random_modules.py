"""Random LightningModules, with the habits of ordinary code, train like a plain loop in float64, or raise."""

import functools
import itertools
import random
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, NamedTuple

import lightning as L
import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import WeightAveraging
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_liger import LigerCallback, LigerLMMixin
from lightning_liger.post_training.base import LigerPostTrainingMixin, StepLoss, Term
from tests.lightning_liger.plain_scores import targets_of
from tests.lightning_liger.tiny import quiet_trainer

VOCAB_SIZE = 5
HOOKS = (
    "on_fit_start", "on_train_start", "on_train_epoch_start", "on_train_batch_start", "on_before_backward",
    "on_after_backward", "on_before_optimizer_step", "on_before_zero_grad", "on_train_batch_end", "on_train_epoch_end",
    "on_validation_start", "on_validation_batch_end", "on_validation_epoch_end", "setup",
)  # fmt: skip
Program = SimpleNamespace
"""What a user wrote, see ``make_program``."""


def make_batches(rng: random.Random, number: int, may_be_empty: bool) -> list[dict[str, Tensor]]:
    batches = []
    for _ in range(number):
        generator = torch.Generator().manual_seed(rng.randrange(2**31))
        rows, length = rng.choice([(2, 3), (2, 7), (4, 5)])
        ids = torch.randint(VOCAB_SIZE, (rows, length), generator=generator)
        labels = ids.masked_fill(torch.rand(rows, length, generator=generator) < rng.choice([0.0, 0.7]), -100)
        labels[:, -1] = -100 if may_be_empty and rng.random() < 0.2 else ids[:, -1]
        batch = {"input_ids": ids, "labels": labels}
        if rng.random() < 0.3:  # packed documents
            starts = torch.rand(rows, length, generator=generator) < 0.3
            starts[:, -1] = False
            since = torch.arange(length).expand(rows, length)
            batch["position_ids"] = since - since.where(starts, torch.zeros_like(since)).cummax(1).values
        if may_be_empty and rng.random() < 0.1:
            labels[:] = -100
        batches.append(batch)
    return batches


def make_program(seed: int) -> Program:
    rng = random.Random(seed)
    number, loss = rng.randint(2, 7), rng.choice(["tokens", "tokens", "one_unit", "two_units"])
    skipped = {index: rng.choice(["before", "after"]) for index in range(number) if rng.random() < 0.25}
    hooks = {name: rng.random() < 0.5 for name in HOOKS if rng.random() < 0.3}
    if not rng.randrange(3):
        hooks["on_after_backward"] = False
    clipping = rng.choice([None, None, ("norm", 0.05), ("value", 0.01)])
    skipped = skipped if rng.random() < 0.5 and clipping != ("value", 0.01) else {}  # PyTorch's needs a gradient
    manual = rng.choice(["", "", "", "one", "two"])
    accumulate = 1 if manual else rng.choice([1, 1, 2, 3])
    normalization = rng.choice(["first", "first", "first", "micro_batch"])
    step = rng.choice(["inherited"] * 6 + ["own", "mixed"]) if loss == "tokens" else "inherited"
    may_be_empty = normalization == "first" and step == "inherited" and not manual
    optimizer_step = rng.choice(["", "", "closure", *["every other"][: accumulate == 1]]) if not manual else ""
    validation = [make_batches(rng, rng.randint(1, 3), may_be_empty=False) for _ in range(rng.choice([0, 0, 1, 2]))]
    return Program(
        loss=loss,
        step=step,
        added=rng.choice([0.0, 0.0, 0.3, 3.0]),  # weight of a regularizer that is added to the loss
        factor=rng.choice([1.0, 1.0, 0.5]),  # that the loss is multiplied by
        halves=not rng.randrange(6),  # whether the inherited step is called for each half of the rows
        returns=rng.choice(["tensor", "dict"]),
        skipped=skipped,  # batches without a loss, before or after the inherited step ran
        hooks=hooks,  # overridden ones, and whether they call super()
        backward=not rng.randrange(4),
        optimizer_step=optimizer_step,
        zero_grad=rng.choice(["", "", "", "zeros", "never"]) if not manual else "",
        clipping=clipping if not manual else None,
        parameter_hook=rng.choice(["", "", "double", *["clamp"][: accumulate == 1]]),
        in_backward=not manual and not rng.randrange(12),
        manual=manual,
        accumulate=accumulate,
        epochs=rng.choice([1, 1, 2]),
        callback=rng.random() < 0.5,
        normalization=normalization,
        strategy=rng.choice(["auto", "liger"]),
        # Whether a callback trains an average of the weights, which validation and the end of training take.
        averages=not manual and optimizer_step != "every other" and not rng.randrange(4),
        validation=validation,
        batches=make_batches(rng, number, may_be_empty),
    )


def is_own(program: Program, index: int) -> bool:
    """Whether the step of a batch does not use the inherited one."""
    return program.step == "own" or (program.step == "mixed" and index % 2 == 1)


class Output(NamedTuple):
    logits: Tensor


class Bigrams(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.embedding = nn.Embedding.from_pretrained(torch.randn(VOCAB_SIZE, 3, generator=generator), freeze=False)
        self.lm_head = nn.Linear(3, VOCAB_SIZE, bias=False)
        self.lm_head.weight.data = torch.randn(VOCAB_SIZE, 3, generator=generator)

    def forward(self, input_ids: Tensor, position_ids: Tensor | None = None) -> Output:
        return Output(self.lm_head(self.embedding(input_ids)))


def items_of(model: nn.Module, batch: dict[str, Tensor], program: Program) -> list[tuple[Tensor, Tensor]]:
    """The sums of losses over each kind of item, and their numbers."""
    targets, logits = targets_of(batch), model(batch["input_ids"]).logits
    tokens = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum"), (targets != -100).sum()
    if program.loss == "tokens":
        return [tokens]
    rows = logits.square().mean((1, 2)).sum(), torch.tensor(len(targets))
    return [rows] if program.loss == "one_unit" else [rows, tokens]


def regularizer(model: nn.Module) -> Tensor:
    return torch.stack([parameter.square().sum() for parameter in model.parameters()]).sum()


def halves_of(batch: dict[str, Tensor]) -> list[dict[str, Tensor]]:
    return [{key: value[part::2] for key, value in batch.items()} for part in (0, 1)]


class _PostTraining(LigerPostTrainingMixin, L.LightningModule):
    program: Program

    def step_loss(self, stage: str, batch: dict[str, Tensor]) -> StepLoss:
        items = items_of(self.model, batch, self.program)
        return StepLoss(tuple(Term(total, count, name) for (total, count), name in zip(items, "ab", strict=False)))

    def count_items(self, batch: dict[str, Tensor]) -> dict[str, Tensor | float]:
        return {"a": len(batch["input_ids"]), "b": (targets_of(batch) != -100).sum()}


class _LanguageModel(LigerLMMixin, L.LightningModule):
    program: Program


def make_module(program: Program) -> L.LightningModule:
    base: Any = _LanguageModel if program.loss == "tokens" else _PostTraining

    class Module(base):  # type: ignore[misc]
        if program.normalization == "micro_batch":
            loss_normalization = "micro_batch"

        def __init__(self) -> None:
            super().__init__()
            self.program = program
            self.model = Bigrams()
            self.automatic_optimization = not program.manual
            if program.parameter_hook:
                self.model.lm_head.weight.register_hook(PARAMETER_HOOKS[program.parameter_hook])
            if program.in_backward:
                self.model.lm_head.weight.register_post_accumulate_grad_hook(step_at_once)

        def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Any:
            if program.skipped.get(batch_idx) == "before":
                return None
            if is_own(program, batch_idx):
                loss = self.lm_loss(
                    self.model(batch["input_ids"]).logits, batch["labels"], position_ids=batch.get("position_ids")
                )
            elif program.halves:
                loss = sum(super(Module, self).training_step(half, batch_idx) for half in halves_of(batch)) / 2
            else:
                loss = super().training_step(batch, batch_idx)
            if program.skipped.get(batch_idx) == "after":
                return None
            loss = program.factor * loss
            if program.added:
                loss = loss + program.added * regularizer(self.model)
            if program.manual:
                optimizers = self.optimizers()
                optimizers = optimizers if isinstance(optimizers, list) else [optimizers]
                for optimizer in optimizers:
                    optimizer.zero_grad()
                self.manual_backward(loss)
                optimizers[batch_idx % len(optimizers)].step()
            return loss if program.returns == "tensor" else {"loss": loss, "kept": loss.detach()}

        def configure_optimizers(self) -> Any:
            if program.manual == "two":
                return [torch.optim.SGD([parameter], lr=0.1) for parameter in self.model.parameters()]
            return torch.optim.SGD(self.parameters(), lr=0.1)

    for name, calls_super in program.hooks.items():
        setattr(Module, name, _hook(Module, name, calls_super))
    if program.backward:
        Module.backward = lambda self, loss, *args, **kwargs: loss.backward(*args, **kwargs)
    if program.optimizer_step:
        Module.optimizer_step = OPTIMIZER_STEPS[program.optimizer_step]
    if program.zero_grad == "zeros":
        Module.optimizer_zero_grad = lambda self, epoch, batch_idx, optimizer: optimizer.zero_grad(set_to_none=False)
    if program.zero_grad == "never":
        Module.optimizer_zero_grad = lambda self, epoch, batch_idx, optimizer: None
    return Module()


def _hook(owner: type, name: str, calls_super: bool) -> Callable[..., Any]:
    def hook(self: Any, *args: Any, **kwargs: Any) -> Any:
        return getattr(super(owner, self), name)(*args, **kwargs) if calls_super else None

    return hook


def step_at_once(parameter: nn.Parameter) -> None:
    parameter.data -= 0.1 * parameter.grad
    parameter.grad = None


def _every_other(self: Any, epoch: int, batch_idx: int, optimizer: Any, closure: Any) -> None:
    if batch_idx % 2:
        optimizer.step(closure=closure)
    else:
        closure()


PARAMETER_HOOKS: dict[str, Callable[[Tensor], Tensor]] = {
    "double": lambda gradient: 2 * gradient,
    "clamp": lambda gradient: gradient.clamp(-0.02, 0.02),
}
OPTIMIZER_STEPS: dict[str, Callable[..., None]] = {
    "closure": lambda self, epoch, batch_idx, optimizer, closure: optimizer.step(closure=closure),
    "every other": _every_other,
}


class Watch(L.Callback):
    """Notes the gradients after the last backward of each step, before the module's hooks, and averages the weights."""

    def __init__(self) -> None:
        self.gradients: list[list[Tensor]] = []
        self.average: list[Tensor] | None = None

    def on_after_backward(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if not trainer.fit_loop.epoch_loop._should_accumulate():
            self.gradients.append([p.grad.clone() for p in pl_module.model.parameters() if p.grad is not None])

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: L.LightningModule, *_: Any) -> None:
        if not trainer.fit_loop.epoch_loop._should_accumulate():
            self.average = averaged(self.average, list(pl_module.model.parameters()))


def averaged(average: list[Tensor] | None, parameters: list[nn.Parameter]) -> list[Tensor]:
    now = [parameter.detach().clone() for parameter in parameters]
    return now if average is None else [0.8 * old + 0.2 * new for old, new in zip(average, now, strict=True)]


class Result(NamedTuple):
    weights: list[Tensor]
    average: list[Tensor] | None
    gradients: list[list[Tensor]]
    logged: float | None
    """The last ``train_loss_step``."""
    validated: list[float]
    """The last ``val_loss`` of each loader."""


def run(program: Program) -> Result:
    module, watch = make_module(program), Watch()
    names = ("gradient_clip_algorithm", "gradient_clip_val")
    clipping: dict[str, Any] = dict(zip(names, program.clipping or (), strict=False))
    callbacks: list[L.Callback] = [watch]
    if program.callback and program.strategy == "auto":
        callbacks.append(LigerCallback())
    if program.averages:
        callbacks.append(WeightAveraging(avg_fn=lambda old, new, _: 0.8 * old + 0.2 * new))
    options = {"max_epochs": program.epochs, "accumulate_grad_batches": program.accumulate, **clipping}
    trainer = quiet_trainer(strategy=program.strategy, callbacks=callbacks, **options)
    loaders = [DataLoader(batches, batch_size=None) for batches in program.validation]  # type: ignore[arg-type]
    trainer.fit(module, DataLoader(program.batches, batch_size=None), loaders or None)  # type: ignore[arg-type]
    logged = trainer.callback_metrics.get("train_loss_step")
    weights = [parameter.detach() for parameter in module.model.parameters()]
    names = [f"val_loss/dataloader_idx_{index}" for index in range(len(loaders))] if len(loaders) > 1 else ["val_loss"]
    validated = [float(trainer.callback_metrics[name]) for name in names[: len(loaders)]]
    return Result(weights, watch.average, watch.gradients, None if logged is None else float(logged), validated)


# The plain loop


class Losses(NamedTuple):
    """Of the batches of a step that are trained on."""

    returned: list[Tensor]
    inherited: list[Tensor]
    shares: list[Tensor]


def losses_of(model: nn.Module, program: Program, kept: list[int]) -> Losses:
    returned, inherited, weights = [], [], []
    items = {index: items_of(model, program.batches[index], program) for index in kept}
    is_weighted = not program.manual and program.normalization == "first" and not all(is_own(program, i) for i in kept)
    for index in kept:
        if program.halves and not is_own(program, index):
            parts = [items_of(model, half, program) for half in halves_of(program.batches[index])]
        else:
            parts = [items[index]]
        if program.loss == "two_units" and is_weighted and program.accumulate > 1:
            numbers = [sum(each[kind][1] for each in items.values()).clamp(min=1) / len(kept) for kind in (0, 1)]
            loss = sum(total / number for (total, _), number in zip(items[index], numbers, strict=True))
        else:
            loss = sum(sum(total / count.clamp(min=1) for total, count in part) for part in parts) / len(parts)
        inherited.append(loss)
        loss = program.factor * loss
        returned.append(loss + program.added * regularizer(model) if program.added else loss)
        number = sum(part[0][1].double().clamp(min=2.0**-40) for part in parts)
        weights.append(torch.ones_like(number) if program.loss == "two_units" else number)
    shares = [weight / sum(weights) for weight in weights]
    if not is_weighted:
        shares = [torch.tensor(1 / program.accumulate)] * len(kept)
    return Losses(returned, inherited, shares)


def plain(program: Program) -> Result:
    model = Bigrams().double()
    parameters, watch, logged = list(model.parameters()), Watch(), None
    if program.parameter_hook:
        model.lm_head.weight.register_hook(PARAMETER_HOOKS[program.parameter_hook])
    for parameter in parameters:
        parameter.grad = torch.zeros_like(parameter)
    starts = [start for start in range(len(program.batches)) if start % program.accumulate == 0] * program.epochs
    for start in starts:
        window = list(range(len(program.batches)))[start : start + program.accumulate]
        kept = [index for index in window if index not in program.skipped]
        validated = bool(program.validation) and start == 0  # before which Lightning sets gradients to zero
        if (program.zero_grad != "never" or validated) and not (program.manual and not kept):
            for parameter in parameters:
                parameter.grad.zero_()
        losses = losses_of(model, program, kept)
        for number in range(len(kept)):
            if program.in_backward:
                losses = losses_of(model, program, kept)
            (losses.shares[number] * losses.returned[number]).backward()
            if program.in_backward:
                model.lm_head.weight.data -= 0.1 * model.lm_head.weight.grad
                model.lm_head.weight.grad.zero_()
        if window[-1] in kept:
            watch.gradients.append([parameter.grad.clone() for parameter in parameters])
        if not (program.optimizer_step == "every other" and window[-1] % 2 == 0) and not (program.manual and not kept):
            clip(parameters, program)
            if kept:
                logged = float(sum(s * loss for s, loss in zip(losses.shares, losses.inherited, strict=True)))
            moving = parameters if program.manual != "two" else [parameters[window[-1] % 2]]
            for parameter in moving:
                parameter.data -= 0.1 * parameter.grad
        watch.average = averaged(watch.average, parameters)
    if program.averages:
        for parameter, average in zip(parameters, watch.average or (), strict=True):
            parameter.data = average
    validated = []
    for batches in program.validation:
        items = [items_of(model, batch, program) for batch in batches]
        kinds = zip(*items, strict=True)
        validated.append(float(sum(sum(total for total, _ in k) / sum(count for _, count in k) for k in kinds)))
    return Result([parameter.detach() for parameter in parameters], watch.average, watch.gradients, logged, validated)


def clip(parameters: list[nn.Parameter], program: Program) -> None:
    if program.clipping is not None and program.clipping[0] == "norm":
        torch.nn.utils.clip_grad_norm_(parameters, program.clipping[1])
    elif program.clipping is not None:
        torch.nn.utils.clip_grad_value_(parameters, program.clipping[1])


def may_raise(program: Program) -> bool:
    """Whether gradients cannot be those of the step's mean."""
    if program.accumulate == 1 or program.manual or program.normalization != "first":
        return False
    is_incomplete = program.loss == "two_units" and bool(program.halves or program.skipped)
    return program.step == "mixed" or program.zero_grad == "never" or program.in_backward or is_incomplete


def check(seed: int) -> str:
    """Runs a program; returns ``"equal"`` or ``"raised"``."""
    program = make_program(seed)
    try:
        found = run(program)
    except RuntimeError as error:
        if may_raise(program) and ("training_step" in str(error) or "normalization='micro_batch'" in str(error)):
            return "raised"
        raise RuntimeError(program) from error
    want = plain(program)
    close: dict[str, Any] = {"rtol": 2e-4, "atol": 2e-6, "check_dtype": False}
    message = lambda text: f"{program}\n{text}"  # noqa: E731
    torch.testing.assert_close(found.weights, want.weights, msg=message, **close)
    torch.testing.assert_close(found.average, want.average, msg=message, **close)
    assert found.validated == pytest.approx(want.validated, rel=1e-4), program
    if not program.in_backward:
        torch.testing.assert_close(found.gradients, want.gradients, msg=message, **close)
    is_shown = program.step == "inherited" and program.normalization == "first"
    if is_shown and not program.halves and not program.manual and want.logged is not None:
        assert found.logged == pytest.approx(want.logged, rel=1e-4, abs=1e-6), program
    return "equal"


def pairs_of(program: Program) -> set[tuple[str, ...]]:
    """Pairs of the habits of a program; hooks come with each other habit, but not in pairs."""
    habits = {name: value for name, value in vars(program).items() if name not in ("hooks", "batches", "skipped")}
    habits |= {"validation": len(program.validation), "skipped": sorted({*program.skipped.values()})}
    others = [f"{name} {value}" for name, value in habits.items()]
    hooks = [f"{name} {value}" for name, value in program.hooks.items()]
    return {*itertools.combinations(others, 2), *itertools.product(others, hooks)}


@functools.cache
def chosen() -> list[int]:
    """So few of 300 programs that they have all pairs of habits of these."""
    pairs = {seed: pairs_of(make_program(seed)) for seed in range(300)}
    left, seeds = set().union(*pairs.values()), []
    while left:
        seeds.append(max(pairs, key=lambda seed: len(pairs[seed] & left)))
        left -= pairs[seeds[-1]]
    return seeds


@pytest.mark.parametrize("part", range(3))
def test_random_modules_train_like_a_plain_loop_or_raise(part: int) -> None:
    results = [check(seed) for seed in chosen()[part::3]]
    assert results.count("equal") > 0.8 * len(results)


class Sharpness(torch.optim.SGD):
    """A step by the gradient at a point uphill, which calls its closure twice."""

    def step(self, closure: Any = None) -> Any:
        loss = closure()
        parameters = [each for group in self.param_groups for each in group["params"]]
        uphill = [0.1 * each.grad for each in parameters]
        with torch.no_grad():
            torch._foreach_add_(parameters, uphill)
        with torch.enable_grad():
            closure()
        with torch.no_grad():
            torch._foreach_sub_(parameters, uphill)
        super().step()
        return loss


@pytest.mark.parametrize("optimizer_class", [functools.partial(torch.optim.LBFGS, max_iter=3), Sharpness])
@pytest.mark.parametrize("strategy", ["auto", "liger"])
def test_optimizers_that_run_a_step_several_times(optimizer_class: Any, strategy: str) -> None:
    class Module(LigerLMMixin, L.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = Bigrams().double()

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return optimizer_class(self.parameters(), lr=0.1)

    module, model, batches = Module(), Bigrams().double(), make_batches(random.Random(0), 5, may_be_empty=False)
    optimizer = optimizer_class(model.parameters(), lr=0.1)
    for batch in batches:

        def closure(batch: dict[str, Tensor] = batch) -> Tensor:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(batch["input_ids"]).logits.flatten(0, 1), targets_of(batch).flatten())
            loss.backward()
            return loss

        optimizer.step(closure)
    trainer = quiet_trainer(strategy=strategy, max_epochs=1)
    trainer.fit(module, DataLoader(batches, batch_size=None))
    assert trainer.global_step == len(batches)
    torch.testing.assert_close(list(module.parameters()), list(model.parameters()), rtol=1e-6, atol=1e-6)
