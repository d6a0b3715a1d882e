"""All rules between settings.  They read a derived configuration and return its problems with the arithmetic, so that all of them
are shown together before any process starts."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from typing import Any

from rlhub.config.rules import asynchronous, embodied, engines, faults, placement, sources
from rlhub.config.rules.parallel import all_ranks, data_parallel
from rlhub.config.sections import rollout_correction
from rlhub.config.sections.actor import ActorConfig
from rlhub.config.sections.ppo import CriticConfig, PPOConfig
from rlhub.config.sections.preference import DPOConfig, RMConfig
from rlhub.config.sections.sft import SFTConfig
from rlhub.config.sections.trainer import TrainerConfig
from rlhub.config.sections.training import MegatronConfig, OptimConfig

_FILES = (
    "name a parquet or jsonl file, or a list of them (to see a whole run without data of your own: bash scripts/quickstart.sh)"
)
_MODEL = "name a Hugging Face model or a folder with one"
REQUIRED: dict[type, tuple[str, ...]] = {
    PPOConfig: ("data.train_files", "actor_rollout_ref.model.path"),
    SFTConfig: ("data.train_files", "model.path"),
    DPOConfig: ("data.train_files", "model.path"),
    RMConfig: ("data.train_files", "model.path"),
}
"""Settings without which a training job cannot run, by its configuration; other mains name their own."""

_MULTI = "trainer.controller=multi"
_ACTOR, _ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"


def check_required(config: Any, keys: Sequence[str]) -> list[str]:
    """Returns the problems of required settings that are not set.  keys: settings of files, or of a model's path."""
    problems = []
    for key in keys:
        node = config
        for name in key.split("."):
            node = getattr(node, name)
        if not node and not (key.startswith("data.") and isinstance(config, PPOConfig) and config.env.name):
            problems.append(f"{key} is not set: {_MODEL if key.endswith('.path') else _FILES}")
    return problems


@functools.singledispatch
def check(config: Any) -> list[str]:
    """Returns the problems of a derived configuration; a class without rules here has none."""
    return []


@check.register
def _(config: PPOConfig) -> list[str]:
    return [
        *_check_batches(config),
        *_check_lengths(config),
        *_check_filter(config),
        *_check_ranks(config),
        *_check_prefixes(config),
        *_check_replay(config),
        *_check_trainer(config.trainer, has_validation=config.data.val_files is not None or config.env.val_scenes > 0),
        *_check_optim(config.actor_rollout_ref.actor.optim, f"{_ACTOR}.optim"),
        *_check_optim(config.critic.optim, "critic.optim"),
        *rollout_correction.problems(config.algorithm.rollout_correction),
        *_check_rewards(config),
        *placement.problems(config),
        *asynchronous.problems(config),
        *embodied.problems(config),
        *sources.problems(config),
        *_check_controller(config),
    ]  # fmt: skip


@check.register
def _(config: SFTConfig) -> list[str]:
    return _check_supervised(config, "rows", "one row of", 1)


@check.register
def _(config: DPOConfig) -> list[str]:
    return _check_supervised(config, "pairs", "a pair of 2 x", 2)


@check.register
def _(config: RMConfig) -> list[str]:
    return _check_supervised(config, "pairs", "a pair of 2 x", 2)


def _check_supervised(config: SFTConfig | DPOConfig | RMConfig, rows: str, row: str, sequences: int) -> list[str]:
    """Returns the problems of a supervised job.  rows, row: names of the data's rows; sequences: token sequences in each."""
    data, ranks = config.data, data_parallel(config.section, all_ranks(config.trainer))
    problems = [
        *_check_trainer(config.trainer, has_validation=data.val_files is not None),
        *placement.no_roles(config.trainer),
        *([f"{_MULTI} is for main_ppo; set trainer.controller=single"] if config.trainer.controller == "multi" else []),
        *_check_optim(config.optim, "optim"),
        *engines.problems(config),
    ]
    if data.train_batch_size < ranks.count:
        problems.append(f"data.train_batch_size={data.train_batch_size} {rows} cannot feed {ranks.text}")
    assert data.max_token_len_per_gpu is not None, "derive first"
    if data.use_dynamic_bsz and data.max_token_len_per_gpu < sequences * data.max_length:
        budget = f"data.max_token_len_per_gpu={data.max_token_len_per_gpu}"
        problems.append(f"{budget} tokens cannot hold {row} data.max_length={data.max_length}")
    return problems


