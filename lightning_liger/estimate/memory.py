"""What training a model takes on each GPU, with our strategies and without, and what fits a GPU."""

import functools
import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal

import torch
from transformers import PreTrainedModel

from liger_ops.arguments import check_bool, check_integer, check_number, wrong_value
from lightning_liger.activations.layers import Mode, find_layers
from lightning_liger.activations.plan import choose
from lightning_liger.activations.planner import MARGIN, Budget
from lightning_liger.estimate.ledger import Unknowable
from lightning_liger.estimate.models import find_config, make_batch, make_model
from lightning_liger.estimate.states import PRECISIONS, STRATEGIES, check_choices, states_of
from lightning_liger.estimate.step import Step, run_step
from lightning_liger.hardware import Gpu, get_gpu
from lightning_liger.monitor.experts import num_active_parameters
from lightning_liger.monitor.flops import count_flops, float8_flops
from lightning_liger.patching import PatchReport, apply_liger_kernels
from lightning_liger.patching.float8 import converted_layers
from lightning_liger.patching.rules.linear import hold_frozen

_CONTEXT_BYTES = 2**30
"""Of a GPU's memory that PyTorch's allocator cannot have: CUDA's context, code of kernels, NCCL's buffers."""
_MAX_TOKENS = 2**24
_NEAR, _FAR = 0.02, 4
"""How near to the largest size a search ends, as a share of it, and how far it goes without knowing the way."""
_SEQUENCE_STEP = 256
_FAILURES = (ArithmeticError, AttributeError, LookupError, NotImplementedError, RuntimeError, TypeError, ValueError)

_PEAK_SHARE, _FLOAT8_PEAK_SHARE = 0.67, 0.55
"""Of a GPU's peak in the precision and in float8: what the linear layers of Llama 3 8B and the kernels between them
reach on an H200 (``benchmarks/results/fp8/layer_h200.jsonl``)."""

Implementation = Literal["lightning-liger", "Hugging Face"]
OURS: Implementation = "lightning-liger"
HUGGING_FACE: Implementation = "Hugging Face"


@dataclass(frozen=True)
class Settings:
    """How a model is trained: arguments of :func:`inspect_model`."""

    batch_size: int
    seq_len: int
    num_gpus: int
    strategy: str
    precision: str
    optimizer: str
    memory_budget: float | str | None
    fp8: bool = False


@dataclass(frozen=True)
class Row:
    """The memory of one way to train, on each GPU.

    Attributes:
        implementation: ``"lightning-liger"`` or ``"Hugging Face"``, which is a model without patches and the loss of
            whole logits.
        activations: How layers run: ``"stored"`` and ``"recomputed"`` all do; ``"cheap dropped"``, which is our
            default, stores but for tensors that are cheap to make again; ``"plan"`` is that of the memory budget.
        num_bytes: At the peak, of each of :data:`~lightning_liger.estimate.step.OWNERS`.
        logits_bytes: The most that logits and loss take at any moment.
        plan: The plan of the memory budget in words.
        fits: Whether the peak is within the GPU's limit, that of the plan within its budget; None without a GPU.
    """

    implementation: Implementation
    activations: str
    num_bytes: dict[str, int]
    logits_bytes: int
    plan: str | None = None
    fits: bool | None = None

    @property
    def total(self) -> int:
        """The peak in bytes."""
        return sum(self.num_bytes.values())


@dataclass(frozen=True)
class Fit:
    """What fits a GPU: :class:`Row` has implementations and activations.

    Attributes:
        longest_seq_len: At the batch size, a multiple of 256; 0 if none fits.
        largest_batch_size: At the sequence length; 0 if none fits.
    """

    implementation: Implementation
    activations: str
    longest_seq_len: int
    largest_batch_size: int


