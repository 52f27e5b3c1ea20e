"""Speed, utilization, memory and data of a training run, in the progress bar, in loggers and as a page at the end."""

from lightning_liger.monitor.callback import LigerMonitor

__all__ = ["LigerMonitor"]
