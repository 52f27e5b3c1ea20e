"""``cuda_graphs=True``: strategies whose parameters stay where they are replay layers from CUDA graphs."""

from typing import Any

import torch
from torch.nn import Module

from liger_ops.arguments import check_bool, shown
from lightning_liger.activations.graphs import CudaBackend, LayerGraphs
from lightning_liger.activations.layers import ControlledLayers
from lightning_liger.strategies.parts.activations import ActivationControl


class LayerCapture:
    """Has the layers of a strategy's models captured if ``wanted``.

    Args:
        strategy: The strategy.
        wanted: The argument ``cuda_graphs``.
        activations: Controls the layers.
        **others: Arguments of the strategy that do not go together with it, each None or at its default.

    Raises:
        TypeError: If ``wanted`` is no bool.
        ValueError: If the strategy or one of its other arguments does not allow it.
    """

    def __init__(self, strategy: Any, wanted: bool, activations: ActivationControl, **others: Any) -> None:
        check_bool("cuda_graphs", wanted)
        self.wanted = wanted
        self._activations = activations
        if not wanted:
            return
        if not strategy._keeps_parameters:
            raise ValueError(
                f"cuda_graphs=True needs parameters that stay in place, got {type(strategy).__name__}, which moves them:"
                " use 'liger' or 'liger_ddp'"
            )
        for name, value in others.items():
            if value is not None:
                raise ValueError(
                    f"{name}={shown(value)} cannot be combined with cuda_graphs=True: leave out one of them"
                )
        if activations.recomputes:
            raise ValueError(
                f"{activations.recomputes} cannot be combined with cuda_graphs=True: graphs keep the memory that"
                " recomputation would free. Leave out one of them"
            )

    def apply(self, model: Module, device: torch.device) -> None:
        """Captures the layers of ``model``, which are controlled, from its next steps on."""
        if not self.wanted:
            return
        if device.type != "cuda":
            raise ValueError(f"cuda_graphs=True needs a CUDA GPU, got the device {str(device)!r}: leave it out there")
        if any(getattr(module, "gradient_checkpointing", False) is True for module in model.modules()):
            raise ValueError(
                "cuda_graphs=True needs layers that are not recomputed: call the model's"
                " gradient_checkpointing_disable() before training"
            )
        found = self._controlled(model)
        if found is None:
            raise ValueError(f"cuda_graphs=True needs a model with repeated layers, got {type(model).__name__} without")
        found.graphs = LayerGraphs(CudaBackend(device), len(found.layers))

    def _controlled(self, model: Module) -> ControlledLayers | None:
        modules = set(model.modules())
        return next((each for each in self._activations.controlled if modules.issuperset(each.layers)), None)

    def release(self) -> None:
        """Frees the graphs: layers run eagerly from now on."""
        for each in self._activations.controlled:
            each.graphs = None

    @property
    def summary(self) -> str:
        """What is captured and what is not, in words; empty before the first capture."""
        graphs = [each.graphs for each in self._activations.controlled if each.graphs is not None]
        return "; ".join(each.summary for each in graphs if each.summary)
