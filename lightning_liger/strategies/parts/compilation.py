"""``compile``: decoder layers or whole models compiled by ``torch.compile``, inside of what engines add to them."""

import functools
import inspect
import time
from collections.abc import Callable
from typing import Any, Literal, get_args

import torch
from torch.nn import Module

from liger_ops.arguments import did_you_mean, shown, wrong_type, wrong_value
from lightning_liger.activations.layers import ControlledLayers
from lightning_liger.sequences.context_parallel import outermost_models

Scope = Literal["layers", "model"]
Compile = Scope | bool | dict[str, Any]
"""What is compiled, True for the layers; in a dict as ``scope``, beside other arguments of ``torch.compile``."""

_OPTIONS = sorted(inspect.signature(torch.compile).parameters.keys() - {"model"})


class Compilation:
    """Compiles what ``compile`` says of each model, and counts how often; raises for wrong choices."""

    def __init__(self, choice: Compile = False) -> None:
        if not isinstance(choice, dict | bool | str):
            raise wrong_type("compile", "a bool, 'layers', 'model' or a dict", choice)
        options = dict(choice) if isinstance(choice, dict) else {"scope": choice}
        scope = options.pop("scope", "layers")
        if isinstance(scope, bool):
            scope = "layers" if scope else None
        if scope not in (None, *get_args(Scope)):
            raise wrong_value("compile", "a bool, 'layers' or 'model', in a dict as 'scope'", choice)
        for name in options:
            if name not in _OPTIONS:
                known = f"{did_you_mean(name, _OPTIONS)}; known: {', '.join(_OPTIONS)}"
                raise ValueError(f"compile must have arguments of torch.compile, got {shown(name)}{known}")
        self.choice, self.scope, self.options = choice, scope, options
        self._num_traces = self._num_first = 0
        self._start = self._seconds = 0.0

    def __reduce__(self) -> Any:  # a copy in another process has compiled nothing yet
        return type(self), (self.choice,)

    @property
    def name(self) -> str:
        """The argument and its value, empty if nothing is compiled."""
        return f"compile={shown(self.choice)}" if self.scope else ""

    def apply(self, model: Module, controlled: ControlledLayers | None) -> None:
        """Has ``model`` or its layers compiled when they run for the first time."""
        if self.scope == "layers" and controlled is not None:
            controlled.compiled = functools.cache(self._compile)
        elif self.scope == "model":
            models = list(outermost_models(model))
            if not models:
                raise ValueError(f"{self.name} needs a Hugging Face model, got {type(model).__name__} without one")
            for each in models:
                if each._compiled_call_impl is None:
                    each.register_forward_pre_hook(self._counted(lambda *_: None))
                    each.compile(**self.options)

    def _compile(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        return torch.compile(self._counted(forward), **self.options)

    def _counted(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """``function``, which notes when it is traced."""
        note = torch.compiler.assume_constant_result(lambda: self._note())

        @functools.wraps(function)
        def counted(*args: Any, **kwargs: Any) -> Any:
            if torch.compiler.is_compiling():
                note()
            return function(*args, **kwargs)

        return counted

    def _note(self) -> None:
        self._start = self._start or time.perf_counter()
        self._num_traces += 1

    def step_ends(self) -> None:
        """After the step of an optimizer."""
        if self._num_traces and not self._num_first:
            self._num_first, self._seconds = self._num_traces, time.perf_counter() - self._start

    @property
    def summary(self) -> str:
        """What was compiled, in words, empty before the first step."""
        if not self._num_first:
            return ""
        later = self._num_traces - self._num_first
        return (
            f"{self.name}: {self._seconds:.1f} s to the end of the first step, traced {self._num_first} times in it and"
            f" {later} times later"
        )
