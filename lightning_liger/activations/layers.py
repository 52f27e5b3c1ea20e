"""The layers of a model whose activations are controlled, each in a mode of its own.

=============  =====================================================================
``store``      autograd keeps what it always keeps
``cheap``      the same without tensors that are cheap to make again (the default)
``recompute``  the layer's inputs only; the layer runs again in backward
``offload``    the same in the least memory: its inputs are in host memory meanwhile
               (on GPUs)
=============  =====================================================================

Losses and gradients are the same in all of them. Only the class of a layer's instance changes, to a subclass whose
forward looks up the mode; parameters, their names and other instances do not.
"""

import functools
from collections import Counter
from collections.abc import Callable, Collection
from contextlib import AbstractContextManager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass, field
from operator import methodcaller
from typing import Any, Literal

import torch
from lightning_utilities.core.rank_zero import rank_zero_warn
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from transformers import Cache

from liger_ops.recipes import listening
from lightning_liger.activations.cheap import CheapTensors, Kept
from lightning_liger.activations.frames import Frame, tensors_in
from lightning_liger.activations.offload import HostMemory, Offloaded
from lightning_liger.activations.pace import Pace
from lightning_liger.subclasses import made_subclass

Mode = Literal["store", "cheap", "recompute", "offload"]
_CONTROL = "_liger_activations"
_MIN_OFFLOADED_BYTES = 2**20


@dataclass
class LayerSizes:
    """The bytes of a layer's tensors when it last ran; most are only measured under an observer.

    Attributes:
        inputs: The inputs that "offload" moves to host memory.
        cheap: What "cheap" does not keep.
        remade: The largest of these tensors.
        tiled: What the layer would keep besides if parts of it did not run in tiles, without cheap tensors.
        tiled_cheap: The same of cheap tensors.
    """

    inputs: int = 0
    cheap: int = 0
    remade: int = 0
    tiled: int = 0
    tiled_cheap: int = 0


