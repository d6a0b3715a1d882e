"""Sections `actor_rollout_ref.actor` and `.ref`: the policy's training and the frozen reference."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from rlhub.config.schema import NonNegativeFloat, NonNegativeOrInf, PositiveFloat, PositiveInt, PositiveOrInf
from rlhub.config.sections.training import FSDPConfig, MegatronConfig, OptimConfig, Section, Strategy, section_of


@dataclass(slots=True, kw_only=True)
class PolicyLossConfig:
    loss_mode: str = "vanilla"
    """Policy loss: vanilla (PPO's clipped surrogate, also decoupled PPO), gspo, sapo, geo_mean, cispo, dppo_tv, dppo_kl, cpgd,
    clip_cov, kl_cov, gpg, reinforce, or one of your own from a plugin. An unknown name lists all; each is a file in
    rlhub/algorithms/policy_losses that says where it comes from and what it does."""
    kwargs: dict[str, Any] = field(default_factory=dict)
    """Knobs of the chosen loss, by its own names; checked by its own class (a wrong name lists them). Those that are named like a
    setting of this section take its value unless given here."""


@dataclass(slots=True, kw_only=True)
class ActorConfig:
    strategy: Strategy = "fsdp2"
    """Training engine: fsdp2 (fsdp means the same), or megatron, which also cuts layers and matrices; it reads `megatron`, the
    others `fsdp_config`."""
    ppo_mini_batch_size: PositiveInt = 256
    """Prompts in an optimizer step, over all ranks; divides data.train_batch_size. Equal to it: fully on-policy."""
    ppo_micro_batch_size_per_gpu: PositiveInt | None = None
    """Rows (samples) in a forward pass of a rank; null: on GPUs cut by tokens (use_dynamic_bsz), on CPU the whole mini-batch at
    once. Changes memory and speed, not results."""
    use_dynamic_bsz: bool | None = None
    """Cut micro-batches by tokens instead of rows: fuller passes with uneven lengths; null: on GPUs, unless
    ppo_micro_batch_size_per_gpu is set."""
    ppo_max_token_len_per_gpu: PositiveInt | None = None
    """With use_dynamic_bsz: most tokens in a forward pass of a rank; at least prompt + response length. null: 16384, or that
    length if it is more."""
    ppo_epochs: PositiveInt = 1
    """Passes over each batch; above 1 reuses samples off-policy."""
    shuffle: bool = False
    """Deal the batch's rows to mini-batches at random, drawn once a batch from trainer.seed and the step (all PPO epochs have the
    same mini-batches); false: in the order of the prompts. Worth it with several optimizer steps a batch."""
    clip_ratio: NonNegativeFloat = 0.2
    """PPO's eps: the probability ratio is clipped to [1 - eps, 1 + eps]."""
    clip_ratio_low: NonNegativeFloat | None = None
    """Lower eps; null: clip_ratio."""
    clip_ratio_high: NonNegativeOrInf | None = None
    """Upper eps, for example 0.28 (clip-higher); null: clip_ratio; inf: no upper bound."""
    clip_ratio_c: PositiveFloat = 3.0
    """Dual clip: bound c > 1 of the loss on tokens of negative advantage."""
    loss_agg_mode: Literal["token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm", "token-sum"] = (
        "token-mean"
    )
    """How token losses become one number; denominators are counts over the whole optimizer step."""
    loss_scale_factor: PositiveFloat | None = None
    """Divisor of seq-mean-token-sum-norm; null: data.max_response_length."""
    entropy_coeff: float = 0.0
    """Weight of the entropy bonus; above 0 keeps the policy exploring."""
    grad_clip: PositiveOrInf = 1.0
    """Largest gradient norm of an optimizer step; inf: no limit."""
    use_kl_loss: bool = False
    """Add kl_loss_coef times the KL to the reference to the loss (needs a reference pass)."""
    kl_loss_coef: NonNegativeFloat = 0.001
    """Weight of the KL loss."""
    kl_loss_type: str = "low_var_kl"
    """KL estimator of the loss: low_var_kl (k3), mse (k2), abs, kl (k1, no gradient in expectation); suffix +: k2's gradient."""
    mask_truncated: bool = False
    """Leave samples that hit max_response_length out of the loss."""
    policy_loss: PolicyLossConfig = field(default_factory=PolicyLossConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    fsdp_config: FSDPConfig = field(default_factory=FSDPConfig)
    megatron: MegatronConfig = field(default_factory=MegatronConfig)

    @property
    def section(self) -> Section:
        """What the engine is configured with."""
        return section_of(self.strategy, self.fsdp_config, self.megatron)


@dataclass(slots=True, kw_only=True)
class RefConfig:
    log_prob_micro_batch_size_per_gpu: PositiveInt | None = None
    """Rows in a forward pass of the reference; null: the actor's micro-batch."""
    log_prob_use_dynamic_bsz: bool | None = None
    """Cut by tokens; null: as the actor."""
    log_prob_max_token_len_per_gpu: PositiveInt | None = None
    """Most tokens in a forward pass; null: as the actor."""
    fsdp_config: FSDPConfig | None = None
    """Sharding of the reference; what is not set is the actor's."""
    megatron: MegatronConfig | None = None
    """The reference under the actor's strategy=megatron; what is not set is the actor's. Sizes must be, offloading may differ."""

    def section(self, actor: ActorConfig) -> Section:
        """What the reference's engine, which is the actor's kind, is configured with."""
        return section_of(actor.strategy, self.fsdp_config or actor.fsdp_config, self.megatron or actor.megatron)
