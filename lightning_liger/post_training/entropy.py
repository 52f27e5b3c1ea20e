"""The coefficient of an entropy bonus that follows a target (Skywork-OR1, arXiv:2505.22312), on the device."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from lightning_liger.losses.policy_options import PolicyOptions


class EntropyCoefficient:
    """The weight of the entropy in a loss: constant, or changed after each optimizer step.

    Adaptive, it rises by ``entropy_coef_delta`` after a step whose mean entropy is at most ``entropy_target`` and falls
    after others; it is applied in steps that follow one of at most the target, so not in the first.

    Args:
        options: Of the loss.
    """

    def __init__(self, options: PolicyOptions) -> None:
        self._options = options
        # Of the coefficient and of the entropy of the last step; not on meta, where they would have no values.
        self._state = torch.tensor((options.entropy_coef, torch.inf), dtype=torch.float64, device="cpu")
        self._sums: Tensor | None = None

    def applied(self, device: torch.device) -> Tensor:
        """The weight in this step, a scalar."""
        coefficient, last = self._state_on(device)
        if self._options.use_adaptive_entropy:
            coefficient = torch.where(last <= self._options.entropy_target, coefficient, 0.0)
        return coefficient.float()

    def current(self, device: torch.device) -> Tensor:
        """The coefficient, also where it is not applied, a scalar."""
        return self._state_on(device)[0].float()

    def add(self, entropy_sum: Tensor, num_tokens: Tensor) -> None:
        """Adds a micro-batch's sum of entropies and their number."""
        if self._options.use_adaptive_entropy:
            sums = torch.stack((entropy_sum.detach().double(), num_tokens.detach().double()))
            self._sums = sums if self._sums is None else self._sums + sums

    def step(self, sum_over_ranks: Callable[[Tensor], Tensor]) -> None:
        """Ends an optimizer step."""
        if self._sums is None:
            return
        sums, self._sums = sum_over_ranks(self._sums), None
        options, (coefficient, _) = self._options, self._state_on(sums.device)
        entropy = sums[0] / sums[1].clamp(min=1)
        up = (coefficient + options.entropy_coef_delta).clamp(max=options.entropy_coef_max)
        down = (coefficient - options.entropy_coef_delta).clamp(min=options.entropy_coef_min)
        self._state = torch.stack((torch.where(entropy <= options.entropy_target, up, down), entropy))

    def forget(self) -> None:
        """Forgets the micro-batches since the last step."""
        self._sums = None

    def state_dict(self) -> dict[str, Any]:
        """What :meth:`load_state_dict` takes."""
        coefficient, last = self._state.tolist()
        return {"entropy_coef": coefficient, "last_entropy": last}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes on from :meth:`state_dict`."""
        values = (state["entropy_coef"], state["last_entropy"])
        self._state = torch.tensor(values, dtype=torch.float64, device="cpu")

    def _state_on(self, device: torch.device) -> Tensor:
        self._state = self._state.to(device)
        return self._state
