"""What is recognised in a model, by structure and not by name, and what it is replaced by.

One rule stands for one structure. A rule proposes; :mod:`lightning_liger.patching.verify` disposes.
"""

import copy
import functools
import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable
from types import FunctionType
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from liger_ops import apply_rotary, rms_norm, silu_mul
from lightning_liger.lazy_logits import HeadParameters, LazyLogits, LogitsLedger, LogitTransform, is_loss_wanted
from lightning_liger.patching.verify import compare, random_like

_NUM_PROBE_TOKENS = 5


class Patched:
    """Base of the classes that rules make; their instances pickle by rule and original class."""

    liger_rule: ClassVar["Rule"]
    liger_original: ClassVar[type[nn.Module]]

    def __reduce_ex__(self, protocol: Any) -> Any:
        _, _, *state = super().__reduce_ex__(protocol)
        return _new_patched, (self.liger_rule, self.liger_original), *state


def _new_patched(rule: "Rule", original: type[nn.Module]) -> nn.Module:
    patched = rule.patched_class(original)
    return patched.__new__(patched)


class Rule(ABC):
    """One structure: how it is recognised, what replaces it, and how the two are compared."""

    kernel: ClassVar[str]
    """The name that users choose it by."""

    @property
    @abstractmethod
    def replacement(self) -> str:
        """What a report says the structure was replaced by."""

    @abstractmethod
    def match(self, module: nn.Module) -> bool | str:
        """True for this structure, False for another, a reason for what resembles it but cannot be replaced."""

    @abstractmethod
    def namespace(self, original: type[nn.Module]) -> dict[str, Any]:
        """What a subclass of ``original`` overrides."""

    @abstractmethod
    def verify(self, module: nn.Module) -> float:
        """The replacement's error relative to ``module``.

        Raises:
            Mismatch: If the two differ by more than rounding.
        """

    def _compare_forwards(self, probe: nn.Module, hidden_states: Tensor, *weights: Tensor) -> float:
        """The error of ``probe``'s replacement on ``hidden_states``; hooks of the module behind it are not run."""
        patched = _probe_of(probe)
        patched.__class__ = self.patched_class(type(probe))
        return compare(
            lambda: probe.forward(hidden_states), lambda: patched.forward(hidden_states), (hidden_states, *weights)
        )

    def signature(self, module: nn.Module) -> Hashable:
        """Modules of one class and signature are verified once."""
        return tuple((name, parameter.shape, parameter.dtype) for name, parameter in module.named_parameters())

    def patched_class(self, original: type[nn.Module]) -> type[nn.Module]:
        return _patched_class(self, original)

    def __eq__(self, other: object) -> bool:
        return type(self) is type(other) and vars(self) == vars(other)

    def __hash__(self) -> int:
        return hash((type(self), *vars(self).values()))


@functools.cache
def _patched_class(rule: Rule, original: type[nn.Module]) -> type[nn.Module]:
    namespace = {
        "liger_rule": rule,
        "liger_original": original,
        "__module__": original.__module__,
        "__doc__": original.__doc__,
        **rule.namespace(original),
    }
    return type(f"Liger{original.__name__}", (Patched, original), namespace)


def _takes_one_tensor(module: nn.Module) -> bool:
    return len(inspect.signature(module.forward).parameters) == 1


def _probe_of(module: nn.Module, **attributes: dict[str, Any]) -> nn.Module:
    """A shallow copy with some of its dictionaries of parameters or children exchanged."""
    probe = copy.copy(module)
    probe.__dict__.update(attributes)
    return probe


def _probe_device(module: nn.Module) -> torch.device:
    # A module that its owner wrapped in FSDP has handed its parameters to the wrapper.
    parameter = next(module.parameters(), None)
    return torch.device("cpu") if parameter is None or parameter.device.type == "meta" else parameter.device


