"""Monitors that only print a table."""

from lightning_utilities.core.rank_zero import rank_zero_deprecation

from lightning_liger.monitor import LigerMonitor


class Summary(LigerMonitor):
    """Measures runs whose settings have no monitor. Of a class of its own, as checkpoints hold one state of each.

    Args:
        skip_steps: Steps at the start (compilation, allocation) that are left out of the speed.
    """

    def __init__(self, skip_steps: int = 2) -> None:
        super().__init__(skip_steps=skip_steps, gradient_norm=False, page=None)


class TrainingSummary(Summary):
    """:class:`~lightning_liger.LigerMonitor` without a page and norms of gradients. Deprecated.

    Args:
        skip_steps: As of :class:`~lightning_liger.LigerMonitor`.

    Raises:
        TypeError: If ``skip_steps`` is not an integer.
        ValueError: If ``skip_steps`` is negative.
    """

    def __init__(self, skip_steps: int = 2) -> None:
        rank_zero_deprecation("TrainingSummary is deprecated: LigerMonitor prints its table, too.")
        super().__init__(skip_steps)
