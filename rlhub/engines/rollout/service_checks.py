"""What of the rollout's mode and tensor parallelism an engine cannot do, found before any process starts; loads no torch."""

from __future__ import annotations

from rlhub.config.sections.reward import JudgeConfig
from rlhub.config.sections.rollout import RolloutConfig

KEY = "actor_rollout_ref.rollout"


def one_device_problems(config: RolloutConfig, *, trains: bool) -> list[str]:
    """Of an engine without tensor parallelism."""
    size = config.tensor_model_parallel_size
    if size == 1:
        return []
    return [
        f"{KEY}.tensor_model_parallel_size={size} with {KEY}.name={config.name}: this engine has one device a copy; set it to 1, "
        f"or {KEY}.name=vllm"
    ]


def service_problems(config: RolloutConfig, *, trains: bool) -> list[str]:
    """Of an engine that serves single requests alone."""
    if config.mode == "async":
        return []
    return [f"{KEY}.name={config.name} with {KEY}.mode={config.mode}: this engine is for mode=async; set that, or name=vllm"]


def memory_share(config: RolloutConfig | JudgeConfig) -> float:
    """What vLLM takes of a GPU's whole memory, weights and key-value cache together."""
    return config.gpu_memory_utilization
