"""What strategies of the Trainer's do to have their gradients' norm logged, and steps without a finite one ended."""

from typing import Any

from lightning_liger.strategies.precision import OnNonfiniteGrad, check_on_nonfinite_grad, clip_with


class TrainerClipping:
    """Placed before a strategy of the Trainer's, has its precision plugin clip as ours do."""

    def __init__(self, on_nonfinite_grad: OnNonfiniteGrad = "ignore", **kwargs: Any) -> None:
        check_on_nonfinite_grad(on_nonfinite_grad)
        self.on_nonfinite_grad = on_nonfinite_grad
        super().__init__(**kwargs)

    @property
    def precision_plugin(self) -> Any:
        return super().precision_plugin  # type: ignore[misc]

    @precision_plugin.setter
    def precision_plugin(self, precision_plugin: Any) -> None:
        if precision_plugin is not None:
            clip_with(precision_plugin, self.on_nonfinite_grad)
        super(TrainerClipping, type(self)).precision_plugin.fset(self, precision_plugin)  # type: ignore[misc]
