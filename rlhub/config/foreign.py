"""Keys that command lines written for other HybridFlow frameworks bring along.

Three kinds: aliases (another spelling of a key of ours), keys whose value changes nothing here (accepted without a word at
that value), and keys of what this version does not have (an error with the reason, so nobody believes it is on).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rlhub.config.schema import scalar

_MEGATRON_SECTIONS = tuple(
    f"{part}megatron." for part in ("actor_rollout_ref.actor.", "actor_rollout_ref.ref.", "critic.", "reward_model.", "")
)
_TRAINED = ("actor_rollout_ref.actor.", "critic.")

ALIASES = {
    "critic.model.fsdp_config": "critic.fsdp_config",
    "reward_model.model.megatron": "reward_model.megatron",
    "trainer.max_critic_ckpt_to_keep": "trainer.max_actor_ckpt_to_keep",
    **{f"{section}context_parallel_size": f"{section}context_model_parallel_size" for section in _MEGATRON_SECTIONS},
    **{f"{role}optim.lr_decay_style": f"{role}optim.lr_scheduler_type" for role in _TRAINED},
    **{f"{role}optim.clip_grad": f"{role}grad_clip" for role in _TRAINED},
}
"""Other spelling -> ours; everything below the key moves along."""

OFF = frozenset(f"algorithm.rollout_correction.{name}" for name in ("rollout_is", "rollout_rs"))
"""Settings of ours that null turns off, and that other command lines turn off by false."""

ANY = object()
"""As an accepted value: whatever it says, it cannot matter while its feature's switch is off."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Foreign:
    """A key (or, ending in `.`, everything below it) that is not ours: values that change nothing, and why others cannot be."""

    key: str
    accepted: tuple[Any, ...]
    reason: str

    def covers(self, key: str) -> bool:
        return key.startswith(self.key) if self.key.endswith(".") else key == self.key

    def accepts(self, value: Any) -> bool:
        """bool and int are told apart: 1 is not a way to say True in a configuration."""
        return any(item is ANY or (type(item) is type(value) and item == value) for item in self.accepted)


_MEGATRON: dict[str, tuple[tuple[Any, ...], str]] = {
    "expert_tensor_parallel_size": (
        (None,),
        "each expert's matrices are cut over tensor_model_parallel_size ranks, as the others",
    ),
    "use_mbridge": ((ANY,), ""),
    "vanilla_mbridge": ((ANY,), ""),  # of a bridge between weight names; ours has no alternatives
    "use_dist_checkpointing": ((False, None), "checkpoints have one format, which any engine and layout resumes from"),
    "dist_checkpointing_path": ((None,), "the model is read from model.path, a Hugging Face folder"),
    "dtype": ((None,), "the dtype is set by model_dtype (bf16 or fp32)"),
    "seed": ((None,), "the run has one seed, trainer.seed"),
    "use_remove_padding": ((True,), "the megatron engine always computes on packed rows"),
    "load_weight": ((True,), "the weights are always read from model.path"),
    "forward_only": ((ANY,), ""),
    "override_ddp_config.": ((None,), "gradients are reduced as use_distributed_optimizer says; no other entries are read"),
    "extra.": ((None,), "entries of Megatron-core's TransformerConfig go to override_transformer_config"),
}
"""Keys of a megatron section elsewhere -> values that change nothing here, and why others cannot be."""
_ULYSSES = "this version has no sequence parallelism"
_PER_GPU = "sizes over all ranks are not supported; use the key ending in _per_gpu"
_A = "actor_rollout_ref.actor."
_R = "actor_rollout_ref.rollout."


def _row(key: str, accepted: tuple[Any, ...], reason: str) -> Foreign:
    return Foreign(key=key, accepted=accepted, reason=reason)


def _own_pool(role: str) -> str:
    return f"a role gets processes of its own by trainer.pools.NAME.n_gpus_per_node=N trainer.placement.{role}=NAME"


