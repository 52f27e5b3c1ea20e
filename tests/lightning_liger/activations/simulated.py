"""A training step of equal or different layers that allocates in numbers only, for tests of plans."""

from dataclasses import dataclass, field

from torch import nn

from lightning_liger.activations.layers import ControlledLayers


class FakeMemory:
    """An allocator that counts, and a clock that the step moves."""

    def __init__(self, size: int = 10**6) -> None:
        self.size = size
        self.allocated = self.peak = 0
        self.highest = 0
        """The peak that nobody resets but the test."""
        self.time = 0.0

    def add(self, num_bytes: float) -> None:
        self.allocated += int(num_bytes)
        self.peak = max(self.peak, self.allocated)
        self.highest = max(self.highest, self.allocated)

    def transient(self, num_bytes: float) -> None:
        self.add(num_bytes)
        self.add(-num_bytes)

    def read(self) -> tuple[int, int]:
        return self.allocated, self.peak

    def reset_peak(self) -> None:
        self.peak = self.allocated

    def sizes(self) -> tuple[int, int]:
        return self.size, self.size

    def mark(self) -> float:
        return self.time

    def seconds(self, start: float, end: float) -> float:
        return end - start


@dataclass
class Layer:
    """Bytes for each token, except for those of parameters, and seconds."""

    inputs: int = 2
    stored: int = 20
    cheap: int = 10
    in_forward: int = 6
    in_backward: int = 8
    parameters: int = 40
    seconds: float = 1.0


@dataclass
class SimulatedModel:
    """Layers with a head, whose steps tell the observer of ``control`` what a real model would."""

    layers: list[Layer]
    memory: FakeMemory = field(default_factory=FakeMemory)
    logits: int = 30
    num_rounds: int = 1
    """How often each layer is executed, one after the other, as in ALBERT."""
    has_states: bool = False
    with_gradients: set[int] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.control = ControlledLayers([nn.Identity() for _ in self.layers])
        self.memory.add(sum(layer.parameters for layer in self.layers))
        self.num_recomputed = 0

    def step(self, *batches: int) -> int:
        """Runs micro-batches of so many tokens and the optimizer; returns the step's peak."""
        self.memory.highest = 0
        for num_tokens in batches:
            self.micro_batch(num_tokens)
        parameters = sum(layer.parameters for layer in self.layers)
        self.memory.add(0 if self.has_states else 2 * parameters)
        self.has_states = True
        self.control.observer.step_ends()
        self.memory.add(-parameters)
        self.with_gradients.clear()
        return self.memory.highest

    def micro_batch(self, num_tokens: int) -> None:
        memory, control, observer = self.memory, self.control, self.control.observer
        ran: list[str] = []
        order = list(enumerate(self.layers)) * self.num_rounds
        for index, layer in order:
            control.sizes[index].inputs = layer.inputs * num_tokens
            observer.forward_starts(index, num_tokens)
            mode = control.modes[index]
            ran.append(mode)
            memory.add(layer.inputs * num_tokens)  # the output of the layer before
            memory.transient((layer.in_forward + layer.stored + layer.cheap) * num_tokens)
            memory.add(self._kept(layer, mode) * num_tokens)
            if mode == "cheap":
                control.sizes[index].cheap = layer.cheap * num_tokens
            if mode == "offload":
                memory.add(-layer.inputs * num_tokens)
        memory.transient(self.logits * num_tokens)
        for index, layer in reversed(order):
            mode = ran.pop()
            kept = self._kept(layer, mode)
            if mode in ("recompute", "offload"):
                observer.recompute_starts(index)
                self.num_recomputed += 1
                memory.time += layer.seconds
                kept = layer.stored + layer.cheap
                memory.add(kept * num_tokens)
                control.sizes[index].cheap = layer.cheap * num_tokens
                observer.recompute_ends(index)
                if mode == "offload":
                    memory.add(layer.inputs * num_tokens)
            if index not in self.with_gradients:
                memory.add(layer.parameters)
                self.with_gradients.add(index)
            memory.transient(layer.in_backward * num_tokens)
            memory.add(-(kept + layer.inputs) * num_tokens)

    @staticmethod
    def _kept(layer: Layer, mode: str) -> int:
        return {"store": layer.stored + layer.cheap, "cheap": layer.stored}.get(mode, 0)
