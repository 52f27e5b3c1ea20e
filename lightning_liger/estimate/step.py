"""One training step of a model on the meta device, as a strategy of one GPU or of several runs it."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from lightning_liger.activations.frames import tensors_in
from lightning_liger.activations.layers import ControlledLayers, Mode
from lightning_liger.activations.profile import Profile, Recorder
from lightning_liger.estimate.ledger import AttentionOfGpus, Ledger
from lightning_liger.estimate.states import States

ACTIVATIONS, LOGITS, WEIGHTS, GRADIENTS, OPTIMIZER, WORKSPACE = OWNERS = (
    "activations",
    "logits",
    "weights",
    "gradients",
    "optimizer",
    "workspace",
)
"""What memory is for; ``logits`` are from the last layer's output to the loss and back, ``workspace`` is that of
cuBLAS."""
_WORKSPACE_BYTES = 32 * 2**20
"""Of cuBLAS on Hopper GPUs, which is allocated once."""


@dataclass(frozen=True)
class Step:
    """The memory of a training step.

    Attributes:
        peak: Bytes on each GPU, in a step for which the optimizer's states exist.
        parts: The bytes of each of :data:`OWNERS` at that moment.
        profile: If all layers were recomputed, what plans are made from.
    """

    peak: int
    parts: dict[str, int]
    profile: Profile | None


def run_step(
    model: nn.Module,
    layers: ControlledLayers | None,
    batch: dict[str, Tensor],
    states: States,
    modes: Sequence[Mode] | None = None,
) -> Step:
    """Runs a step and counts its memory.

    Args:
        model: On the meta device, in the dtype of its computation; its forward returns a ``loss``.
        layers: The controlled layers of the model, None if it has none.
        batch: The forward's arguments, on the meta device.
        states: Where weights, gradients and the optimizer's states are.
        modes: Of the layers; by default all are recomputed, and the result has a profile.
    """
    ledger = Ledger()
    ledger.hold("workspace", WORKSPACE, _WORKSPACE_BYTES)
    ledger.hold("weights", WEIGHTS, states.weight_bytes)
    ledger.hold("optimizer", OPTIMIZER, states.optimizer_bytes)
    ledger.hold("buckets", GRADIENTS, states.bucket_bytes)
    ledger.owner = WEIGHTS
    for parameter in model.parameters():
        ledger.add(parameter, num_bytes=0)  # in the weights
    for tensor in (*model.buffers(), *batch.values()):
        ledger.add(tensor)
    units = _Units(ledger, states, layers)
    recorder = None
    if layers is not None:
        layers.attention = AttentionOfGpus  # in backward too, where layers run again
        layers.modes[:] = ["recompute"] * len(layers.modes) if modes is None else list(modes)
        if modes is None:
            recorder = Recorder(layers, ledger)
            layers.observer = _Observer(recorder)
    num_tokens = next(iter(batch.values())).numel()
    ledger.owner = ACTIVATIONS
    try:
        with units.hooks(model), ledger:
            with AttentionOfGpus():
                loss = _loss_of(model(**batch))
            loss.backward()
            units.finish()
    finally:
        if layers is not None:
            layers.observer = layers.attention = None
        for parameter in model.parameters():
            parameter.grad = None
    profile = None
    if recorder is not None:
        profile = recorder.finish(num_tokens, 0)
    return Step(ledger.highest, {owner: ledger.at_highest[owner] for owner in OWNERS}, profile)


def _loss_of(output: Any) -> Tensor:
    loss = output.get("loss") if isinstance(output, dict) else getattr(output, "loss", None)
    if not isinstance(loss, Tensor):
        raise TypeError(f"the model's forward must return a loss for labels, got {type(output).__name__} without")
    return loss


class _Observer:
    """Passes what layers do on to a recorder."""

    def __init__(self, recorder: Recorder) -> None:
        self.recompute_starts = recorder.recompute_starts
        self.recompute_ends = recorder.recompute_ends
        self._recorder = recorder

    def forward_starts(self, index: int, num_tokens: int) -> None:
        self._recorder.forward_starts(index)

    def forward_ends(self, index: int) -> None: ...


class _Units:
    """The layers and the rest of a model as units whose weights are gathered and whose gradients are reduced.

    With sharded weights a layer's are gathered before its forward and freed after it; in backward those of the layer
    before it are gathered too, ahead of their use. The gradients of a unit are joined in one buffer, which lives until
    the next layer's backward ends. The rest of the model is gathered from its forward to the end of backward.
    """

    def __init__(self, ledger: Ledger, states: States, layers: ControlledLayers | None) -> None:
        self._ledger = ledger
        self._states = states
        self._layers: list[nn.Module] = [] if layers is None else layers.layers
        self._backward_of: int | None = None

    @contextmanager
    def hooks(self, model: nn.Module) -> Iterator[None]:
        """Follows forward and backward of a model."""
        layers, seen = self._layers, set()
        self._parameters: list[list[nn.Parameter]] = []
        for layer in (*layers, model):
            own = [each for each in layer.parameters() if id(each) not in seen]
            seen.update(map(id, own))
            self._parameters.append(own)
        self._root = len(layers)
        for index, own in enumerate(self._parameters):
            if not self._states.gathers:
                continue
            if index == self._root:
                self._gather(index)
        handles = [
            each.register_post_accumulate_grad_hook(self._own_gradient)
            for own in self._parameters
            for each in own
            if each.requires_grad
        ]
        for index, layer in enumerate(layers):
            handles.append(layer.register_forward_pre_hook(partial(self._forward_starts, index)))
            handles.append(layer.register_forward_hook(partial(self._forward_ends, index)))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _gather(self, index: int) -> None:
        if self._states.gathers:
            num_bytes = sum(each.nbytes for each in self._parameters[index])
            self._ledger.hold(("gathered", index), WEIGHTS, num_bytes)

    def _free(self, index: int) -> None:
        self._ledger.hold(("gathered", index), WEIGHTS, 0)

    def _forward_starts(self, index: int, *_: Any) -> None:
        self._gather(index)

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

    def _reduce(self, index: int) -> None:
        """Reduces the gradients of a unit whose backward has ended."""
        ledger, states = self._ledger, self._states
        own = [each for each in self._parameters[index] if each.grad is not None]
        if not states.reduces or not own:
            return
        joined = sum(each.nbytes for each in own)
        ledger.hold("joined", GRADIENTS, 0)  # of the unit before, which has been reduced meanwhile
        ledger.hold("joined", GRADIENTS, joined)
        for each in own:
            each.grad = None
        ledger.hold(("shard", index), GRADIENTS, states.gradient_bytes(own))

    def finish(self) -> None:
        """The end of backward, and the optimizer's step."""
        if self._backward_of is not None:
            self._free(self._backward_of)
            self._reduce(self._backward_of)
        self._reduce(self._root)
        self._free(self._root)
        self._ledger.hold("joined", GRADIENTS, 0)
        self._ledger.hold("step", OPTIMIZER, self._states.step_bytes)
        self._ledger.hold("step", OPTIMIZER, 0)