# The first row that covers a key decides: single keys stand before the group they are in.
FOREIGN = (
    *(_row(f"{section}{key}", *row) for section in _MEGATRON_SECTIONS for key, row in _MEGATRON.items()),
    *(
        _row(f"{part}optim.min_lr", (0.0, 0, None), "the lowest rate is optim.min_lr_ratio, a share of optim.lr")
        for part in _TRAINED
    ),
    _row("actor_rollout_ref.ref.strategy", (None,), f"the reference uses the actor's engine, {_A}strategy"),
    *(_row(f"{part}ulysses_sequence_parallel_size", (1, None), _ULYSSES) for part in (_A, "actor_rollout_ref.ref.", "critic.")),
    _row("algorithm.rollout_correction.loss_type", ("ppo_clip",), f"the loss is {_A}policy_loss.loss_mode in every mode"),
    _row(f"{_R}calculate_log_probs", (True,), "the log-probs of the sampled tokens are always recorded"),
    _row(f"{_R}multi_turn.interaction_config_path", (None,), f"an environment is a workflow, {_R}agent.default_agent_loop"),
    _row(f"{_R}multi_turn.use_inference_chat_template", (False,), "the tokens trained on are those that were sampled"),
    _row(
        f"{_R}multi_turn.tokenization_sanity_check_mode", (ANY,), ""
    ),  # no text is tokenized again, so there is nothing to check
    _row(f"{_R}agent.agent_loop_config_path", (None,), f"name the workflow's class: {_R}agent.default_agent_loop=file.py:Class"),
    _row(
        f"{_R}agent.agent_loop_manager_class", (None,), f"name the workflow's class: {_R}agent.default_agent_loop=file.py:Class"
    ),
    _row(f"{_R}agent.custom_async_server.", (None,), f"the engine is {_R}name"),
    _row("reward_model.micro_batch_size", (None,), _PER_GPU),
    _row("reward_model.ulysses_sequence_parallel_size", (1, None), _ULYSSES),
    _row("reward_model.model.external_lib", (None,), "modules to import are named by trainer.plugins"),
    _row("actor_rollout_ref.hybrid_engine", (True,), _own_pool("rollout")),
    _row("reward_model.enable_resource_pool", (False, None), _own_pool("reward_model")),
    *(_row(f"reward_model.{size}", (ANY,), "") for size in ("n_gpus_per_node", "nnodes")),  # of a pool that is not enabled
    _row(f"{_A}ppo_micro_batch_size", (None,), _PER_GPU),
    _row(f"{_A}use_torch_compile", (False,), "this version does not compile models"),
    _row(f"{_R}log_prob_micro_batch_size", (None,), _PER_GPU),
    _row("actor_rollout_ref.ref.log_prob_micro_batch_size", (None,), _PER_GPU),
    _row("critic.ppo_micro_batch_size", (None,), _PER_GPU),
    _row("actor_rollout_ref.model.use_liger", (False,), "this version has no fused kernels of its own"),
    _row("actor_rollout_ref.model.use_fused_kernels", (False,), "log-probs are computed in chunks without fused kernels"),
    _row("actor_rollout_ref.model.use_shm", (False,), "models are read from where they are"),
    _row("data.return_raw_chat", (False,), "the prompt's text is always carried"),
    _row("trainer.val_only", (False,), "to validate without training: python -m rlhub.trainer.main_eval"),
    _row("trainer.del_local_ckpt_after_load", (False,), "checkpoints are only removed by trainer.max_actor_ckpt_to_keep"),
)


def resolve_aliases(values: Mapping[str, Any], problems: list[str]) -> dict[str, Any]:
    """Flat settings with every alias under our own key; two spellings with different values are a problem."""
    resolved: dict[str, Any] = {}
    for key, value in values.items():
        ours = _ours(key)
        if value is False and ours in OFF:
            value = None
        if ours in resolved and resolved[ours] != value:
            problems.append(f"{key}={value!r} and {ours}={resolved[ours]!r} are the same setting with different values")
        resolved[ours] = value
    return resolved


def _ours(key: str) -> str:
    for alias, ours in ALIASES.items():
        if key == alias or key.startswith(f"{alias}."):
            return ours + key[len(alias) :]
    return key


def judge(key: str, value: Any) -> str | None:
    """For a key that is not ours: "" if the value changes nothing, a message if it would, None if the key is unheard of."""
    for row in FOREIGN:
        if row.covers(key):
            if row.accepts(value):
                return ""
            harmless = " or ".join(scalar(item) for item in row.accepted if item is not ANY)
            return f"{key}={scalar(value)}: {row.reason}{f' (only {harmless} is accepted)' if harmless else ''}"
    return None