def check_requirements(config: PPOConfig, requires: AbstractSet[str], estimator: str = "") -> list[str]:
    """Returns the problems of settings that an advantage estimator needs.  requires: of its registry row.  estimator: its name
    with the key that sets it, where it is a data source's own."""
    rollout, found = config.actor_rollout_ref.rollout, []
    estimator = estimator or f"algorithm.adv_estimator={config.algorithm.adv_estimator}"
    if "groups" in requires and rollout.n < 2:
        found.append(
            f"{_ROLLOUT}.n={rollout.n}: {estimator} compares the samples of a prompt with each other and needs 2 or more"
        )
    elif "groups" in requires and asynchronous.is_async(config) and rollout.agent.min_samples == 1:
        found.append(
            f"{_ROLLOUT}.agent.min_samples=1: {estimator} compares the samples of a prompt with each other, and the last one "
            "that is left has nothing to be compared with; set it to 2 or more, or to null"
        )
    if "sum_pi_squared" in requires and config.algorithm.rollout_correction.bypass_mode:
        found.append(
            f"{rollout_correction.KEY}.bypass_mode=true saves the forward pass from which {estimator} takes the policy's squared "
            "probabilities; set it to false"
        )
    if "baseline_rewards" in requires and asynchronous.is_collected(config):
        found.append(
            f"{estimator} scores a greedy response beside each prompt's samples, which the job that collects into "
            f"{_ROLLOUT}.trajectories_folder={rollout.trajectories_folder} does not generate; set it to null or choose another "
            "estimator"
        )
    if "reference" in requires and config.actor_rollout_ref.ref.model.path is None:
        found.append(
            f"{estimator} compares the policy with a teacher: set actor_rollout_ref.ref.model.path to its folder or hub name"
        )
    return found


def check_quantization(config: PPOConfig, requires: AbstractSet[str]) -> list[str]:
    """Returns the problem of samples from quantized weights that would train as if they were the policy's own.  requires: of the
    policy loss."""
    rollout, correction = config.actor_rollout_ref.rollout, config.algorithm.rollout_correction
    corrected = correction.active or correction.in_update or "rollout_log_probs" in requires
    if rollout.quantization is None or corrected or config.trainer.replay_from or asynchronous.is_collected(config):
        return []
    return [
        f"{_ROLLOUT}.quantization={rollout.quantization} samples from rounded weights, and nothing corrects for that: set "
        f"{rollout_correction.KEY}.rollout_is=token, which weights tokens by pi_old / mu up to rollout_is_threshold, or "
        f"{_ROLLOUT}.quantization=null"
    ]


def notes(config: PPOConfig) -> list[str]:
    """Returns notes on settings that are allowed and may surprise, such as sizes that do not divide evenly over the ranks."""
    data, actor, n = config.data, config.actor_rollout_ref.actor, config.actor_rollout_ref.rollout.n
    ranks = data_parallel(actor.section, all_ranks(config.trainer)).count
    found = []
    for key, prompts in (
        ("data.train_batch_size", data.train_batch_size),
        (f"{_ACTOR}.ppo_mini_batch_size", actor.ppo_mini_batch_size),
    ):
        rest = prompts * n % ranks
        if rest:
            found.append(
                f"{key}: {prompts} prompts x n={n} = {prompts * n} samples = {ranks} ranks x {prompts * n // ranks} + {rest}; "
                f"{rest} ranks take one more, the others wait for them"
            )
    proximal = [] if asynchronous.may_be_stale(config) else rollout_correction.notes(config.algorithm.rollout_correction)
    return [*found, *proximal, *asynchronous.notes(config)]


