"""Arguments that a strategy cannot follow are refused when it is made; those of a yaml reach it."""

import pytest

from lightning_liger.strategies.registration import REGISTRATIONS

CLASSES = {cls.__name__: cls for each in REGISTRATIONS for cls in (each.trainer, each.fabric)}
TRAINER = [name for name in CLASSES if not name.startswith("Fabric")]
by_class = pytest.mark.parametrize("strategy", CLASSES.values(), ids=CLASSES)
YAML = {
    "kernels": ["none", ["rope", "silu_mul"], {"linear_cross_entropy": {"chunk_bytes": 4096}, "rope": False}],
    "on_nonfinite_grad": ["ignore"],
    "activation_checkpointing": ["full", 3, ["LlamaDecoderLayer"]],
    "memory_budget": ["auto", 0.9, 61.3],
    "fault_tolerance": [False],
}


@by_class
def test_arguments_of_other_strategies_are_refused(strategy):
    if strategy.__name__ == "LigerDeepSpeedStrategy":
        strategy(on_nonfinite_grad="ignore", context_parallel_size=1)
    if strategy.__name__ in TRAINER and strategy.__name__ != "LigerDeepSpeedStrategy":
        strategy = CLASSES[f"Fabric{strategy.__name__}"]
    with pytest.raises((TypeError, ValueError), match="on_nonfinite_grad"):
        strategy(on_nonfinite_grad="skip")
    with pytest.raises((TypeError, ValueError), match="context_parallel_size"):
        strategy(context_parallel_size=2)


def test_refusal_names_the_similar_argument():
    for name, misspelled, similar in (
        ("LigerFSDPStrategy", "use_orig_param", "use_orig_params"),
        ("FabricLigerDDPStrategy", "static_grap", "static_graph"),
        ("LigerDDPStrategy", "kernel", "kernels"),
    ):
        with pytest.raises(TypeError, match=f"did you mean .*'{similar}'"):
            CLASSES[name](**{misspelled: True})


@pytest.mark.parametrize("name", TRAINER)
def test_yaml_gives_the_strategy_its_arguments(made_by_yaml, name):
    of_engine = {
        "LigerDDPStrategy": {"process_group_backend": "gloo", "find_unused_parameters": True},
        "LigerDeepSpeedStrategy": {"stage": 3},
        "LigerFSDPStrategy": {"auto_wrap_policy": ["torch.nn.Linear"], "state_dict_type": "sharded"},
        "LigerModelParallelStrategy": {"on_nonfinite_grad": "skip", "save_distributed_checkpoint": False},
    }
    for index in range(3):
        options = {key: values[index % len(values)] for key, values in YAML.items()}
        options.pop("memory_budget" if index < 2 else "activation_checkpointing")
        options |= of_engine.get(name, {})
        made = made_by_yaml({"class_path": f"lightning_liger.{name}", "init_args": options})
        assert type(made) is CLASSES[name]
        assert (made.kernels, made.fault_tolerance) == (options["kernels"], False)
        assert made.on_nonfinite_grad == options["on_nonfinite_grad"]
        assert made._activations.checkpointing == options.get("activation_checkpointing")
        assert made._activations.budget == options.get("memory_budget")
        assert getattr(made, "process_group_backend", None) == options.get("process_group_backend")
        assert getattr(made, "zero_stage_3", False) == ("stage" in options)
        assert made.saves_folders == (name in ("LigerFSDPStrategy", "LigerDeepSpeedStrategy"))
