"""One training step of a model on the meta device, as a strategy of one GPU or of several runs it."""

import re
from collections import Counter
from collections.abc import Callable, Collection, Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

from torch import Tensor, nn

from lightning_liger.activations.frames import tensors_in
from lightning_liger.activations.layers import ControlledLayers, Mode, control_layers, find_layers, release_layers
from lightning_liger.activations.profile import Profile, Recorder, Segment
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
_NUMBER_OF_LAYER = re.compile(r"layer_?(i|n)|idx|index")
_ENDS = 2
"""How many layers at each end have other neighbours than those between them, or none."""
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
        added = self.profile.added_bytes

        def total(segment: Segment) -> int:
            return sum(added(segment, index, mode) for index, mode in enumerate(modes) if mode != "recompute")

        worst = max(self.parts, key=lambda segment: self.profile.peaks[segment] + total(segment))
        parts = self.parts[worst] + Counter()
        parts[ACTIVATIONS] += total(worst)
        return {owner: parts[owner] for owner in OWNERS}


class _Part(NamedTuple):
    """A part of a step: from where a layer's forward or its recomputation starts to the next such moment."""

    layer: int | None
    is_forward: bool
    growth: Counter[str]
    """From the start of the part to its end, of each owner."""
    peak: Counter[str]
    """The same at its peak."""


def run_step(
    model: nn.Module,
    make_batch: Callable[[], dict[str, Tensor]],
    states: States,
    frees_early: bool = True,
) -> Step:
    """Runs a step and counts its memory.

    Of layers that are alike only some run; the others take what these took.

    Args:
        model: On the meta device, in the dtype of its computation; its forward returns a ``loss``.
        make_batch: Makes the forward's arguments, on the meta device.
        states: Where weights, gradients and the optimizer's states are.
        frees_early: Whether the last step's gradients are freed before forward, as our strategies do, or before
            backward, as Lightning does.
    """
    layers = find_layers(model)
    few = _representatives(layers)
    if len(few) < len(layers):
        step = _run(model, layers, few, make_batch(), states, frees_early)
        if step is not None:
            return step
    step = _run(model, layers, list(range(len(layers))), make_batch(), states, frees_early)
    assert step is not None  # each part is there
    return step


def _representatives(layers: list[nn.Module]) -> list[int]:
    """The layers to run: the first and the last two, next to which others are, and one of each kind between them."""
    inner = _inner_kinds(layers)
    ends = {index for index in range(len(layers)) if not _ENDS <= index < len(layers) - _ENDS}
    return sorted(ends | set(inner.values()))


def _inner_kinds(layers: list[nn.Module]) -> dict[Hashable, int]:
    """The first layer of each kind that is not at the ends."""
    kinds: dict[Hashable, int] = {}
    for index in range(_ENDS, len(layers) - _ENDS):
        kinds.setdefault(_kind(layers[index]), index)
    return kinds


def _kind(layer: nn.Module) -> Hashable:
    """Equal for layers that do the same."""
    shapes = tuple((name, each.shape, each.requires_grad) for name, each in layer.named_parameters())
    settings = tuple(
        (name, value)
        for part in layer.modules()
        for name, value in vars(part).items()
        if isinstance(value, bool | int | float | str) and not _NUMBER_OF_LAYER.search(name)
    )
    return type(layer), shapes, settings


