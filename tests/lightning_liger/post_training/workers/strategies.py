"""The strategies of two processes that post-training is tested under."""

from lightning.pytorch.strategies import Strategy

from lightning_liger import (
    LigerDDPStrategy,
    LigerDeepSpeedStrategy,
    LigerFSDPStrategy,
    LigerModelParallelStrategy,
)


def strategy_of(name: str) -> Strategy:
    """The strategy of a run by the run's name, which begins with that of the engine."""
    if name.startswith("ddp"):
        return LigerDDPStrategy()
    if name == "fsdp":
        return LigerFSDPStrategy(state_dict_type="full")
    if name == "model_parallel":
        return LigerModelParallelStrategy(
            data_parallel_size=2, tensor_parallel_size=1, save_distributed_checkpoint=False
        )
    if name == "context_parallel":
        return LigerDDPStrategy(context_parallel_size=2)
    zero = {"stage": 3, "stage3_param_persistence_threshold": 0}
    return LigerDeepSpeedStrategy(config={"zero_allow_untested_optimizer": True, "zero_optimization": zero})
