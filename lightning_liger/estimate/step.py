"""One training step of a model on the meta device, as a strategy of one GPU or of several runs it."""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Any

from torch import Tensor, nn

from liger_ops.fp8.weights import Float8Weight
from lightning_liger.activations.frames import tensors_in
from lightning_liger.activations.layers import ControlledLayers, Mode, control_layers, find_layers, release_layers
from lightning_liger.activations.profile import Profile, Recorder, Segment
from lightning_liger.estimate.ledger import Ledger, OnGpu
from lightning_liger.estimate.states import States, units_of

OWNERS = ("activations", "logits", "weights", "gradients", "optimizer", "workspace")
ACTIVATIONS, LOGITS, WEIGHTS, GRADIENTS, OPTIMIZER, WORKSPACE = OWNERS
"""What memory is for; ``logits`` are from the last layer's output to the loss and back."""
_WORKSPACE_BYTES = 32 * 2**20
"""Of cuBLAS on Hopper GPUs, which is allocated once."""


@dataclass(frozen=True)
class Step:
    """The memory of a training step in which every layer is recomputed, from which other plans follow.

    Attributes:
        profile: As the planner of memory budgets measures it on a GPU.
        parts: Of each segment of the profile, the bytes of each of :data:`OWNERS` at its peak.
        logits_bytes: The most that logits and loss take at any moment.
    """

    profile: Profile
    parts: dict[Segment, Counter[str]]
    logits_bytes: int

    @property
    def num_layers(self) -> int:
        return len(self.profile.layers)

    def peak(self, modes: Sequence[Mode]) -> dict[str, int]:
        """The bytes of each of :data:`OWNERS` at the peak of a step whose layers run in these modes."""
        added = {segment: self.profile.added_by_all(segment, modes) for segment in self.parts}
        worst = max(self.parts, key=lambda segment: self.profile.peaks[segment] + added[segment])
        parts = {owner: self.parts[worst][owner] for owner in OWNERS}
        parts[ACTIVATIONS] += added[worst]
        return parts


def run_step(
    model: nn.Module, make_batch: Callable[[], dict[str, Tensor]], states: States, frees_early: bool = True
) -> Step:
    """Runs a step and counts its memory.

    Args:
        model: On the meta device, in the dtype of its computation; its forward returns a ``loss``.
        make_batch: Makes the forward's arguments, on the meta device.
        states: Of weights, gradients and the optimizer.
        frees_early: Whether the last step's gradients are freed before forward, as our strategies do, or before
            backward, as Lightning does.
    """
    batch, ledger = make_batch(), Ledger()
    ledger.owner = WEIGHTS
    for parameter in model.parameters():
        for tensor in parameter.parts if isinstance(parameter, Float8Weight) else [parameter]:
            ledger.add(tensor, num_bytes=0)  # in the states
    for tensor in (*model.buffers(), *batch.values()):
        ledger.add(tensor)
    ledger.hold("workspace", WORKSPACE, _WORKSPACE_BYTES)
    ledger.hold("weights", WEIGHTS, states.weight_bytes)
    ledger.hold("optimizer", OPTIMIZER, states.optimizer_bytes)
    ledger.hold("buckets", GRADIENTS, states.bucket_bytes)
    gradient_bytes = states.totals(model)["gradients"] - states.bucket_bytes
    if states.sharding.zero_stage == 3:  # which keeps them between steps too
        ledger.hold("kept gradients", GRADIENTS, gradient_bytes)
    on_gpu = partial(OnGpu, ledger)
    controlled = control_layers(model) or ControlledLayers([])
    controlled.modes[:] = ["recompute"] * len(controlled.modes)
    controlled.context = on_gpu  # in backward too, where layers run again
    controlled.observer = recorder = Recorder(controlled, ledger)
    ledger.peaks.clear()
    units = _Units(ledger, states, model)
    ledger.owner = ACTIVATIONS
    try:
        with ledger, units.hooks():
            ledger.hold("old gradients", GRADIENTS, 0 if frees_early else gradient_bytes)
            # The second step's forward has DDP's buckets of the first one too.
            ledger.hold("buckets of forward", GRADIENTS, states.bucket_bytes * states.sharding.joins_gradients)
            with on_gpu():
                output = model(**batch)
            loss = getattr(output, "loss", None)
            if loss is None:
                raise TypeError(f"the model's forward must return a loss, got {type(output).__name__} without")
            del output
            ledger.hold("old gradients", GRADIENTS, 0)
            ledger.hold("buckets of forward", GRADIENTS, 0)
            ledger.hold("buckets of backward", GRADIENTS, states.backward_bytes)
            loss.backward()
    finally:
        release_layers(model)
        for parameter in model.parameters():
            parameter.grad = None
    profile = recorder.finish(next(iter(batch.values())).numel(), 0)
    parts: dict[Segment, Counter[str]] = {}
    for segment, peak in zip(recorder.segments, ledger.peaks, strict=True):
        parts[segment] = max(parts.get(segment, peak), peak, key=Counter.total)
    return Step(profile, parts, ledger.most[LOGITS])