def _run(
    model: nn.Module,
    layers: list[nn.Module],
    few: list[int],
    batch: dict[str, Tensor],
    states: States,
    frees_early: bool,
) -> Step | None:
    """The step, in which only the layers ``few`` run; None if they did not run as layers that follow each other do."""
    ledger = Ledger()
    ledger.owner = WEIGHTS
    for parameter in model.parameters():
        ledger.add(parameter, num_bytes=0)  # in the states
    for tensor in (*model.buffers(), *batch.values()):
        ledger.add(tensor)
    ledger.hold("workspace", WORKSPACE, _WORKSPACE_BYTES)
    ledger.hold("weights", WEIGHTS, states.weight_bytes)
    ledger.hold("optimizer", OPTIMIZER, states.optimizer_bytes)
    ledger.hold("buckets", GRADIENTS, states.bucket_bytes)
    if states.keeps_gradients:
        ledger.hold("kept gradients", GRADIENTS, states.gradient_bytes(states.with_gradients(model)))
    num_tokens = next(iter(batch.values())).numel()
    with _skipped(layers, few):
        controlled = control_layers(model) or ControlledLayers([])
        controlled.modes[:] = ["recompute"] * len(few)
        controlled.context = AttentionOfGpus  # in backward too, where layers run again
        recorder = Recorder(controlled, ledger)
        ledger.spans.clear()
        controlled.observer = observer = _Observer(recorder)
        units = _Units(ledger, states, layers, few)
        ledger.owner = ACTIVATIONS
        try:
            with units.hooks(model), ledger:
                if not frees_early:
                    ledger.hold("old gradients", GRADIENTS, states.gradient_bytes(states.with_gradients(model)))
                ledger.hold("buckets of forward", GRADIENTS, states.forward_bytes)
                with AttentionOfGpus():
                    loss = _loss_of(model(**batch))
                ledger.hold("old gradients", GRADIENTS, 0)
                ledger.hold("buckets of forward", GRADIENTS, 0)
                ledger.hold("buckets of backward", GRADIENTS, states.backward_bytes)
                loss.backward()
                units.finish()
        finally:
            release_layers(model)
            for parameter in model.parameters():
                parameter.grad = None
    profile = recorder.finish(num_tokens, 0)
    ends = [start for start, _ in ledger.spans[1:]] + [ledger.spans[-1][1]]
    parts = [
        _Part(index, is_forward, _difference(end, start), _difference(peak, start))
        for (index, is_forward), (start, peak), end in zip(observer.events, ledger.spans, ends, strict=True)
    ]
    return _whole(parts, ledger.spans[0][0], profile, _stand_ins(layers, few), ledger.most[LOGITS])


def _difference(left: Counter[str], right: Counter[str]) -> Counter[str]:
    return Counter({owner: left[owner] - right[owner] for owner in OWNERS})


def _stand_ins(layers: list[nn.Module], few: list[int]) -> list[int]:
    """For each layer the number, among those that run, of the one that it is like."""
    inner = _inner_kinds(layers)
    return [few.index(index if index in few else inner[_kind(layer)]) for index, layer in enumerate(layers)]


def _whole(
    parts: list[_Part], start: Counter[str], profile: Profile, stand_ins: list[int], logits_bytes: int
) -> Step | None:
    """The step of all layers, of the parts that ran."""
    num_ran, num_layers = len(profile.layers), len(stand_ins)
    in_order = [(None, True), *((index, True) for index in range(num_ran))]
    in_order += [(index, False) for index in reversed(range(num_ran))]
    follow = [(part.layer, part.is_forward) for part in parts] == in_order
    if not follow and num_ran < num_layers:
        return None
    if follow:
        forward, backward = parts[1 : num_ran + 1], parts[:num_ran:-1]
        sequence = [parts[0], *(forward[each]._replace(layer=i) for i, each in enumerate(stand_ins))]
        sequence += [backward[each]._replace(layer=i) for i, each in reversed(list(enumerate(stand_ins)))]
    else:
        sequence = parts
    level, live = start.copy(), [0] * num_layers
    peaks: dict[Segment, int] = {}
    at_peak: dict[Segment, Counter[str]] = {}
    for part in sequence:
        if part.layer is not None:
            live[part.layer] = live[part.layer] + 1 if part.is_forward else max(0, live[part.layer] - 1)
        segment = Segment(tuple(live), None if part.is_forward else part.layer)
        highest = Counter({owner: level[owner] + part.peak[owner] for owner in OWNERS})
        if highest.total() > peaks.get(segment, 0):
            peaks[segment], at_peak[segment] = highest.total(), highest
        for owner in OWNERS:
            level[owner] += part.growth[owner]
    profile = replace(profile, peaks=peaks, layers=tuple(profile.layers[each] for each in stand_ins))
    return Step(profile, at_peak, logits_bytes)


