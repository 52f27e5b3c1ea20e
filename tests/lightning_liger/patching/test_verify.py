"""Verify before swapping: a replacement that differs is not made, whatever the rules say."""

import importlib
import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_liger import apply_liger_kernels
from lightning_liger.patching.rules import gated_mlp, norm, rotary
from lightning_liger.patching.verify import Mismatch, compare
from tests.lightning_liger.tiny import tiny_batch, tiny_llama

modeling_llama = importlib.import_module("transformers.models.llama.modeling_llama")


def slightly_wrong(function: Callable[..., Any], error: float) -> Callable[..., Any]:
    def wrong(*args: Any, **kwargs: Any) -> Any:
        result = function(*args, **kwargs)
        return result * (1 + error) if isinstance(result, Tensor) else tuple(part * (1 + error) for part in result)

    return wrong


@pytest.fixture
def _forget_rotary_functions() -> Iterator[None]:
    """What a function computes is found once in a process, with whatever kernel is there at that time."""
    rotary._form_of.cache_clear()
    yield
    rotary._form_of.cache_clear()


@pytest.mark.usefixtures("_forget_rotary_functions")
@pytest.mark.parametrize(
    ("namespace", "function", "kernel", "reason"),
    [
        (vars(norm), "rms_norm", "rms_norm", r"^rms_norm \(llama casting\) is not equivalent"),
        (gated_mlp._GATES, "silu_mul", "silu_mul", "^silu_mul is not equivalent"),
        (vars(rotary), "apply_rotary", "rope", "^apply_rotary_pos_emb is not apply_rotary"),
    ],
    ids=lambda value: value if isinstance(value, str) and value.isidentifier() else "",
)
def test_slightly_wrong_kernel_is_caught(
    namespace: dict[str, Any], function: str, kernel: str, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(namespace, function, slightly_wrong(namespace[function], 1e-4))
    report = apply_liger_kernels(tiny_llama())
    entry = next(entry for entry in report.entries if entry.kernel == kernel)
    assert entry.replacement is None
    assert re.match(reason + ": output differs by 1.0e-04 of its largest value", entry.reason)
    assert {e.kernel for e in report.entries if e.replacement is None} == {kernel}
    with pytest.raises(ValueError, match="output differs by"):
        apply_liger_kernels(tiny_llama(), [kernel])


def test_rotary_function_is_verified_again_for_a_models_own_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    assert apply_liger_kernels(tiny_llama(), ["rope"]).num_replaced == 2  # what it computes is known from here on
    monkeypatch.setattr(rotary, "apply_rotary", slightly_wrong(rotary.apply_rotary, 1e-4))
    with pytest.raises(ValueError, match=r"LlamaAttention: apply_rotary is not equivalent: output differs by 1\.0e-04"):
        apply_liger_kernels(tiny_llama(), ["rope"])


DEVICE_ERRORS = {
    "out_of_memory": torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"),
    "accelerator": torch.AcceleratorError("an illegal memory access was encountered"),
    "cuda": RuntimeError("CUDA error: device-side assert triggered"),
    "driver": RuntimeError("CUDA driver error: invalid argument"),
    "cublas": RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
    "cudnn": RuntimeError("cuDNN error: CUDNN_STATUS_NOT_INITIALIZED"),
    "triton": RuntimeError("Triton Error [CUDA]: out of memory"),
    "cpu_memory": RuntimeError("[enforce fail at alloc_cpu.cpp:121] DefaultCPUAllocator: can't allocate memory"),
    "memory": MemoryError(),
}


@pytest.mark.usefixtures("_forget_rotary_functions")
@pytest.mark.parametrize("error", DEVICE_ERRORS.values(), ids=DEVICE_ERRORS)
def test_error_of_the_device_is_raised_and_nothing_is_replaced(
    error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*args: Any, **kwargs: Any) -> Tensor:
        raise error

    places: tuple[tuple[Any, str], ...] = (
        (modeling_llama.LlamaMLP, "forward"),
        (norm, "rms_norm"),
        (rotary, "apply_rotary"),
        (type(modeling_llama.ACT2FN["silu"]), "forward"),  # is called to see whether it is an activation
    )
    for owner, function in places:
        rotary._form_of.cache_clear()
        with monkeypatch.context() as patch:
            patch.setattr(owner, function, fails if function != "forward" else lambda self, x: fails())
            model = tiny_llama(num_hidden_layers=1)
            before = [(type(module), dict(vars(module))) for module in model.modules()]
            with pytest.raises(type(error)) as raised:
                apply_liger_kernels(model)
            assert raised.value is error
            assert [(type(module), dict(vars(module))) for module in model.modules()] == before


@pytest.mark.parametrize(
    "message",
    [
        "Expected all tensors to be on the same device, but found at least two devices, cuda:0 and cpu!",
        "mat1 and mat2 shapes cannot be multiplied (5x16 and 24x16)",
        "",
    ],
)
def test_error_of_the_module_means_that_it_is_not_the_same(message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(self: nn.Module, hidden_states: Tensor) -> Tensor:
        raise RuntimeError(message)

    monkeypatch.setattr(modeling_llama.LlamaRMSNorm, "forward", fails)
    entry = next(entry for entry in apply_liger_kernels(tiny_llama()).entries if entry.kernel == "rms_norm")
    assert entry.reason == f"rms_norm (llama casting) is not equivalent: {message or 'RuntimeError'}"


@pytest.mark.parametrize("context", [torch.no_grad, torch.device], ids=["no_grad", "meta_device"])
def test_verification_works_inside_contexts_that_models_are_built_in(context: Any) -> None:
    model = tiny_llama()
    with context("meta") if context is torch.device else context():
        assert apply_liger_kernels(model).num_replaced == 10
    assert all(parameter.device.type == "cpu" for parameter in model.parameters())
    model(**tiny_batch()).loss.backward()


@pytest.mark.parametrize(
    ("replacement", "message"),
    [
        (lambda x: x * 2.0001, "output differs by"),
        (lambda x: x.detach() * 2 + x - x.detach(), "gradient differs by"),
        (lambda x: (x * 2).double(), "output is torch.float64"),
        (lambda x: (x * 2)[None], r"output is torch.float32 \(1, 2\), the original's torch.float32 \(2,\)"),
        (lambda x: (x * 2, x), "2 outputs, the original has 1"),
        (lambda x: x * float("nan"), "output differs by nan"),
    ],
    ids=["value", "gradient", "dtype", "shape", "number", "nan"],
)
def test_compare_names_the_difference(replacement: Callable[[Tensor], Any], message: str) -> None:
    x = torch.tensor([1.0, -4.0], requires_grad=True)
    with pytest.raises(Mismatch, match=message):
        compare(lambda: x * 2, lambda: replacement(x), [x])