@dataclass(frozen=True)
class Inspection:
    """The result of :func:`inspect_model`.

    Attributes:
        model: As given.
        model_type: The architecture.
        num_parameters, num_trained: Of the model.
        num_active: Parameters that a token uses: all, but of experts only those that it is sent to.
        flops_per_token: Of forward and backward, as :func:`~lightning_liger.monitor.flops.count_flops` counts them.
        float8_flops_per_token: Of these, those in float8 with our strategies.
        settings: How it is trained.
        kernels: What is replaced, and what not and why.
        rows: The memory of each way to train.
        gpu: The GPU, None without one.
        limit_bytes: Of its memory, how much tensors may take.
        budget_bytes: How much the memory budget lets tensors take, None without a budget.
        fits: What fits it.
        unknown: Why there are no rows, if the model's forward could not run on the meta device.
        state_bytes: Of weights, gradients and the optimizer, which are known in any case.
        notes: What else to know.
    """

    model: str
    model_type: str
    num_parameters: int
    num_trained: int
    num_active: int
    flops_per_token: float
    float8_flops_per_token: float
    settings: Settings
    kernels: PatchReport
    state_bytes: dict[str, int]
    rows: list[Row] = field(default_factory=list)
    gpu: Gpu | None = None
    limit_bytes: int | None = None
    budget_bytes: int | None = None
    fits: list[Fit] = field(default_factory=list)
    unknown: str | None = None
    notes: list[str] = field(default_factory=list)

    def step_seconds(self, fp8: bool) -> float | None:
        """About the time of a step in which nothing is recomputed, by its FLOPs; None without a GPU."""
        if self.gpu is None:
            return None
        in_float8 = self.float8_flops_per_token if fp8 else 0.0
        rate = _PEAK_SHARE * self.gpu.peak_flops(PRECISIONS[self.settings.precision].compute)
        float8_rate = _FLOAT8_PEAK_SHARE * self.gpu.peak_flops(torch.float8_e4m3fn)
        of_token = in_float8 / float8_rate + (self.flops_per_token - in_float8) / rate
        return self.settings.batch_size * self.settings.seq_len * of_token

    def as_dict(self) -> dict[str, Any]:
        """Plain data, with the keys that docs/inspect.md lists."""
        numbers = ("num_parameters", "num_trained", "num_active", "flops_per_token", "float8_flops_per_token")
        names = ("model", "model_type", *numbers, "state_bytes", "unknown", "notes")
        memory = [asdict(row) for row in self.rows]
        for found in memory:
            num_bytes = found.pop("num_bytes")
            found["bytes"] = {**num_bytes, "total": sum(num_bytes.values())}
            found["largest_logits_bytes"] = found.pop("logits_bytes")
        gpu: dict[str, Any] | None = None
        if self.gpu is not None:
            gpu = {"name": self.gpu.name, "memory_bytes": self.gpu.memory_bytes, "limit_bytes": self.limit_bytes}
            gpu["fits"] = list(map(asdict, self.fits))
        parts = {"settings": asdict(self.settings), "kernels": self.kernels.as_dict(), "memory": memory, "gpu": gpu}
        seconds = {"step_seconds": self.step_seconds(self.settings.fp8)}
        return {name: getattr(self, name) for name in names} | seconds | parts


