"""Sections `reward_model` and `custom_reward_function`: the scorers of a response.

The reward is function_weight x the reward function's score + weight x the reward model's + judge.weight x the judge's, summed
over the scorers that are on.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from rlhub.config.schema import NonNegativeFloat, PositiveFloat, PositiveInt, PositiveUnitFloat, UnitFloat
from rlhub.config.sections.training import FSDPConfig, MegatronConfig, ModelConfig, Section, Strategy, section_of


@dataclass(slots=True, kw_only=True)
class ScoringModelConfig:
    path: str | None = None
    """Model folder or Hugging Face hub name: a sequence classifier with one label (what main_rm leaves behind)."""
    input_tokenizer: str | None = None
    """null: the reward model reads the policy's tokens as they are. The policy's model path: texts are decoded with that
    tokenizer and rendered with the reward model's own chat template. Set it when vocabulary or template differ."""
    use_remove_padding: bool = True
    """Compute on packed rows without padding. Set it to false only if the model's attention cannot be packed."""
    trust_remote_code: bool = False
    """Run Python code that comes with the model. Set it only for models whose code you have read."""
    override_config: dict[str, Any] = field(default_factory=dict)
    """Entries of the model's config.json to replace."""
    fsdp_config: FSDPConfig = field(default_factory=FSDPConfig)
    """Sharding of the reward model over the ranks."""

    def as_model(self) -> ModelConfig:
        """Returns the section `model` from which a training engine is built."""
        return ModelConfig(
            path=self.path,
            enable_gradient_checkpointing=False,
            use_remove_padding=self.use_remove_padding,
            trust_remote_code=self.trust_remote_code,
            override_config=self.override_config,
        )


@dataclass(slots=True, kw_only=True)
class JudgeModelConfig:
    path: str | None = None
    """Chat model that writes a judgement of each response; null: no judge."""
    trust_remote_code: bool = False
    """Run Python code that comes with the model. Set it only for models whose code you have read."""

    def as_model(self) -> ModelConfig:
        """Returns the section `model` from which a rollout engine is built."""
        return ModelConfig(path=self.path, trust_remote_code=self.trust_remote_code)


@dataclass(slots=True, kw_only=True)
class JudgeConfig:
    model: JudgeModelConfig = field(default_factory=JudgeModelConfig)
    weight: float = 1.0
    """Factor of the judge's score in the reward."""
    prompt_template: str | None = None
    """Prompt of the judge, with the places {question}, {response} and {ground_truth} (double a literal brace); a text without
    braces is the path of a text file with the prompt. null: rate from 0 to 10, ending in "Score: <number>"."""
    score_pattern: str = r"[Ss]core:\s*([-+]?[0-9]+(?:\.[0-9]+)?)"
    """Regular expression with one group, the number; its last match in a judgement counts."""
    min_score: float = 0.0
    """Smallest valid score of a judgement; a smaller one counts as unreadable."""
    max_score: float = 10.0
    """Largest valid score of a judgement; a larger one counts as unreadable."""
    n: PositiveInt = 1
    """Judgements per response, whose readable scores are averaged; more than 1 need a temperature above 0."""
    temperature: NonNegativeFloat = 0.0
    """Sampling temperature of judgements; 0 is greedy."""
    max_prompt_length: PositiveInt = 4096
    """Longest prompt of the judge, in its tokens; a longer one is a failure to score."""
    max_tokens: PositiveInt = 512
    """Longest judgement, in tokens."""
    name: str | None = None
    """Generation engine; null: that of actor_rollout_ref.rollout."""
    tensor_model_parallel_size: PositiveInt = 1
    """Ranks that share one copy of the judge."""
    gpu_memory_utilization: PositiveUnitFloat = 0.2
    """GPU: fraction of the memory for the judge, which it keeps throughout the run."""


@dataclass(slots=True, kw_only=True)
class RewardModelConfig:
    enable: bool = False
    """Score with a learned reward model (model.path)."""
    weight: float = 1.0
    """Factor of the reward model's score in the reward."""
    function_weight: float = 1.0
    """Factor of the reward function's score; with 0 the function does not run and no reward process starts."""
    strategy: Strategy | None = None
    """Training engine that runs the reward model; null: the actor's."""
    micro_batch_size_per_gpu: PositiveInt | None = None
    """Rows in a forward pass of the reward model; null: the actor's log-prob micro-batch."""
    use_dynamic_bsz: bool | None = None
    """Cut forward passes of the reward model by tokens; null: as the actor."""
    forward_max_token_len_per_gpu: PositiveInt | None = None
    """Largest number of tokens in a forward pass of the reward model; null: the actor's."""
    max_length: PositiveInt | None = None
    """With model.input_tokenizer: longest text in tokens; a longer one loses its beginning. null: the model's positions."""
    reward_manager: str = "naive"
    """Manager that turns scores into rewards: naive (the score, on the last token that the model wrote) or dapo (with a penalty
    for overlong responses)."""
    reward_kwargs: dict[str, Any] = field(default_factory=dict)
    """Knobs of the manager, for example overlong_buffer_cfg.{enable,len,penalty_factor} of dapo."""
    on_error: Literal["fail", "mask", "zero"] = "mask"
    """For a sample whose scoring fails, fail: stop the run; mask: leave it out of training and of validation's metrics; zero: the
    scorer that failed counts 0. Failures are counted, also in validation."""
    max_error_rate: UnitFloat = 0.1
    """With mask or zero: a larger fraction of failures in a batch stops the run."""
    timeout_s: PositiveFloat = 30.0
    """Seconds to score one sample, after which its process is killed. Imports, at the top of the function's file or in a
    process's first calls, have 120 s of their own."""
    memory_gb: PositiveFloat = 4.0
    """Largest address space of each reward process, in GiB."""
    num_workers: PositiveInt | None = None
    """Reward processes on each machine that generates, shared out over its ranks, at least one each; with rollout.mode=async on
    the driver's machine, shared out over rollout.agent.num_workers. null: one per CPU core, at most 4."""
    model: ScoringModelConfig = field(default_factory=ScoringModelConfig)
    megatron: MegatronConfig | None = None
    """The reward model with strategy=megatron; fields that are not set follow the actor. The sizes must equal the actor's where
    both are in one process."""
    judge: JudgeConfig = field(default_factory=JudgeConfig)

    @property
    def section(self) -> Section:
        """The section that the reward model's engine reads."""
        return section_of(self.strategy, self.model.fsdp_config, self.megatron)


@dataclass(slots=True, kw_only=True)
class CustomRewardConfig:
    path: str | None = None
    """Python file with your reward function; null: the built-in function of each row's data_source."""
    name: str = "compute_score"
    """Name of the function: (data_source, solution_str, ground_truth, extra_info) -> float or dict with "score"."""
    env: list[str] = field(default_factory=list)
    """Environment variables that the function may read although their names look like secrets (API_KEY, TOKEN, PASSWORD, ...);
    its processes get all other variables anyway."""