def _check_batches(config: PPOConfig) -> list[str]:
    data, actor, critic = config.data, config.actor_rollout_ref.actor, config.critic
    assert critic.ppo_mini_batch_size is not None, "derive first"
    minis = {f"{_ACTOR}.ppo_mini_batch_size": actor.ppo_mini_batch_size}
    if critic.ppo_mini_batch_size != actor.ppo_mini_batch_size:
        minis["critic.ppo_mini_batch_size"] = critic.ppo_mini_batch_size
    problems = []
    for key, mini in minis.items():
        batch = data.train_batch_size
        if batch < mini:
            problems.append(
                f"data.train_batch_size={batch} is less than {key}={mini}: {batch} prompts do not fill one optimizer step; "
                f"set {key} to {batch} or a divisor of it"
            )
        elif batch % mini:
            arithmetic = f"{batch} = {batch // mini} x {mini} + {batch % mini}"
            problems.append(
                f"data.train_batch_size={batch} is not a multiple of {key}={mini}: {arithmetic}; "
                f"nearest that fit: {_nearest_divisors(batch, mini)}"
            )
    n = config.actor_rollout_ref.rollout.n
    smallest = min(minis.values())
    ranks = data_parallel(actor.section, all_ranks(config.trainer))
    if smallest * n < ranks.count:
        samples = f"{smallest} prompts x n={n} = {smallest * n} samples"
        problems.append(f"{_ACTOR}.ppo_mini_batch_size: {samples} cannot feed {ranks.text}")
    return problems


def _check_filter(config: PPOConfig) -> list[str]:
    algorithm, n = config.algorithm, config.actor_rollout_ref.rollout.n
    if not algorithm.filter_groups.enable:
        return []
    problems = []
    if n < 2:
        problems.append(
            f"algorithm.filter_groups.enable=true with {_ROLLOUT}.n={n}: the samples of a prompt are compared with each other, "
            "and one sample is always like itself; set n to 2 or more"
        )
    if algorithm.filter_groups.metric == "seq_final_reward" and algorithm.use_kl_in_reward:
        problems.append(
            "algorithm.filter_groups.metric=seq_final_reward with algorithm.use_kl_in_reward=true: each sample has its own KL, "
            "so no group would ever be filtered; use seq_reward, the reward without the KL"
        )
    return problems


def _check_rewards(config: PPOConfig) -> list[str]:
    scoring, judge = config.reward_model, config.reward_model.judge
    problems = []
    if scoring.enable and not scoring.model.path:
        problems.append("reward_model.enable=true but reward_model.model.path is not set: name a folder or hub model")
    if scoring.function_weight == 0 and not scoring.enable and not judge.model.path:
        problems.append(
            "reward_model.function_weight=0 leaves nothing to score with: set reward_model.enable and reward_model.model.path, "
            "or reward_model.judge.model.path"
        )
    for key, weight, on in (
        ("reward_model.weight", scoring.weight, scoring.enable),
        ("reward_model.function_weight", scoring.function_weight, True),
        ("reward_model.judge.weight", judge.weight, bool(judge.model.path)),
    ):
        if on and not math.isfinite(weight):
            problems.append(f"{key}={weight}: expected a finite number")
    return problems + (_check_judge(config) if judge.model.path else [])


def _check_judge(config: PPOConfig) -> list[str]:
    judge, key = config.reward_model.judge, "reward_model.judge"
    per_node = placement.pool_of(config.trainer, "judge").n_gpus_per_node
    problems = []
    if not judge.min_score < judge.max_score:
        problems.append(f"{key}.min_score={judge.min_score} is not less than {key}.max_score={judge.max_score}")
    if judge.n > 1 and judge.temperature == 0:
        problems.append(f"{key}.n={judge.n} with {key}.temperature=0: greedy judgements are all alike; set a temperature or n=1")
    size = judge.tensor_model_parallel_size
    if per_node % size:
        problems.append(
            f"{key}.tensor_model_parallel_size={size} does not divide {placement.size_text(config.trainer, 'judge')}: "
            f"{per_node} = {per_node // size} x {size} + {per_node % size}"
        )
    return problems