def inspect_model(
    model: str,
    *,
    config: Mapping[str, Any] | None = None,
    lora: Mapping[str, Any] | None = None,
    batch_size: int = 1,
    seq_len: int = 2048,
    num_gpus: int = 1,
    strategy: str | None = None,
    precision: str = "bf16-true",
    optimizer: str = "adamw",
    memory_budget: float | str | None = None,
    fp8: bool = False,
    gpu: str | None = None,
    revision: str | None = None,
) -> Inspection:
    """What is replaced in a model and what training it takes on each GPU. Needs no GPU and no weights.

    A training step runs on the meta device, with the operations that run on a GPU, and the bytes that each allocates
    and frees are counted.

    Args:
        model: As of :func:`~lightning_liger.estimate.models.find_config`.
        config: Settings in place of the model's own.
        lora: Arguments of peft's ``LoraConfig``, to train adapters only; None to train all parameters.
        batch_size: Rows per GPU.
        seq_len: Tokens per row.
        num_gpus: How many GPUs train together.
        strategy: A name in :data:`~lightning_liger.estimate.states.STRATEGIES`; ``"single"`` or ``"fsdp"`` by default.
        precision: A name in :data:`~lightning_liger.estimate.states.PRECISIONS`.
        optimizer: A name in :data:`~lightning_liger.estimate.states.OPTIMIZERS`.
        memory_budget: As strategies take it: GiB above 1, or a share of the GPU up to 1 or ``"auto"``, which need
            ``gpu``. With ``gpu`` it is ``"auto"`` by default.
        fp8: Whether linear layers run in float8 with our strategies.
        gpu: A key of :data:`lightning_liger.hardware.GPUS`, such as ``"h100-80gb"``.
        revision: Branch, tag or commit of a model on the Hub.

    Raises:
        ConnectionError, FileNotFoundError, PermissionError: As of :func:`~lightning_liger.estimate.models.find_config`.
        ModuleNotFoundError: If ``lora`` is given and peft is not installed.
        TypeError: For arguments of a wrong type.
        ValueError: For unknown names and settings, for numbers below 1, and for a budget above the GPU's memory.
    """
    for name, value in (("batch_size", batch_size), ("seq_len", seq_len), ("num_gpus", num_gpus)):
        check_integer(name, value, at_least=1)
    check_bool("fp8", fp8)
    strategy = ("single" if num_gpus == 1 else "fsdp") if strategy is None else strategy
    check_choices(strategy, num_gpus, precision, optimizer)
    found = None if gpu is None else get_gpu(gpu)
    if fp8 and found is not None and (found.float8_flops is None or found.name.startswith("AMD")):
        raise wrong_value("fp8", f"False for {found.name}, on which no float8 products run", fp8)
    if fp8 and strategy == "deepspeed_stage_3":
        raise wrong_value("fp8", "False with strategy='deepspeed_stage_3', which frees weights between products", fp8)
    if found is not None and memory_budget is None:
        memory_budget = "auto"
    budget, limit = _limit(memory_budget, found), None if found is None else _limit("auto", found)
    settings = Settings(batch_size, seq_len, num_gpus, strategy, precision, optimizer, memory_budget, fp8)
    found_config, dtype = find_config(model, config, revision), PRECISIONS[precision].compute
    built, plain = (make_model(found_config, dtype, lora) for _ in range(2))
    kernels = apply_liger_kernels(built, fp8=fp8 or None)
    if strategy in ("single", "ddp"):  # as these do by default
        list(hold_frozen(built, on_meta=True))
    models = {OURS: built, HUGGING_FACE: plain}
    states = {name: states_of(each, strategy, num_gpus, precision, optimizer) for name, each in models.items()}
    converted = [each for each in converted_layers(built) if batch_size * seq_len >= each.min_tokens]
    result = Inspection(
        model=model,
        model_type=built.config.model_type,
        num_parameters=sum(each.numel() for each in built.parameters()),
        num_trained=sum(each.numel() for each in built.parameters() if each.requires_grad),
        num_active=num_active_parameters(plain),
        flops_per_token=count_flops(plain, seq_len) / seq_len,
        float8_flops_per_token=float8_flops(converted),
        settings=settings,
        kernels=kernels,
        state_bytes=states[OURS].totals(built),
        gpu=found,
        limit_bytes=limit,
        budget_bytes=budget,
    )

    @functools.cache
    def run(implementation: Implementation, batch_size: int, seq_len: int) -> Step:
        """A step in which all layers are recomputed."""
        make = functools.partial(make_batch, batch_size, seq_len)
        frees_early = implementation == OURS or STRATEGIES[strategy].frees_early
        try:
            return run_step(models[implementation], make, states[implementation], frees_early)
        except _FAILURES as error:  # of the model's own code
            raise Unknowable(f"{type(error).__name__}: {error}") from error

    for implementation in (OURS, HUGGING_FACE):
        try:
            rows = list(_rows(run(implementation, batch_size, seq_len), implementation, budget, limit))
            if limit is not None:
                within = budget if implementation == OURS and budget is not None else limit
                result.fits.append(_fit(functools.partial(run, implementation), implementation, settings, within))
            result.rows.extend(rows)
        except Unknowable as error:
            line = next(iter(str(error).strip().splitlines()), type(error).__name__)
            if implementation == OURS:
                result = replace(result, unknown=line)
                break
            result.notes.append(f"memory of {implementation} is unknown: {line}")  # as of peft's adapters of experts
    result.notes.extend(_notes(built, [seq_len, *(fit.longest_seq_len for fit in result.fits)]))
    return result


