"""A job: a model that one arm trains at some sizes; and its results."""

import dataclasses
import json
from dataclasses import dataclass, field
from typing import Any

from benchmarks.training.arms import Arm
from benchmarks.training.dims import DIMS

OPTIMIZERS: dict[str, str | None] = {"adamw": None, "adamw_bfloat16": "bfloat16", "adamw_8bit": "8bit", "sgd": None}
"""Optimizers by their names on the command line, with the dtype of AdamW's states; without one, the parameters'."""
OK, OUT_OF_MEMORY, FAILED = "ok", "out of memory", "failed"


@dataclass(frozen=True)
class Job:
    """The settings of one process group that trains.

    Attributes:
        model: A name in ``DIMS``.
        arm: An :class:`Arm` as text.
        shapes: ``(batch size per process, tokens per sequence)``, trained one after another until memory runs out.
        layers: Depth, None for the published one.
        devices: Number of processes with a device each.
        warm_up, steps: Steps for each shape before those that are measured, and those. A memory budget's plan is made
            in the first two.
        traced_steps: Steps after those, in which the GPU's idle time is measured.
        optimizer: A name in ``OPTIMIZERS``; dtypes of states are those of our arms, others' are the parameters'.
        learning_rate: Constant after ``learning_rate_warm_up`` steps.
        pretrains: Whether to train as from scratch: the learning rate falls to 0 after its warm-up, AdamW has betas of
            0.9 and 0.95, and gradients are clipped at a norm of 1.
        context_parallel_size: Processes that share each sequence.
        states_first: Whether the optimizer's states exist before the first step, so that it needs the memory of all.
        memory_limit_gib: The most memory that PyTorch may take from the GPU.
        permute_rows: Whether the rows of each batch are reversed, which changes the order of sums and nothing else.
        text_cache: The cache of text to train on; None trains on random tokens.
        text_package: The installed package whose source code is the text; by default Python's standard library.
        vocab_size: With text, the size of its tokenizer.
        medusa_heads: Number of Medusa's heads over the model, 0 for the model alone.
        medusa_stage: 1 trains the heads only, 2 the model too.
        strategy: Of :data:`lightning_liger.estimate.states.STRATEGIES`, in place of that of the arm.
        precision: Of the Trainer.
        lora_rank: Of adapters, which alone are trained then; 0 trains the model.
        every_linear_fp8: Whether arms in float8 also have small linear layers in it, which are slower that way.
        held_out_rows: Of text that is not trained on, whose loss is measured at the end.
        tiny: Whether to train tiny sizes, as a trial on a CPU.
    """

    model: str
    arm: str
    shapes: tuple[tuple[int, int], ...]
    layers: int | None = None
    devices: int = 1
    warm_up: int = 3
    steps: int = 4
    traced_steps: int = 0
    optimizer: str = "adamw"
    learning_rate: float = 1e-4
    learning_rate_warm_up: int = 0
    pretrains: bool = False
    context_parallel_size: int = 1
    states_first: bool = False
    memory_limit_gib: float | None = None
    permute_rows: bool = False
    text_cache: str | None = None
    text_package: str | None = None
    vocab_size: int | None = None
    medusa_heads: int = 0
    medusa_stage: int = 2
    strategy: str = ""
    precision: str = "bf16-true"
    lora_rank: int = 0
    every_linear_fp8: bool = False
    held_out_rows: int = 0
    tiny: bool = False
    seed: int = 0

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def from_json(cls, text: str) -> "Job":
        values = json.loads(text)
        return cls(**values | {"shapes": tuple(map(tuple, values["shapes"]))})

    @property
    def parsed_arm(self) -> Arm:
        return Arm.parse(self.arm)

    def row(self, batch_size: int, sequence_length: int, **found: Any) -> "Row":
        """A row of results at one shape."""
        return Row(
            model=self.model,
            layers=DIMS[self.model].config(self.layers, self.tiny).num_hidden_layers,
            batch_size=batch_size,
            sequence_length=sequence_length,
            **{name: getattr(self, name) for name in _COMMON},
            **found,
        )


_COMMON = (
    "arm",
    "devices",
    "context_parallel_size",
    "memory_limit_gib",
    "permute_rows",
    "medusa_heads",
    "medusa_stage",
    "strategy",
    "precision",
    "lora_rank",
    "optimizer",
    "seed",
)


