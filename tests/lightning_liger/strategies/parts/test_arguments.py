"""Arguments of a yaml reach the strategy; wrong ones are in ``bad_inputs_strategies.py``."""

import pytest

from lightning_liger.strategies.registration import REGISTRATIONS

CLASSES = {cls.__name__: cls for each in REGISTRATIONS for cls in (each.trainer, each.fabric)}
TRAINER = [name for name in CLASSES if not name.startswith("Fabric")]
YAML = {
    "kernels": ["none", ["rope", "silu_mul"], {"linear_cross_entropy": {"chunk_bytes": 4096}, "rope": False}],
    "on_nonfinite_grad": ["ignore"],
    "activation_checkpointing": ["full", 3, ["LlamaDecoderLayer"]],
    "memory_budget": ["auto", 0.9, 61.3],
    "fault_tolerance": [False],
}


@pytest.mark.parametrize("name", TRAINER)
def test_yaml_gives_the_strategy_its_arguments(made_by_yaml, name):
    engine_options = {
        "LigerDDPStrategy": {"process_group_backend": "gloo", "find_unused_parameters": True},
        "LigerDeepSpeedStrategy": {"stage": 3},
        "LigerFSDPStrategy": {"auto_wrap_policy": ["torch.nn.Linear"], "state_dict_type": "sharded"},
        "LigerModelParallelStrategy": {"on_nonfinite_grad": "skip", "save_distributed_checkpoint": False},
    }
    for index in range(3):
        options = {key: values[index % len(values)] for key, values in YAML.items()}
        options.pop("memory_budget" if index < 2 else "activation_checkpointing")
        options |= engine_options.get(name, {})
        made = made_by_yaml({"class_path": f"lightning_liger.{name}", "init_args": options})
        assert type(made) is CLASSES[name]
        assert (made.kernels, made.fault_tolerance) == (options["kernels"], False)
        assert made.on_nonfinite_grad == options["on_nonfinite_grad"]
        assert made._activations.checkpointing == options.get("activation_checkpointing")
        assert made._activations.budget == options.get("memory_budget")
        assert getattr(made, "process_group_backend", None) == options.get("process_group_backend")
        assert getattr(made, "zero_stage_3", False) == ("stage" in options)
        assert made._checkpoints.writes_itself == (name in ("LigerFSDPStrategy", "LigerDeepSpeedStrategy"))
