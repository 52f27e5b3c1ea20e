"""Tensors of several devices: every op refuses them, at the first call and at every later one."""

import pytest
import torch

from tests.liger_ops.test_ops import CASES, SIZES, as_tuple, assert_same

DEVICES = [pytest.param("cpu", "meta")]
if torch.cuda.is_available():
    DEVICES = [pytest.param("cuda", other, marks=pytest.mark.gpu) for other in ("cpu", "meta")]
    DEVICES.append(pytest.param("cuda:0", "cuda:1", marks=pytest.mark.multi_gpu))


@pytest.mark.parametrize(("device", "other"), DEVICES)
@pytest.mark.parametrize("name", [name for name, case in CASES.items() if sum(map(len, case.make(*SIZES))) > 1])
@pytest.mark.parametrize("with_gradient", [False, True], ids=["", "gradient"])
def test_tensor_of_another_device_raises_before_and_after_good_calls(
    name: str, with_gradient: bool, device: str, other: str
) -> None:
    case = CASES[name]
    tensors = [x.to(device) for each in case.make(*SIZES) for x in each]
    if with_gradient:
        tensors[0].requires_grad_()

    def assert_each_raises() -> None:
        for index, tensor in enumerate(tensors):
            moved = [*tensors[:index], tensor.to(other), *tensors[index + 1 :]]
            with pytest.raises((ValueError, RuntimeError), match="device"):
                case.fused(*moved)

    assert_each_raises()
    expected = as_tuple(case.fused(*tensors))
    assert_each_raises()
    # An access to memory that is not there would break every later call.
    assert_same([*as_tuple(case.fused(*tensors))], [*expected])