def _nearest_divisors(total: int, wanted: int) -> str:
    divisors = [size for size in range(1, total + 1) if total % size == 0]
    below = max((size for size in divisors if size <= wanted), default=1)
    above = min((size for size in divisors if size >= wanted), default=total)
    return f"{below} or {above}"


def _check_lengths(config: PPOConfig) -> list[str]:
    data, rollout = config.data, config.actor_rollout_ref.rollout
    longest = data.max_prompt_length + data.max_response_length
    prompt, response = f"data.max_prompt_length={data.max_prompt_length}", f"data.max_response_length={data.max_response_length}"
    arithmetic = f"{prompt} + {response} = {longest}"
    problems = []
    assert rollout.max_model_len is not None, "derive first"
    if rollout.max_model_len < longest:
        problems.append(f"{_ROLLOUT}.max_model_len={rollout.max_model_len} is less than {arithmetic} tokens")
    if not rollout.enable_chunked_prefill and (rollout.max_num_batched_tokens or rollout.max_model_len) < rollout.max_model_len:
        problems.append(
            f"{_ROLLOUT}.max_num_batched_tokens={rollout.max_num_batched_tokens} is less than "
            f"max_model_len={rollout.max_model_len} and enable_chunked_prefill is off: a long prompt could never be read"
        )
    for key, budget in _token_budgets(config).items():
        if budget is not None and budget < longest:
            problems.append(f"{key}={budget} tokens cannot hold one row of {arithmetic}")
    return problems


def _token_budgets(config: PPOConfig) -> dict[str, int | None]:
    """Returns the token budgets in use, by key, without those that only follow the actor's."""
    actor: ActorConfig = config.actor_rollout_ref.actor
    critic: CriticConfig = config.critic
    rollout, reference, scoring = config.actor_rollout_ref.rollout, config.actor_rollout_ref.ref, config.reward_model
    own = actor.ppo_max_token_len_per_gpu if actor.use_dynamic_bsz else None
    budgets = {
        "critic.ppo_max_token_len_per_gpu": critic.ppo_max_token_len_per_gpu if critic.use_dynamic_bsz else None,
        f"{_ROLLOUT}.log_prob_max_token_len_per_gpu": (
            rollout.log_prob_max_token_len_per_gpu if rollout.log_prob_use_dynamic_bsz else None
        ),
        "actor_rollout_ref.ref.log_prob_max_token_len_per_gpu": (
            reference.log_prob_max_token_len_per_gpu if reference.log_prob_use_dynamic_bsz else None
        ),
        "reward_model.forward_max_token_len_per_gpu": (
            scoring.forward_max_token_len_per_gpu if scoring.enable and scoring.use_dynamic_bsz else None
        ),
    }
    return {f"{_ACTOR}.ppo_max_token_len_per_gpu": own} | {key: size for key, size in budgets.items() if size != own}


def _check_ranks(config: PPOConfig) -> list[str]:
    trainer, tensor_parallel = config.trainer, config.actor_rollout_ref.rollout.tensor_model_parallel_size
    per_node = placement.pool_of(trainer, "rollout").n_gpus_per_node
    problems = []
    if per_node % tensor_parallel:
        problems.append(
            f"{_ROLLOUT}.tensor_model_parallel_size={tensor_parallel} does not divide {placement.size_text(trainer, 'rollout')}: "
            f"{per_node} = {per_node // tensor_parallel} x {tensor_parallel} + {per_node % tensor_parallel}, "
            f"and the ranks of an engine are on one machine"
        )
    return problems + engines.problems(config)


def _check_prefixes(config: PPOConfig) -> list[str]:
    """Returns the problems of settings with which rows cannot share the computation of their prefixes."""
    actor, model = config.actor_rollout_ref.actor, config.actor_rollout_ref.model
    if not actor.prefix_packing:
        return []
    refused = {
        f"{_ACTOR}.strategy={actor.strategy}: its attention keeps every row to itself; set strategy=fsdp2": isinstance(
            actor.section, MegatronConfig
        ),
        "actor_rollout_ref.model.vla: a policy of actions reads pictures, which belong to rows": bool(model.vla),
        "actor_rollout_ref.model.use_remove_padding=false: padded rows have places of their own; set it to true": (
            not model.use_remove_padding
        ),
    }
    return [f"{_ACTOR}.prefix_packing=true with {text}, or prefix_packing=false" for text, holds in refused.items() if holds]