@dataclass(eq=False)
class ControlledLayers:
    """The layers of one model and their modes.

    Attributes:
        layers: In the order of the model's modules.
        modes: One for each layer; a change takes effect in its next forward.
        sizes: Of each layer.
        has_run: Whether any of them ran, other than compiled.
        graphs: None, or the :class:`~lightning_liger.activations.graphs.LayerGraphs` that run the layers.
        compiled: None, or what makes a compiled function of the forward of a class of layers.
        pace: None, or what says when cheap tensors are kept; without an observer and without graphs.
        observer: None, or what layers tell, on the host, in the order of execution: ``forward_starts(index,
            num_tokens)`` of the first input's rows, and in backward, before and after a layer runs again,
            ``recompute_starts(index)``, which returns whether to measure, and ``recompute_ends(index)``.
        context: Makes a context that each run of a layer enters, the second one too.
    """

    layers: list[nn.Module]
    modes: list[Mode] = field(init=False)
    sizes: list[LayerSizes] = field(init=False)
    has_run: bool = False
    graphs: Any = None
    compiled: Callable[[Callable[..., Any]], Callable[..., Any]] | None = None
    pace: Pace | None = None
    observer: Any = None
    context: Callable[[], AbstractContextManager[Any]] = nullcontext
    _host_memory: Callable[[torch.device], HostMemory] = field(default_factory=lambda: functools.cache(HostMemory))

    def __post_init__(self) -> None:
        self.modes = ["cheap"] * len(self.layers)
        self.sizes = [LayerSizes() for _ in self.layers]

    def __reduce__(self) -> Any:  # nothing controls a copied or pickled model
        return type(None), ()

    def run(self, index: int, layer: nn.Module, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: Any) -> Any:
        """Runs ``layer``, whose own forward is ``forward``, in its mode."""
        self.has_run = True
        if self.graphs is not None and self.graphs.applies_to(layer) and not _hooks_are_taken():
            return self.graphs.run(index, layer, functools.partial(self._run, index, layer, forward), args, kwargs)
        return self._run(index, layer, forward, *args, **kwargs)

    def _run(self, index: int, layer: nn.Module, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        inputs = tensors_in((args, kwargs)) if torch.is_grad_enabled() and not _hooks_are_taken() else []
        if not inputs:
            with self.context():
                return forward(*args, **kwargs)
        first = inputs[0]
        num_tokens = first.shape[:-1].numel()
        if self.observer is not None:
            self.sizes[index].inputs = sum(each.nbytes for each in inputs if _can_leave(each))
            self.observer.forward_starts(index, num_tokens)
        mode = self.modes[index]
        if mode in ("recompute", "offload"):
            if any(_has_history(layer, each) for each in (*args, *kwargs.values())):
                rank_zero_warn(
                    "lightning-liger: layers that extend the keys and values of earlier tokens in a cache are"
                    " not recomputed in backward, which would extend them twice. Set use_cache=False in the model's"
                    " config for training"
                )
                mode = "cheap"
            else:  # a second run would extend a cache of keys and values again
                args = tuple(None if isinstance(value, Cache) else value for value in args)
                kwargs = {name: None if isinstance(value, Cache) else value for name, value in kwargs.items()}
                kwargs |= {"use_cache": False} if kwargs.get("use_cache") else {}
        run = LayerRun(self, index, mode, first.device, forward)
        if mode == "store" or (mode == "cheap" and self.compiled):  # the compiler decides what it keeps
            return run(*args, **kwargs)
        if mode == "cheap":
            pace = self.pace if self.observer is None and self.graphs is None else None
            if pace is not None and pace.keeps(num_tokens):
                return run(*args, **kwargs)
            cheap = CheapTensors(first.device.type)
            with listening(cheap.listener), saved_tensors_hooks(cheap.pack, _unpack):
                outputs = run(*args, **kwargs)
            cheap.forget()
            run.sizes.cheap = cheap.dropped_bytes
            if pace is not None and index == len(self.layers) - 1:
                pace.pass_ends(num_tokens, sum(each.cheap for each in self.sizes))
            return outputs
        return Frame(layer, run, self._offload if mode == "offload" and first.is_cuda else Kept).run(args, kwargs)

    def _offload(self, tensor: Tensor) -> Kept | Offloaded:
        return Offloaded(self._host_memory(tensor.device), tensor) if _can_leave(tensor) else Kept(tensor)


@dataclass(frozen=True, eq=False)
class LayerRun:
    """One run of a layer, and its repetition in backward."""

    control: ControlledLayers
    index: int
    mode: Mode
    device: torch.device
    forward: Callable[..., Any]

    @property
    def sizes(self) -> LayerSizes:
        return self.control.sizes[self.index]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        token = _run.set(self)  # in both runs: backward has a thread of its own
        try:
            with self.control.context():
                return self.forward(*args, **kwargs)
        finally:
            _run.reset(token)

    def recompute_starts(self) -> CheapTensors | None:
        """Tells the observer; returns what counts the cheap tensors of this run, None if nobody wants to know."""
        self.sizes.tiled = self.sizes.tiled_cheap = 0
        observer = self.control.observer
        is_measured = observer is not None and observer.recompute_starts(self.index)
        drops = self.mode == "offload"  # only where memory is so tight, until the layer's backward ends
        return CheapTensors(self.device.type, drops=drops) if is_measured or drops else None

    def recompute_ends(self, cheap: CheapTensors | None) -> None:
        if cheap is not None:
            self.sizes.cheap, self.sizes.remade = cheap.dropped_bytes, cheap.largest_bytes
        if self.control.observer is not None:
            self.control.observer.recompute_ends(self.index)


_unpack = methodcaller("get")
_run: ContextVar[LayerRun | None] = ContextVar("lightning_liger_layer_run", default=None)
current_run = _run.get
"""Returns the layer whose forward runs, also when it runs again in backward; None outside of such layers."""


def _hooks_are_taken() -> bool:
    """Whether somebody else keeps what autograd saves, as activation checkpointing around this layer does."""
    state: Any = torch._C._autograd
    return not state._saved_tensors_hooks_is_enabled() or state._top_saved_tensors_default_hooks(False) is not None


def _can_leave(tensor: Tensor) -> bool:
    return tensor.requires_grad and not tensor.is_leaf and tensor.nbytes >= _MIN_OFFLOADED_BYTES


def _has_history(layer: nn.Module, value: Any) -> bool:
    """Whether ``value`` is a cache with keys and values of earlier tokens for the layer, or may be one."""
    if not isinstance(value, Cache):
        return False
    own = (getattr(module, "layer_idx", None) for module in layer.modules())
    layer_index = next((each for each in own if isinstance(each, int)), None)
    try:
        return layer_index is None or bool(value.get_seq_length(layer_index))
    except (ValueError, IndexError, NotImplementedError):  # caches of states that have no length
        return True


class _Controlled:
    """Base of the classes that controlled layers get."""


@made_subclass
def _controlled_class(original: type[nn.Module]) -> type[nn.Module]:
    @functools.wraps(original.forward)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        own = functools.partial(original.forward, self)
        control, index = vars(self).get(_CONTROL, (None, 0))
        if control is None or torch.compiler.is_compiling():  # the compiler decides by itself what it keeps
            return own(*args, **kwargs)
        if control.compiled is not None:
            own = functools.partial(control.compiled(original.forward), self)
        return control.run(index, self, own, args, kwargs)

    names = {name: getattr(original, name) for name in ("__module__", "__qualname__", "__doc__")}
    return type(original.__name__, (_Controlled, original), {**names, "forward": forward})


def control_layers(model: nn.Module, classes: Collection[type[nn.Module]] | None = None) -> ControlledLayers | None:
    """Controls the activations of the layers in ``model``; again if it did so before, with all modes "cheap".

    Args:
        model: Any module; call this before an engine wraps its layers.
        classes: The classes of the layers; by default those that :func:`find_layers` finds.

    Returns:
        The layers, None if there are none.
    """
    release_layers(model)
    layers = [layer for layer in find_layers(model, classes) if "forward" not in vars(layer)]
    if not layers:
        return None
    control = ControlledLayers(layers)
    for index, layer in enumerate(layers):
        vars(layer)[_CONTROL] = control, index
        if not isinstance(layer, _Controlled):
            layer.__class__ = _controlled_class(type(layer))
    return control


def release_layers(model: nn.Module) -> None:
    """Gives the layers in ``model`` their own classes back, unless an engine has changed the class since."""
    for layer in model.modules():
        if isinstance(layer, _Controlled):
            vars(layer).pop(_CONTROL, None)
            if type(layer).__mro__[1] is _Controlled:
                layer.__class__ = type(layer).__mro__[2]


def find_layers(model: nn.Module, classes: Collection[type[nn.Module]] | None = None) -> list[nn.Module]:
    """The layers of ``model`` that follow each other, in order, none inside of another.

    Args:
        model: Any module.
        classes: Of the layers. By default those that a Hugging Face model in ``model`` says must not be split; of other
            models, the items of one class that a ``ModuleList`` or ``Sequential`` has more than one of.
    """
    wanted = tuple(classes) if classes is not None else tuple(unsplit_classes(model))
    return _outermost(model, (lambda module, parent: isinstance(module, wanted)) if wanted else _is_repeated)


def unsplit_classes(model: nn.Module) -> set[type[nn.Module]]:
    """The classes of the layers that a Hugging Face model in ``model`` says must not be split."""
    names: set[str] = set()
    for module in model.modules():
        names.update(getattr(module, "_no_split_modules", None) or ())
    return {type(module) for module in model.modules() if names & {each.__name__ for each in type(module).__mro__}}


def _is_repeated(module: nn.Module, parent: nn.Module | None) -> bool:
    if not isinstance(parent, nn.ModuleList | nn.Sequential) or not any(module.children()):
        return False
    return Counter(map(type, parent.children()))[type(module)] > 1 and any(True for _ in module.parameters())


def _outermost(module: nn.Module, is_layer: Callable[..., bool], parent: nn.Module | None = None) -> list[nn.Module]:
    if is_layer(module, parent):
        return [module]
    return [layer for child in module.children() for layer in _outermost(child, is_layer, module)]
