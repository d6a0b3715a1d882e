"""The pipelines that come with rlhub: ppo, which is grpo and its relatives with other needs, dapo, sft, dpo and rm.

Each is read from top to bottom like the algorithm in its paper.  A node without `run` is the method of its own name: a registered
one of the workers of its role, or one of the driver (`Driver`).
"""

from __future__ import annotations

from typing import Any, Protocol

from rlhub.pipeline.graph import Pipeline

# The columns that each call reads or writes.  response_mask are the tokens of the model as they were generated, learn_mask those
# of rows that train, loss_mask those of them that a correction keeps: none is ever written again.  Who reads row_order waits
# until the rows are with the ranks that train on them.
TOKENS = "input_ids attention_mask"
PICTURES = "pixel_values? images?"
FIELDS = "data_source? ground_truth? extra_info?"
ROWS = "uid ordinal? sample_index episode_id? prompt_length? response_length"
CALLS = "episode? call? terminated? next_values?"
SAMPLED = f"{TOKENS} {PICTURES} routed_experts? prompts? responses response_mask finish_reason {ROWS} {FIELDS} {CALLS} " + (
    "rollout_log_probs policy_version? given_rewards? added_rewards? tool_rewards? estimator?"
)
TEXT = f"{TOKENS} responses response_mask {ROWS} {FIELDS}"
SCORES = "scores valid configured_scores? token_level_scores? baseline_rewards? group_metric? reward/*?"
MODEL = f"{TOKENS} response_mask"
DEMONSTRATIONS = f"{MODEL} frame? images?"
PAIRS = f"{MODEL} margin?"
ESTIMATED = "advantages? returns? learn_mask?"
PLACES = "row_order mini_batch critic_mini_batch?"
DEALT = f"{MODEL} {PICTURES} row_order"
SCORED = f"{SCORES} given_rewards? added_rewards? response_mask finish_reason {ROWS} {CALLS} estimator? row_order"
PREDICTED = "values? old_log_probs? ref_log_prob? sum_pi_squared? rollout_log_probs policy_version?"
VALUE = f"{TOKENS} learn_mask critic_mini_batch values returns"
CORRECTION = "sample_index learn_mask advantages old_log_probs? rollout_log_probs"
SELECTION = f"{CORRECTION} loss_mask? mini_batch step"
POLICY = (
    f"{TOKENS} {PICTURES} routed_experts? mini_batch advantages learn_mask loss_mask? importance_weights? selected? "
    "old_log_probs? rollout_log_probs ref_log_prob? policy_version?"
)


class Needs(Protocol):
    """Says what the chosen algorithm requires; `trainer.ppo.requirements` explains it."""

    values: bool
    own_values: bool
    reference: bool
    old_log_probs: bool
    correction: bool
    selection: bool


def ppo(config: Any, needs: Needs) -> Pipeline:
    """Proximal policy optimization (Schulman et al. 2017, arXiv 1707.06347), and with other needs GRPO and its relatives."""
    step = Pipeline("ppo")
    step.add("publish", on="actor", reads="step", writes="weights_version")
    step.add("sample", on="rollout", reads="step weights_version", writes=SAMPLED)
    step.add("score", reads=TEXT, writes=SCORES)
    step.add("balance", reads=f"step {ROWS}", writes=PLACES, gathers="response_length sample_index")

    predicted = ["old_log_probs sum_pi_squared?", "values" if needs.own_values else ""]
    step.add("compute_log_prob", on="actor", reads=f"{DEALT} routed_experts?", writes=predicted, when=needs.old_log_probs)
    step.add("compute_ref_log_prob", on="reference", reads=DEALT, writes="ref_log_prob", when=needs.reference)
    step.add("compute_values", on="critic", reads=DEALT, writes="values", when=needs.values)
    step.add("compute_advantages", on="actor", reads=[SCORED, PREDICTED], writes="advantages returns learn_mask")

    step.add("update_critic", on="critic", reads=VALUE, trains="critic", when=needs.values)

    learns = "step > trainer.critic_warmup"
    corrected = "loss_mask importance_weights?"
    step.add("rollout_correction", on="actor", reads=CORRECTION, writes=corrected, when=needs.correction and learns)
    step.add("select_tokens", on="actor", reads=SELECTION, writes="selected", when=needs.selection and learns)
    learned = [POLICY, "values returns" if needs.own_values else ""]
    step.add("update_actor", on="actor", reads=learned, trains="actor", when=learns)
    return step


