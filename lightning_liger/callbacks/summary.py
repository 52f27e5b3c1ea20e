"""The former name of :class:`~lightning_liger.LigerMonitor`."""

from lightning_utilities.core.rank_zero import rank_zero_deprecation

from lightning_liger.monitor import LigerMonitor


class TrainingSummary(LigerMonitor):
    """:class:`~lightning_liger.LigerMonitor` without a page and norms of gradients. Deprecated.

    Args:
        skip_steps: As of :class:`~lightning_liger.LigerMonitor`.

    Raises:
        TypeError: If ``skip_steps`` is no integer.
        ValueError: If ``skip_steps`` is negative.
    """

    def __init__(self, skip_steps: int = 2) -> None:
        rank_zero_deprecation("TrainingSummary is deprecated: LigerMonitor prints its table, too.")
        super().__init__(skip_steps=skip_steps, gradient_norm=False, page=None)