def _limit(memory_budget: float | str | None, gpu: Gpu | None) -> int | None:
    if memory_budget is None:
        return None
    if memory_budget != "auto":
        if isinstance(memory_budget, str):
            expected = "'auto', a share of the GPU's memory up to 1, or GiB above 1"
            raise wrong_value("memory_budget", expected, memory_budget)
        check_number("memory_budget", memory_budget, above=0)
    if gpu is None and (isinstance(memory_budget, str) or memory_budget <= 1):
        raise wrong_value("memory_budget", "GiB above 1 without gpu, which 'auto' and shares need", memory_budget)
    total = 2**62 if gpu is None else gpu.memory_bytes
    return Budget(memory_budget).limit(total, total - _CONTEXT_BYTES)


def _rows(step: Step, implementation: Implementation, budget: int | None, limit: int | None) -> Iterator[Row]:

    def row(activations: str, modes: Sequence[Mode], most: int | None, words: str | None = None) -> Row:
        num_bytes = step.peak(modes)
        fits = None if limit is None or most is None else sum(num_bytes.values()) <= most
        return Row(implementation, activations, num_bytes, step.logits_bytes, words, fits)

    every: dict[str, Mode] = {"stored": "store", "cheap dropped": "cheap", "recomputed": "recompute"}
    for activations, mode in every.items():
        if implementation == OURS or mode != "cheap":
            yield row(activations, [mode] * step.num_layers, limit)
    if implementation == OURS and budget is not None:
        plan = choose(step.profile, (1 - MARGIN) * budget)
        yield row("plan", plan.modes, budget, str(plan))


def _fit(run: Callable[[int, int], Step], implementation: Implementation, settings: Settings, limit: int) -> Fit:
    """The longest sequence and the largest batch; ours under a plan, Hugging Face's with all layers recomputed."""
    batch_size, seq_len, ours = settings.batch_size, settings.seq_len, implementation == OURS

    def needed(batch_size: int, seq_len: int) -> int:
        profile = run(batch_size, seq_len).profile
        return choose(profile, 0).predicted_peak if ours else max(profile.peaks.values())

    within = (1 - MARGIN) * limit if ours else limit
    most = _MAX_TOKENS // batch_size
    longest = largest(lambda length: needed(batch_size, length), within, seq_len, _SEQUENCE_STEP, most)
    rows = largest(lambda size: needed(size, seq_len), within, batch_size, 1, _MAX_TOKENS // seq_len)
    return Fit(implementation, "plan" if ours else "recomputed", longest, rows)


def largest(needed: Callable[[int], float], limit: float, start: int, step: int, most: int) -> int:
    """The largest multiple of ``step`` up to ``most`` for which ``needed``, about a line, is within ``limit``, to 2%.

    The search begins at ``start``; 0 if there is none.
    """
    low, high = 0, most - most % step + step
    at = max(step, start - start % step)
    points: dict[int, float] = {}
    while low + step < high:
        at = min(max(at, low + step), high - step)
        points[at] = value = needed(at)
        low, high = (at, high) if value <= limit else (low, at)
        nearest = min(points.keys() - {at}, key=lambda other: abs(other - at), default=at)
        slope = (points[nearest] - value) / (nearest - at) if nearest != at else 0
        if slope <= 0:
            at = _FAR * at if value <= limit else at // _FAR
            continue
        more = (limit - value) / slope
        if 0 <= more < max(step, _NEAR * at):
            break
        at = min(_FAR**2 * at, math.floor((at + (1 - _NEAR / 2) * more) / step) * step)
    return low


def _notes(model: PreTrainedModel, seq_lens: Collection[int]) -> list[str]:
    notes = []
    longest = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    if isinstance(longest, int) and max(seq_lens) > longest:
        notes.append(f"the model's max_position_embeddings is {longest:,}, raise it for longer rows")
    if any(name.endswith("A_log") for name, _ in model.named_parameters()):
        notes.append("state-space layers run other kernels on a GPU if these are installed: their memory is unknown")
    if not find_layers(model):
        notes.append("the model names no layers: nothing can be recomputed")
    return notes
