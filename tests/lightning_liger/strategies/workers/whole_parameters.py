"""The trained parameters, whatever engine holds them."""

from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor


def whole_parameters(model: nn.Module, wrapped: nn.Module) -> dict[str, Tensor]:
    """Names and unsharded copies of the parameters of ``model``, which the engine trained in ``wrapped``."""
    with FullyShardedDataParallel.summon_full_params(wrapped, writeback=False):
        return {
            name.replace("_fsdp_wrapped_module.", "").replace("_checkpoint_wrapped_module.", ""): _whole(parameter)
            for name, parameter in model.named_parameters(remove_duplicate=False)
        }


def _whole(parameter: Tensor) -> Tensor:
    return (parameter.full_tensor() if isinstance(parameter, DTensor) else parameter).detach().cpu().clone()
