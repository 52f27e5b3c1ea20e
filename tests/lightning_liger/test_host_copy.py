"""Copies that the host reads later."""

import pytest
import torch

from lightning_liger.host_copy import HostCopy


def test_copy_keeps_the_value_of_its_time() -> None:
    value = torch.tensor(3.0, requires_grad=True)
    copy = HostCopy(value)
    with torch.no_grad():
        value.zero_()
    assert copy.has_arrived()
    assert (copy.wait().item(), copy.wait().requires_grad) == (3.0, False)


@pytest.mark.gpu
def test_copy_from_a_gpu_does_not_wait_until_it_is_asked_to() -> None:
    value = torch.ones((), device="cuda")
    HostCopy(value).wait()  # the first one allocates pinned memory
    torch.cuda._sleep(200_000_000)
    value.add_(1.0)
    copy = HostCopy(value)
    value.zero_()
    assert not copy.has_arrived()
    assert copy.wait().item() == 2.0
    assert copy.has_arrived()