@contextmanager
def _skipped(layers: list[nn.Module], few: Collection[int]) -> Iterator[None]:
    """Lets all layers but ``few`` return their input, in the form of the last layer of their class that ran."""
    forms: dict[type, tuple[Any, ...] | None] = {}

    def note(kind: type, layer: nn.Module, args: Any, output: Any) -> None:
        forms[kind] = output if isinstance(output, tuple) else None

    def forward_of(kind: type) -> Callable[..., Any]:
        def forward(*args: Any, **kwargs: Any) -> Any:
            hidden_states, form = tensors_in((args, kwargs))[0], forms[kind]
            return hidden_states if form is None else (hidden_states, *form[1:])

        return forward

    skipped = [layer for index, layer in enumerate(layers) if index not in few]
    handles = [layers[index].register_forward_hook(partial(note, type(layers[index]))) for index in few]
    try:
        for layer in skipped:
            vars(layer)["forward"] = forward_of(type(layer))
        yield
    finally:
        for layer in skipped:
            vars(layer).pop("forward", None)
        for handle in handles:
            handle.remove()


def _loss_of(output: Any) -> Tensor:
    loss = output.get("loss") if isinstance(output, dict) else getattr(output, "loss", None)
    if not isinstance(loss, Tensor):
        raise TypeError(f"the model's forward must return a loss for labels, got {type(output).__name__} without")
    return loss


class _Observer:
    """Passes what layers do on to a recorder, and notes it."""

    def __init__(self, recorder: Recorder) -> None:
        self.recompute_ends = recorder.recompute_ends
        self.events: list[tuple[int | None, bool]] = [(None, True)]
        """The layer whose forward (True) or recomputation (False) began each part."""
        self._recorder = recorder

    def forward_starts(self, index: int, num_tokens: int) -> None:
        self.events.append((index, True))
        self._recorder.forward_starts(index)

    def recompute_starts(self, index: int) -> bool:
        self.events.append((index, False))
        self._recorder.recompute_starts(index)
        return True


class _Units:
    """The layers and the rest of a model as units whose weights are gathered and whose gradients are reduced.

    With sharded weights a layer's are gathered before its forward and freed after it; in backward those of the layer
    before it are gathered too, ahead of their use. The gradients of a unit are joined in one buffer, which lives until
    the next layer's backward ends. The rest of the model is gathered from its forward to the end of backward.
    DeepSpeed copies each gradient into a bucket instead, and keeps weights gathered for longer.
    """

    def __init__(self, ledger: Ledger, states: States, layers: list[nn.Module], few: list[int]) -> None:
        self._ledger = ledger
        self._states = states
        self._all = layers
        self._layers = [layers[index] for index in few]
        self._backward_of: int | None = None

    @contextmanager
    def hooks(self, model: nn.Module) -> Iterator[None]:
        """Follows forward and backward of a model."""
        layers = self._layers
        inside = {id(parameter) for layer in self._all for parameter in layer.parameters()}
        self._parameters = [list(layer.parameters()) for layer in layers]
        self._parameters.append([each for each in model.parameters() if id(each) not in inside])
        self._root = len(layers)
        self._gather(self._root)
        self._ledger.hold("gathered", WEIGHTS, self._states.gathered_bytes)
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
        if self._states.fills_buckets:
            parameter.grad = None
            if not self._states.keeps_gradients:
                self._ledger.hold(("shard", id(parameter)), GRADIENTS, self._states.gradient_bytes([parameter]))

    def _reduce(self, index: int) -> None:
        """Reduces the gradients of a unit whose backward has ended."""
        ledger, states = self._ledger, self._states
        if not states.reduces or all(each.grad is None for each in self._parameters[index]):
            return
        own = states.trained(self._parameters[index])
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
        self._ledger.hold("gathered", WEIGHTS, 0)
        self._ledger.hold("joined", GRADIENTS, 0)
        self._ledger.hold("buckets of backward", GRADIENTS, 0)
        self._ledger.hold("step", OPTIMIZER, self._states.step_bytes)
        self._ledger.hold("step", OPTIMIZER, 0)
