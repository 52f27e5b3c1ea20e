"""A layer of residual streams."""

from typing import Any

import torch
from torch import Tensor, nn

from liger_ops.arguments import check_device, check_floating_dtype, check_integer, check_number, wrong_type
from liger_ops.mhc.coefficients import mhc_coeffs
from liger_ops.mhc.streams import mhc_post_res, mhc_pre


class HyperConnection(nn.Module):
    """A layer with manifold-constrained hyper-connections: ``[*, num_streams, num_channels]`` to the same.

    The layer gets :func:`liger_ops.mhc_pre` of the streams, and :func:`liger_ops.mhc_post_res` adds its output to them,
    both with coefficients of :func:`liger_ops.mhc_coeffs`, whose parameters are ``phi``, ``b``, and ``alpha_pre``,
    ``alpha_post`` and ``alpha_res``, which begin at 0.01: at first, coefficients hardly depend on the input.

    Args:
        layer: ``[*, num_channels]`` to the same.
        num_streams, num_channels: Of input and output.
        tmax, rms_eps, pre_eps, sinkhorn_eps, post_mult: As in :func:`liger_ops.mhc_coeffs`.
        device, dtype: Of the parameters, without the layer's.
    """

    def __init__(
        self,
        layer: nn.Module,
        num_streams: int,
        num_channels: int,
        *,
        tmax: int = 20,
        rms_eps: float = 1e-6,
        pre_eps: float = 0.0,
        sinkhorn_eps: float = 1e-6,
        post_mult: float = 2.0,
        device: torch.device | str | int | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        if not isinstance(layer, nn.Module):
            raise wrong_type("layer", "a torch.nn.Module", layer)
        for name, size in {"num_streams": num_streams, "num_channels": num_channels, "tmax": tmax}.items():
            check_integer(name, size, at_least=1)
        for name, eps in {"rms_eps": rms_eps, "pre_eps": pre_eps, "sinkhorn_eps": sinkhorn_eps}.items():
            check_number(name, eps, at_least=0)
        check_number("post_mult", post_mult)
        check_device("device", device)
        check_floating_dtype("dtype", dtype)
        super().__init__()
        self.layer = layer
        self.options: dict[str, Any] = {
            "tmax": tmax, "rms_eps": rms_eps, "pre_eps": pre_eps, "sinkhorn_eps": sinkhorn_eps, "post_mult": post_mult
        }  # fmt: skip
        num_columns = num_streams * (num_streams + 2)
        self.phi = nn.Parameter(torch.empty(num_streams * num_channels, num_columns, device=device, dtype=dtype))
        self.b = nn.Parameter(torch.empty(num_columns, device=device, dtype=dtype))
        self.alpha_pre, self.alpha_post, self.alpha_res = (
            nn.Parameter(torch.empty(1, device=device, dtype=dtype)) for _ in range(3)
        )
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Without the layer's."""
        nn.init.normal_(self.phi, std=0.02)
        nn.init.zeros_(self.b)
        for alpha in (self.alpha_pre, self.alpha_post, self.alpha_res):
            nn.init.constant_(alpha, 0.01)

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Passes further arguments on to the layer."""
        alphas = self.alpha_pre, self.alpha_post, self.alpha_res
        h_pre, h_post, h_res = mhc_coeffs(x, self.phi, self.b, *alphas, **self.options)
        return mhc_post_res(x, self.layer(mhc_pre(x, h_pre), *args, **kwargs), h_post, h_res)

    def extra_repr(self) -> str:
        return ", ".join(f"{name}={value}" for name, value in self.options.items())
