"""Lightning's strategies with fused kernels, registered by name for Trainer and Fabric."""

from lightning_liger.strategies.fsdp import FabricLigerStrategy, LigerStrategy

__all__ = ["FabricLigerStrategy", "LigerStrategy"]