class _Units:
    """The layers and the rest of a model as units whose weights are gathered and whose gradients are reduced.

    A layer's weights are gathered before its forward and freed after it; in backward those of the layer before it are
    gathered too. The gradients of a unit are joined in a buffer, which lives until the next layer's backward ends. The
    rest is gathered all the time. DeepSpeed copies each gradient into a bucket, and keeps weights gathered for longer.
    """

    def __init__(self, ledger: Ledger, states: States, model: nn.Module) -> None:
        self._ledger, self._states = ledger, states
        self._layers, self._parameters = find_layers(model), units_of(model)
        self._root = len(self._layers)
        self._backward_of: int | None = None

    @contextmanager
    def hooks(self) -> Iterator[None]:
        """Follows forward and backward of the model, and the optimizer's step at the end."""
        self._gather(self._root)
        self._ledger.hold("gathered", WEIGHTS, self._states.gathered_bytes)
        with ExitStack() as stack:
            for each in chain.from_iterable(self._parameters):
                if each.requires_grad:
                    stack.enter_context(each.register_post_accumulate_grad_hook(self._own_gradient))
            for index, layer in enumerate(self._layers):
                stack.enter_context(layer.register_forward_pre_hook(partial(self._gather, index)))
                stack.enter_context(layer.register_forward_hook(partial(self._forward_ends, index)))
            yield
        if self._backward_of is not None:
            self._free(self._backward_of)
            self._reduce(self._backward_of)
        self._reduce(self._root)
        self._free(self._root)
        self._ledger.hold("gathered", WEIGHTS, 0)
        self._ledger.hold("joined", GRADIENTS, 0)
        self._ledger.hold("buckets of backward", GRADIENTS, 0)
        self._ledger.hold("step", OPTIMIZER, self._states.step_bytes)
        self._ledger.hold("step", OPTIMIZER, 0)

    def _gather(self, index: int, *_: Any) -> None:
        sharding = self._states.sharding
        if sharding.weights and not sharding.zero_stage:
            num_bytes = sum(each.nbytes for each in self._parameters[index])
            self._ledger.hold(("gathered", index), WEIGHTS, num_bytes)

    def _free(self, index: int) -> None:
        self._ledger.hold(("gathered", index), WEIGHTS, 0)

    def _forward_ends(self, index: int, layer: nn.Module, args: Any, output: Any) -> None:
        self._free(index)
        if index == len(self._layers) - 1:
            self._ledger.owner = LOGITS
        first = next((each for each in tensors_in(output) if each.requires_grad), None)
        if first is not None:
            first.register_hook(partial(self._backward_starts, index))

    def _backward_starts(self, index: int, gradient: Tensor) -> None:
        self._ledger.owner = ACTIVATIONS
        after, self._backward_of = self._backward_of, index
        if after is not None:
            self._free(after)
            self._reduce(after)
        for each in (index, index - 1):
            if each >= 0:
                self._gather(each)

    def _own_gradient(self, parameter: nn.Parameter) -> None:
        assert parameter.grad is not None
        self._ledger.give(parameter.grad, GRADIENTS)
        if stage := self._states.sharding.zero_stage:  # copied into a bucket, before it is reduced
            parameter.grad = None
            if stage < 3:
                self._ledger.hold(("shard", id(parameter)), GRADIENTS, self._states.gradient_bytes([parameter]))

    def _reduce(self, index: int) -> None:
        """Reduces the gradients of a unit whose backward has ended."""
        ledger, states = self._ledger, self._states
        is_reduced = states.sharding.gradients and not states.sharding.zero_stage
        if not is_reduced or all(each.grad is None for each in self._parameters[index]):
            return
        own = states.trained(self._parameters[index])
        ledger.hold("joined", GRADIENTS, 0)  # of the unit before, which has been reduced meanwhile
        ledger.hold("joined", GRADIENTS, sum(each.nbytes for each in own))
        for each in own:
            each.grad = None
        ledger.hold(("shard", index), GRADIENTS, states.gradient_bytes(own))
