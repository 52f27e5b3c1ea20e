"""A monitor that only prints a table."""

from lightning_liger.monitor import LigerMonitor


class Summary(LigerMonitor):
    """Measures runs whose settings have no monitor. Of a class of its own, as checkpoints hold one state of each.

    Args:
        skip_steps: Steps at the start (compilation, allocation) that are left out of the speed.
    """

    def __init__(self, skip_steps: int = 2) -> None:
        super().__init__(skip_steps=skip_steps, gradient_norm=False, page=None)