class RMSNormRule(Rule):
    """``y = x / rms(x) * (offset + weight)``, in one of its roundings (see :func:`liger_ops.rms_norm`)."""

    kernel = "rms_norm"

    def __init__(self, casting: str, offset: float) -> None:
        self.casting = casting
        self.offset = offset

    @property
    def replacement(self) -> str:
        return f"rms_norm ({self.casting} casting" + (f", offset {self.offset:g})" if self.offset else ")")

    def match(self, module: nn.Module) -> bool | str:
        lone_weight = not list(module.children()) and [name for name, _ in module.named_parameters()] == ["weight"]
        if lone_weight and module.weight.dim() == 1 and self._eps_name(module) and _takes_one_tensor(module):
            return True
        if "norm" in type(module).__name__.lower():
            return "is not of one weight vector, an eps and one input"
        return False

    @staticmethod
    def _eps_name(module: nn.Module) -> str | None:
        return next((name for name in ("variance_epsilon", "eps") if hasattr(module, name)), None)

    def namespace(self, original: type[nn.Module]) -> dict[str, Any]:
        casting, offset, eps_name = self.casting, self.offset, self._eps_name

        def forward(self: nn.Module, hidden_states: Tensor) -> Tensor:
            eps = getattr(self, eps_name(self))
            return rms_norm(hidden_states, self.weight.shape, self.weight, eps, casting=casting, offset=offset)

        return {"forward": forward}

    def signature(self, module: nn.Module) -> Hashable:
        return super().signature(module), getattr(module, self._eps_name(module))

    def verify(self, module: nn.Module) -> float:
        generator = torch.Generator().manual_seed(0)
        device, dtype = _probe_device(module), module.weight.dtype
        shape = torch.empty(_NUM_PROBE_TOKENS, *module.weight.shape, device="meta")
        worst = 0.0
        # float32 weights with bfloat16 activations tell the roundings apart by the output's dtype.
        for input_dtype, weight_dtype in ((dtype, dtype), (torch.bfloat16, torch.float32)):
            weight = nn.Parameter(random_like(module.weight, generator, weight_dtype, device).detach())
            hidden_states = random_like(shape, generator, input_dtype, device)
            probe = _probe_of(module, _parameters={"weight": weight})
            error = self._compare_forwards(probe, hidden_states, weight)
            worst = max(worst, error)
        return worst


def _is_silu(activation: Any) -> bool:
    probe = torch.linspace(-4.0, 4.0, 9, device="cpu")
    return callable(activation) and torch.allclose(activation(probe), nn.functional.silu(probe))


class GatedMLPRule(Rule):
    """``down_proj(silu(gate_proj(x)) * up_proj(x))``."""

    kernel = "silu_mul"
    replacement = "silu_mul"

    def match(self, module: nn.Module) -> bool | str:
        children = dict(module.named_children())
        if not {"gate_proj", "up_proj", "down_proj"} <= children.keys():
            return False
        if not _is_silu(getattr(module, "act_fn", None)):
            return f"its activation is {type(getattr(module, 'act_fn', None)).__name__}, not SiLU"
        if children.keys() - {"gate_proj", "up_proj", "down_proj", "act_fn"} or not _takes_one_tensor(module):
            return "has other children, or its forward takes more than hidden states"
        return True

    def namespace(self, original: type[nn.Module]) -> dict[str, Any]:
        def forward(self: nn.Module, x: Tensor) -> Tensor:
            return self.down_proj(silu_mul(self.gate_proj(x), self.up_proj(x)))

        return {"forward": forward}

    def verify(self, module: nn.Module) -> float:
        generator = torch.Generator().manual_seed(0)
        device = _probe_device(module)
        children = dict(module.named_children())
        # What the forward does with its children does not depend on their size.
        for name, shape in {"gate_proj": (24, 16), "up_proj": (24, 16), "down_proj": (16, 24)}.items():
            children[name] = nn.Linear(shape[1], shape[0], bias=False, device="meta")
            weight = random_like(children[name].weight, generator, torch.float32, device)
            children[name].weight = nn.Parameter(weight.detach())
        hidden_states = random_like(torch.empty(_NUM_PROBE_TOKENS, 16, device="meta"), generator, torch.float32, device)
        weights = [child.weight for name, child in children.items() if name != "act_fn"]
        return self._compare_forwards(_probe_of(module, _modules=children), hidden_states, *weights)


