"""Engines see lazy logits through their tensors.

Engines look for tensors in the output of a module: to know when backward enters it (FSDP2, DeepSpeed), to find unused
parameters (DDP), to gather parameters again (ZeRO-3). Some look into containers only, and none knows lazy logits. A
forward hook before the engine's own therefore replaces lazy logits in the output by a list of their tensors, and one
after it puts the logits back, with the tensors that the engine returned. The engines differ in which tensors they need
to see and in how those are connected to the graph: see :class:`Exposure`.
"""

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module
from torch.utils.hooks import RemovableHandle
from torch.utils.weak import WeakIdKeyDictionary

from lightning_liger.lazy.logits import LazyLogits, as_lazy

_handles: WeakIdKeyDictionary = WeakIdKeyDictionary()
"""The hooks of modules, which outlive the strategy that registered them."""


@dataclass(frozen=True)
class Exposure:
    """How an engine sees lazy logits. Its hooks are methods, so that models with them can be pickled."""

    shows_head: bool
    """Whether it sees views of the head's parameters too, which keep gathered memory until the loss is computed.
    Otherwise it sees the hidden states, connected to everything that the logits depend on: for engines that only watch
    the graph."""

    def show(self, module: Module, args: Any, output: Any) -> Any:
        """The forward hook before the engine's."""
        from torch.utils._pytree import tree_flatten

        leaves, structure = tree_flatten(output)
        leaves = list(map(as_lazy, leaves))
        logits = {position: leaf for position, leaf in enumerate(leaves) if isinstance(leaf, LazyLogits)}
        if not logits:
            return output
        for position, leaf in logits.items():
            tensors = leaf.expression.tensors().values()
            leaves[position] = [t.view_as(t) for t in tensors] if self.shows_head else [_Connected.apply(*tensors)]
        return [_Hidden(structure=structure, logits=logits), *leaves]

    def hide(self, module: Module, args: Any, output: Any) -> Any:
        """The forward hook after the engine's."""
        if not (isinstance(output, list) and output and isinstance(output[0], _Hidden)):
            return output
        from torch.utils._pytree import tree_unflatten

        hidden, *leaves = output
        for position, logits in hidden.logits.items():
            tensors = leaves[position]
            if self.shows_head:
                leaves[position] = logits.of(logits.expression.with_tensors(tensors), logits.twin)
            else:
                leaves[position] = logits.same(hidden_states=tensors[0])
        return tree_unflatten(leaves, hidden.structure)

    def expose(self, module: Module) -> None:
        """Registers both hooks on a module on which the engine has hooks, in place of those of an earlier call."""
        for handle in _handles.pop(module, ()):
            handle.remove()
        _handles[module] = (
            module.register_forward_hook(self.show, prepend=True),
            module.register_forward_hook(self.hide),
        )

    def expose_within(self, wrapper: Module, module: Module) -> None:
        """Registers both hooks where the engine is ``wrapper``, which looks at the output of the ``module`` in it."""
        shown: list[RemovableHandle] = []

        def enter(wrapper: Module, args: Any) -> None:
            # For this call only, so that it comes after all other hooks of the module.
            shown.append(module.register_forward_hook(self.show))

        def leave(wrapper: Module, args: Any, output: Any) -> Any:
            while shown:
                shown.pop().remove()
            return self.hide(wrapper, args, output)

        wrapper.register_forward_pre_hook(enter)
        wrapper.register_forward_hook(leave, always_call=True)


class _Hidden(SimpleNamespace):
    """What :meth:`Exposure.hide` puts back. No dataclass and no container, so that engines leave it alone."""


class _Connected(torch.autograd.Function):
    """The first tensor, whose graph also leads to the others, although it gives them no gradient."""

    @staticmethod
    def forward(ctx: Any, hidden_states: Tensor, *parameters: Tensor) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.num_parameters = len(parameters)
        return hidden_states.detach()  # shares memory but is no view, about which FSDP2 would warn

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor | None) -> tuple[Tensor | None, ...]:
        return grad_output, *(None for _ in range(ctx.num_parameters))


HIDDEN_STATES, ALL_TENSORS = Exposure(shows_head=False), Exposure(shows_head=True)
