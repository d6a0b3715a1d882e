"""What of the rollout's mode, tensor parallelism and model an engine cannot do, found before any process starts; loads no
torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rlhub.config.sections.reward import JudgeConfig
from rlhub.config.sections.rollout import RolloutConfig
from rlhub.models.shape import NUM_EXPERTS

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


def expert_problems(values: Mapping[str, Any], *, where: str) -> list[str]:
    """Refuses a mixture of experts where vLLM generates: it fuses the experts of a layer into tensors of its own layout, which
    the check of the weights after each sync cannot read back (on CPU it repacks them, so they could not even be written)."""
    count = next((int(values[name]) for name in NUM_EXPERTS if values.get(name)), 1)
    if count == 1:
        return []
    return [
        f"{where}: the model is a mixture of {count} experts, which vLLM fuses into a layout of its own: new weights could not "
        f"be checked there; set {where.partition('=')[0]}=hf (slower), or have a server of another job generate (name=remote)"
    ]


def no_share(config: RolloutConfig | JudgeConfig) -> float:
    """Returns 0: the engine takes the memory that its weights and its requests need."""
    return 0.0


def memory_share(config: RolloutConfig | JudgeConfig) -> float:
    """What vLLM takes of a GPU's whole memory, weights and key-value cache together."""
    return config.gpu_memory_utilization