class RotaryRule(Rule):
    """Attention whose forward calls its module's ``apply_rotary_pos_emb(q, k, cos, sin, ...)``, half-split.

    The forward is bound anew, with the same code and a copy of its globals in which that one name is exchanged: nobody
    else's globals change, and no forward is rewritten.
    """

    kernel = "rope"
    replacement = "apply_rotary"
    _NAME = "apply_rotary_pos_emb"

    def match(self, module: nn.Module) -> bool | str:
        forward = type(module).forward
        if not isinstance(forward, FunctionType) or self._NAME not in forward.__code__.co_names:
            return False
        function = forward.__globals__.get(self._NAME)
        if not callable(function):
            return f"{self._NAME} is not a function of its module"
        if list(inspect.signature(function).parameters)[:4] != ["q", "k", "cos", "sin"]:
            return f"{self._NAME} does not take (q, k, cos, sin)"
        return True

    def signature(self, module: nn.Module) -> Hashable:
        return type(module).forward.__globals__[self._NAME]

    def namespace(self, original: type[nn.Module]) -> dict[str, Any]:
        forward = original.forward
        scope = {**forward.__globals__, self._NAME: _fused_rotary(forward.__globals__[self._NAME])}
        rebound = FunctionType(forward.__code__, scope, forward.__name__, forward.__defaults__, forward.__closure__)
        rebound.__kwdefaults__ = forward.__kwdefaults__
        return {"forward": functools.update_wrapper(rebound, forward)}

    def verify(self, module: nn.Module) -> float:
        generator = torch.Generator().manual_seed(0)
        device = _probe_device(module)
        original = type(module).forward.__globals__[self._NAME]
        replacement = _fused_rotary(original)

        def random(*shape: int) -> Tensor:
            return random_like(torch.empty(shape, device="meta"), generator, torch.float32, device)

        head_dim = getattr(module, "head_dim", 16)
        q, k = (random(2, _NUM_PROBE_TOKENS, num_heads, head_dim).transpose(1, 2) for num_heads in (4, 2))
        cos, sin = (random(2, _NUM_PROBE_TOKENS, head_dim).detach() for _ in range(2))
        q, k = q.detach().requires_grad_(), k.detach().requires_grad_()
        return compare(lambda: original(q, k, cos, sin), lambda: replacement(q, k, cos, sin), (q, k))


@functools.cache
def _fused_rotary(original: Callable[..., Any]) -> Callable[..., Any]:
    """``original`` where it is called in a way that :func:`liger_ops.apply_rotary` does not cover, else that."""

    @functools.wraps(original)
    def apply_rotary_pos_emb(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *args: Any, **kwargs: Any) -> Any:
        heads_dim = kwargs.get("unsqueeze_dim", 1)
        covered = (
            not args
            and kwargs.keys() <= {"unsqueeze_dim"}
            and heads_dim in (1, 2)
            and q.dim() == k.dim() == 4
            and cos.dim() == 3
            and cos.shape[-1] == q.shape[-1] == k.shape[-1]
        )
        if not covered:
            return original(q, k, cos, sin, *args, **kwargs)
        return apply_rotary(q, k, cos, sin, heads_dim=heads_dim)

    return apply_rotary_pos_emb


class HeadRule(Rule):
    """The LM head: a linear layer that returns :class:`LazyLogits` while gradients or a loss are wanted."""

    kernel = "linear_cross_entropy"
    replacement = "LazyLogits, linear_cross_entropy"

    def match(self, module: nn.Module) -> bool | str:
        if type(module).forward is not nn.Linear.forward:
            return f"the head is {type(module).__name__}, not torch.nn.Linear"
        return True

    def namespace(self, original: type[nn.Module]) -> dict[str, Any]:
        def forward(self: nn.Linear, input: Tensor) -> Tensor | LazyLogits:
            differentiable = torch.is_grad_enabled() and (input.requires_grad or self.weight.requires_grad)
            if not (differentiable or is_loss_wanted()) or torch.compiler.is_compiling():
                return original.forward(self, input)
            device_type = input.device.type
            autocast = torch.is_autocast_enabled(device_type)
            dtype = torch.get_autocast_dtype(device_type) if autocast else self.weight.dtype
            ledger = self.__dict__.setdefault("logits_ledger", LogitsLedger())
            return LazyLogits(input, HeadParameters(self.weight, self.bias, dtype, ledger), LogitTransform(dtype))

        return {"forward": forward}

    def verify(self, module: nn.Module) -> float:
        return 0.0  # the projection that is put off is nn.Linear's own


RULES: tuple[Rule, ...] = (
    RMSNormRule("llama", 0.0),
    RMSNormRule("gemma", 1.0),
    RMSNormRule("gemma", 0.0),
    GatedMLPRule(),
    RotaryRule(),
)
"""Rules for the modules inside a model, in the order in which they are tried."""