def measured(step: Pipeline) -> Pipeline:
    """Lets a step whose advantages are a user's own measure what `compute_advantages` measures beside them, before the update:
    the mismatch of the policies, rewards and lengths."""
    names = [node.name for node in step.nodes]
    own = next((node.name for node in step.nodes if any(use.name == "advantages" for use in node.writes)), None)
    if own is None or "measure" in names or any(node.run == "compute_advantages" for node in step.nodes):
        return step
    scored = f"{SCORED} {SCORES}".replace("scores valid", "scores? valid?")
    return step.insert("measure", below=own, run="measure_batch", on="actor", reads=[scored, PREDICTED, ESTIMATED])


def dapo(config: Any, needs: Needs) -> Pipeline:
    """Dynamic sampling (Yu et al. 2025, arXiv 2503.14476): samples and scores until enough groups differ in reward.

    A graph has no loops, so one node repeats both, and the reward no longer runs beside the forward passes.
    """
    step = ppo(config, needs)
    step.name = "dapo"
    step.replace("sample", "dynamic_sampling", on="rollout", reads="step weights_version", writes=[SAMPLED, SCORES])
    return step.remove("score")


def sft(config: Any, needs: Needs | None = None) -> Pipeline:
    """Supervised fine-tuning: one optimizer step over the next batch of demonstrations."""
    step = Pipeline("sft", roles={"model": "rlhub.workers.roles:SFTWorker"})
    step.add("next_batch", reads="step", writes=f"{DEMONSTRATIONS} prompts responses ordinal")
    step.add("train_step", on="model", reads=DEMONSTRATIONS, trains="model")
    return step


def dpo(config: Any, needs: Needs | None = None) -> Pipeline:
    """Direct preference optimization (Rafailov et al. 2023, arXiv 2305.18290): rows are pairs; the workers have the reference."""
    step = Pipeline("dpo", roles={"model": "rlhub.workers.roles:DPOWorker"})
    step.add("next_batch", reads="step", writes=f"{PAIRS} responses ordinal")
    step.add("train_step", on="model", reads=PAIRS, trains="model")
    return step


def rm(config: Any, needs: Needs | None = None) -> Pipeline:
    """Reward model from pairs (Bradley-Terry), with margins where the data have them (Touvron et al. 2023, arXiv 2307.09288)."""
    step = dpo(config)
    step.name, step.roles = "rm", {"model": "rlhub.workers.roles:RewardTrainingWorker"}
    return step


class DataDriver(Protocol):
    """The driver's own function of supervised training; see `StepDriver`."""

    def next_batch(self, batch: Any) -> Any:
        """Returns the next batch of a data set."""


class StepDriver(Protocol):
    """The driver's own functions of a training step, which these pipelines call by name.

    Each gets a batch of the columns that its node reads, with the columns of the step in meta_info, and returns a batch of those
    that it writes, or None; meta_info["metrics"] of the latter are the node's metrics.
    """

    def publish(self, batch: Any) -> Any:
        """Sends the policy's weights to the rollout engines, unless they have them already."""

    def sample(self, batch: Any) -> Any:
        """Draws prompts and returns samples of them: as many rows as a training batch has."""

    def dynamic_sampling(self, batch: Any) -> Any:
        """Does as `sample` and `score` until enough groups differ in reward."""

    def score(self, batch: Any) -> Any:
        """Returns the rewards of the samples.  Raises RewardError where too many fail."""

    def balance(self, batch: Any) -> Any:
        """Deals the rows to the ranks by their lengths: gets all columns and returns them in the new order, where they train."""


class Driver(DataDriver, StepDriver, Protocol):
    """All functions of drivers."""
