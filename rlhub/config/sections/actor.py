"""Sections `actor_rollout_ref.actor` and `actor_rollout_ref.ref`: the policy's updates, and the frozen reference."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, Literal

from rlhub.config.schema import NonNegativeFloat, NonNegativeOrInf, PositiveFloat, PositiveInt, PositiveOrInf
from rlhub.config.sections.training import FSDPConfig, MegatronConfig, ModelConfig, OptimConfig, Section, Strategy, section_of


@dataclass(slots=True, kw_only=True)
class PolicyLossConfig:
    loss_mode: str = "vanilla"
    """Policy loss: vanilla (PPO's clipped surrogate, also decoupled PPO), gspo, sapo, geo_mean, cispo, dppo_tv, dppo_kl, cpgd,
    clip_cov, kl_cov, gpg, reinforce, or one of your own from a plugin. An unknown name lists all; rlhub/algorithms/policy_losses
    has their formulas and sources."""
    kwargs: dict[str, Any] = field(default_factory=dict)
    """Knobs of the chosen loss, by its own names; the loss's own class checks them, and an unknown name lists all. A knob with
    the name of a setting of this section takes its value unless it is given here."""


@dataclass(slots=True, kw_only=True)
class ActorConfig:
    strategy: Strategy = "fsdp2"
    """Training engine: fsdp2 (fsdp means the same) reads fsdp_config; megatron, which also divides layers and matrices over
    ranks, reads `megatron`."""
    ppo_mini_batch_size: PositiveInt = 256
    """Prompts in an optimizer step, over all ranks; divides data.train_batch_size. Training is on-policy where they are equal."""
    ppo_micro_batch_size_per_gpu: PositiveInt | None = None
    """Rows (samples) in a forward pass of a rank; null: on GPUs use_dynamic_bsz decides, on CPU the whole mini-batch at once. It
    changes memory and speed, not results."""
    use_dynamic_bsz: bool | None = None
    """Cut micro-batches by tokens instead of rows, which fills passes better with uneven lengths; null: on GPUs, unless
    ppo_micro_batch_size_per_gpu is set."""
    ppo_max_token_len_per_gpu: PositiveInt | None = None
    """With use_dynamic_bsz: largest number of tokens in a forward pass of a rank, at least prompt + response length; null: 16384,
    or that length if it is more."""
    prefix_packing: bool = False
    """Compute tokens that rows of a forward pass have in common from their start (the prompt of n samples, turns of an episode)
    once, for the policy and the reference (fsdp2). It saves most with long prompts and large n; numbers differ by rounding. Token
    budgets then count such tokens once. actor.shuffle scatters the samples of a prompt, which leaves less to share."""
    router_replay: Literal["disabled", "rollout"] = "disabled"
    """Mixtures of experts: rollout sends each token to the experts that the rollout engine sent it to, in the pass for old
    log-probs and in the updates (rollout routing replay, R3, arXiv 2510.11370); disabled routes tokens anew. Rounding makes the
    two engines choose other experts for some tokens, whose probabilities then differ by far more than rounding: set it where
    mismatch/* is large or training of a mixture of experts is unstable. The reference keeps its own routing. It costs a byte for
    each token, layer and expert of a token."""
    ppo_epochs: PositiveInt = 1
    """Passes over each batch; more than 1 reuse samples off-policy."""
    target_kl: PositiveFloat | None = None
    """Take no further optimizer step on a batch once the mean of log(pi_old / pi) over the units of the last step is above it;
    null: take all."""
    shuffle: bool = False
    """Assign the batch's rows to mini-batches at random, drawn once a batch from trainer.seed and the step (all PPO epochs have
    the same mini-batches); false: in the order of the prompts. Set it with several optimizer steps a batch."""
    clip_ratio: NonNegativeFloat = 0.2
    """PPO's eps; the probability ratio is clipped to [1 - eps, 1 + eps]."""
    clip_ratio_low: NonNegativeFloat | None = None
    """Lower eps; null: clip_ratio."""
    clip_ratio_high: NonNegativeOrInf | None = None
    """Upper eps, for example 0.28 (clip-higher); null: clip_ratio; inf: no upper bound."""
    clip_ratio_c: PositiveFloat = 3.0
    """Dual clip's bound c > 1 of the loss on tokens of negative advantage."""
    loss_agg_mode: Literal["token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm", "token-sum"] = (
        "token-mean"
    )
    """Aggregation of token losses to one number; its denominators are counts over the whole optimizer step."""
    log_prob_level: Literal["token", "action", "chunk"] = "token"
    """Unit whose probability ratio the loss takes: a token; an action of model.vla.action_dim tokens; or chunk, the whole
    response. A unit's log-probability is the sum of its tokens', and denominators and metrics count units."""
    loss_scale_factor: PositiveFloat | None = None
    """Divisor of seq-mean-token-sum-norm; null: data.max_response_length."""
    entropy_coeff: float = 0.0
    """Weight of the entropy bonus; above 0 keeps the policy exploring."""
    calculate_entropy: bool = True
    """Report actor/entropy in each update without a bonus too; false spares a pass over the logits."""
    grad_clip: PositiveOrInf = 1.0
    """Largest gradient norm of an optimizer step; inf: no limit."""
    use_kl_loss: bool = False
    """Add kl_loss_coef times the KL to the reference to the loss, which needs a forward pass of the reference."""
    kl_loss_coef: NonNegativeFloat = 0.001
    """Weight of the KL loss."""
    kl_loss_type: str = "low_var_kl"
    """KL estimator of the loss: low_var_kl (k3), mse (k2), abs, kl (k1, without a gradient in expectation); the suffix + gives
    each k2's gradient."""
    value_loss_coef: NonNegativeFloat = 0.0
    """Weight of the value loss of a policy with model.vla.value_head; 0: its head is not trained."""
    cliprange_value: PositiveOrInf = 0.5
    """Change of a prediction from the one before the update, beyond which that value loss has no gradient; inf: no clip."""
    mask_truncated: bool = False
    """Leave samples that hit max_response_length out of the loss."""
    policy_loss: PolicyLossConfig = field(default_factory=PolicyLossConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    fsdp_config: FSDPConfig = field(default_factory=FSDPConfig)
    megatron: MegatronConfig = field(default_factory=MegatronConfig)

    @property
    def section(self) -> Section:
        """The section that the actor's engine reads."""
        return section_of(self.strategy, self.fsdp_config, self.megatron)


@dataclass(slots=True, kw_only=True)
class RefModelConfig:
    path: str | None = None
    """Folder or hub name of another model as the reference, of the policy's vocabulary: the teacher of
    algorithm.adv_estimator=on_policy_distillation, or of the KL in reward or loss. null: the starting policy."""


@dataclass(slots=True, kw_only=True)
class RefConfig:
    model: RefModelConfig = field(default_factory=RefModelConfig)
    log_prob_micro_batch_size_per_gpu: PositiveInt | None = None
    """Rows in a forward pass of the reference; null: the actor's micro-batch."""
    log_prob_use_dynamic_bsz: bool | None = None
    """Cut forward passes of the reference by tokens; null: as the actor."""
    log_prob_max_token_len_per_gpu: PositiveInt | None = None
    """Largest number of tokens in a forward pass of the reference; null: the actor's."""
    fsdp_config: FSDPConfig | None = None
    """Sharding of the reference; fields that are not set follow the actor."""
    megatron: MegatronConfig | None = None
    """The reference with the actor's strategy=megatron; fields that are not set follow the actor. Its sizes must equal the
    actor's; offloading may differ."""

    def frozen_model(self, policy: ModelConfig) -> ModelConfig:
        """Returns the section `model` from which the reference's engine is built.  policy: the policy's."""
        return replace(policy, path=self.model.path or policy.path, lora_rank=0, lora_adapter_path=None)

    def section(self, actor: ActorConfig) -> Section:
        """Returns the section that the reference's engine reads; it is an engine of the actor's kind."""
        return section_of(actor.strategy, self.fsdp_config or actor.fsdp_config, self.megatron or actor.megatron)