def _check_replay(config: PPOConfig) -> list[str]:
    """Returns the problems of settings with which no recorded experts reach the trainer."""
    actor, parts, trainer = config.actor_rollout_ref.actor, config.actor_rollout_ref, config.trainer
    if actor.router_replay == "disabled":
        return []
    refused = {
        f"{_ROLLOUT}.mode={parts.rollout.mode}: episodes of single requests bring no experts of their tokens; set mode=sync": (
            parts.rollout.mode != asynchronous.SYNC
        ),
        "actor_rollout_ref.model.vla or env.name: calls of a policy of actions bring no experts of tokens; leave them out": (
            bool(parts.model.vla or config.env.name)
        ),
        f"trainer.replay_from={trainer.replay_from}: recorded batches train without their engine; set it to null": (
            trainer.replay_from is not None
        ),
        f"{_ACTOR}.prefix_packing=true: rows that share a token may have other recorded experts for it; set it to false": (
            actor.prefix_packing
        ),
        f"{_ACTOR}.megatron.override_transformer_config.recompute_modules: layers are computed again as a whole, or their "
        "attention alone; leave it out": (
            isinstance(actor.section, MegatronConfig) and "recompute_modules" in actor.section.override_transformer_config
        ),
    }
    key = f"{_ACTOR}.router_replay={actor.router_replay}"
    return [f"{key} with {text}, or router_replay=disabled" for text, holds in refused.items() if holds]


def _check_trainer(trainer: TrainerConfig, *, has_validation: bool) -> list[str]:
    problems = []
    if trainer.backend == "local" and all_ranks(trainer).count != 1:
        problems.append(f"trainer.backend=local has one rank in this process, not {all_ranks(trainer).text}; use backend=ray")
    if trainer.resume_mode == "resume_path" and not trainer.resume_from_path:
        problems.append("trainer.resume_mode=resume_path needs trainer.resume_from_path, a checkpoint folder")
    if trainer.test_freq > 0 and not has_validation:
        problems.append(
            f"trainer.test_freq={trainer.test_freq} but data.val_files is not set: name the files or set test_freq=-1"
        )
    if trainer.keep_best and not has_validation:
        problems.append(f"trainer.keep_best={trainer.keep_best} needs validation, but data.val_files is not set")
    for key, value in (("save_freq", trainer.save_freq), ("test_freq", trainer.test_freq)):
        if value == 0:
            problems.append(f"trainer.{key}=0: give a number of steps, or -1 for never")
    return [*problems, *faults.problems(trainer)]


def _check_controller(config: PPOConfig) -> list[str]:
    """Returns the problems of settings with which every rank cannot run the loop."""
    trainer = config.trainer
    if trainer.controller != "multi":
        return []
    single = "or trainer.controller=single"
    refused = {
        "trainer.batches=driver, but no process has whole batches; set trainer.batches=reference": trainer.batches == "driver",
        "trainer.backend=local, which has one rank; set trainer.backend=ray": trainer.backend == "local",
        f"{_ROLLOUT}.mode=async, whose replicas one driver serves; set {_ROLLOUT}.mode=sync": (
            config.actor_rollout_ref.rollout.mode == "async"
        ),
        "trainer.replay_from, whose files one driver reads; set it to null": bool(trainer.replay_from),
        "trainer.record_batches, which one driver writes; set it to false": trainer.record_batches,
    }
    return [f"{_MULTI} with {text}, {single}" for text, holds in refused.items() if holds]


def _check_optim(optim: OptimConfig, key: str) -> list[str]:
    if len(optim.betas) != 2 or not all(0 <= beta < 1 for beta in optim.betas):
        return [f"{key}.betas={optim.betas}: expected two numbers in [0, 1)"]
    return []