@dataclass(frozen=True)
class Row:
    """One arm at one shape. Measured fields are None if ``status`` is not ``"ok"`` or the machine cannot measure them.

    Attributes:
        model, layers, arm, devices, batch_size, sequence_length, context_parallel_size, medusa_heads, medusa_stage,
            strategy, precision, lora_rank, optimizer, seed: As in :class:`Job`; sizes are those of a process,
            sequences are whole.
        status: ``"ok"``, ``"out of memory"`` or ``"failed"``.
        error: The last line of the error, if there was one.
        step_seconds: Seconds of each measured step, of the slowest process.
        first_step_seconds: From the start of training to the end of the first step of this shape, compilation included.
        tokens_per_second: Per process, from the median of ``step_seconds``.
        peak_gib: Peak memory that tensors had in any step of this shape, of the process with the highest.
        reserved_gib: Peak memory that PyTorch's allocator held.
        parameters_gib, optimizer_gib: Memory of a process's parameters (as much as gradients take) and of the
            optimizer's states.
        idle_share: Of the time of traced steps, in which no kernel ran on the GPU.
        fp8_share: Of the FLOPs of linear layers, which ran in float8; None of implementations without it.
        chosen_plan: The plan as the strategy words it.
        loss: Of the last step, mean over processes.
        losses: Of each step, warm-up included.
        gradient_norms: Of each step before clipping, if a held-out loss is measured.
        held_out_loss: Of text that is not trained on, after the last step.
        seconds: From the start of the job to the end of this shape.
    """

    model: str
    layers: int
    arm: str
    devices: int
    batch_size: int
    sequence_length: int
    context_parallel_size: int = 1
    status: str = OK
    error: str | None = None
    step_seconds: list[float] = field(default_factory=list)
    first_step_seconds: float | None = None
    tokens_per_second: float | None = None
    peak_gib: float | None = None
    reserved_gib: float | None = None
    parameters_gib: float | None = None
    optimizer_gib: float | None = None
    idle_share: float | None = None
    fp8_share: float | None = None
    chosen_plan: str | None = None
    loss: float | None = None
    losses: list[float] = field(default_factory=list)
    gradient_norms: list[float] = field(default_factory=list)
    held_out_loss: float | None = None
    seconds: float | None = None
    memory_limit_gib: float | None = None
    permute_rows: bool = False
    medusa_heads: int = 0
    medusa_stage: int = 2
    strategy: str = ""
    precision: str = "bf16-true"
    lora_rank: int = 0
    optimizer: str = "adamw"
    seed: int = 0

    @property
    def parsed_arm(self) -> Arm:
        return Arm.parse(self.arm)

    @property
    def states_gib(self) -> float | None:
        """Memory of parameters, gradients and the optimizer's states."""
        if self.parameters_gib is None or self.optimizer_gib is None:
            return None
        return 2 * self.parameters_gib + self.optimizer_gib

    @property
    def mib_per_token(self) -> float | None:
        """Peak memory beyond the states, for each token that a process holds."""
        if self.peak_gib is None or self.states_gib is None:
            return None
        tokens = self.batch_size * self.sequence_length / self.context_parallel_size
        return (self.peak_gib - self.states_gib) * 1024 / tokens

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> "Row":
        return cls(**values)


def merge(rows: list[Row]) -> Row:
    """One row of the rows of all processes."""
    worst = next((row for row in rows if row.status != OK), None)
    if worst is not None:
        return worst
    first = rows[0]

    def highest(name: str) -> Any:
        values = [getattr(row, name) for row in rows]
        return None if None in values else max(values)

    def mean(values: list[float | None]) -> float | None:
        known = [value for value in values if value is not None]
        return sum(known) / len(known) if known else None

    speeds = [row.tokens_per_second for row in rows if row.tokens_per_second is not None]
    return dataclasses.replace(
        first,
        step_seconds=[max(steps) for steps in zip(*(row.step_seconds for row in rows), strict=True)],
        tokens_per_second=min(speeds) if speeds else None,
        losses=[sum(losses) / len(rows) for losses in zip(*(row.losses for row in rows), strict=True)],
        loss=mean([row.loss for row in rows]),
        **{name: highest(name) for name in ("peak_gib", "reserved_gib", "seconds", "first_step_seconds")},
        **{name: highest(name) for name in ("parameters_gib", "optimizer_gib", "idle_share")},
    )
