"""Two policies with roles of their own invent a language, trained by turns: a pipeline, and the driver that runs it.

    python recipes/pipelines/signalling.py [key=value settings of main_ppo]

The signalling game of Lewis (Convention, 1969): the speaker is shown a state and says one word; the listener is shown that word
alone and names a state.  Both are rewarded if it is the right one.  Each keeps still while
the other learns: odd steps train the speaker, even ones the listener.
"""

from __future__ import annotations

import copy
import logging
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # recipes are files beside each other, not an installed package

from recipes.tiny_qwen2 import write_model
from rlhub.algorithms.advantages.grpo import GRPOKnobs, grpo
from rlhub.algorithms.inputs import AdvantageInputs, on_last_token
from rlhub.config.cli import run
from rlhub.config.rules.placement import unplaceable
from rlhub.config.sections.ppo import PPOConfig
from rlhub.errors import ConfigError
from rlhub.pipeline.executor import Executor, RoleCalls, StepResult
from rlhub.pipeline.graph import Pipeline
from rlhub.protocol import DataProto
from rlhub.single_controller import ClassWithInitArgs, WorkerGroup
from rlhub.trainer.launch import launch_workers
from rlhub.trainer.ppo.metrics import mean_metrics
from rlhub.trainer.ppo.trainer import worker_runtime
from rlhub.utils.user_code import load_target

logger = logging.getLogger("signalling")

POLICY = "rlhub.workers.roles:ActorRolloutRefWorker"
ROLES = ("speaker", "listener")
NUM_STATES, NUM_ROWS = 8, 128
SPECIAL = ("<pad>", "<end>", "<unknown>")
STATES = [f"state{index}" for index in range(NUM_STATES)]
WORDS = [f"word{index}" for index in range(NUM_STATES)]
SETTINGS = (
    "data.max_prompt_length=1",
    "data.max_response_length=1",
    "actor_rollout_ref.model.enable_gradient_checkpointing=False",
    "actor_rollout_ref.actor.optim.lr=1e-3",
    "actor_rollout_ref.rollout.name=hf",
    f"trainer.pipeline={__file__}:signalling",
    "trainer.n_gpus_per_node=2",
    "trainer.total_training_steps=120",
    "trainer.default_local_dir=outputs/signalling",
)
TRAINED = {
    "input_ids": "int64(rows sequence)",
    "attention_mask": "int64(rows sequence)",
    "response_mask": "bool(rows response)",
    "rollout_log_probs": "float32(rows response)",
}


def of(role: str) -> str:
    """Returns the columns on which a policy trains, under names of its own: no column is written twice."""
    return " ".join(f"{role}_{name}:{type}" for name, type in TRAINED.items())


def signalling(config: Any, needs: Any = None) -> Pipeline:
    """Says, listens, compares, and trains one of the two."""
    step = Pipeline("signalling", roles={"driver": f"{__file__}:Game", "speaker": POLICY, "listener": POLICY})
    step.add("draw", reads="step", writes="state:int64(rows)")
    step.add("speak", on="speaker", reads="step state", writes=["word:int64(rows)", of("speaker")])
    step.add("listen", on="listener", reads="step word", writes=["guess:int64(rows)", of("listener")])
    step.add("score", reads="state guess", writes="scores")
    step.add("train_speaker", on="speaker", reads=["state scores", of("speaker")], trains="speaker", when="step % 2 == 1")
    step.add("train_listener", on="listener", reads=["word scores", of("listener")], trains="listener", when="step % 2 == 0")
    return step


@dataclass(slots=True, kw_only=True)
class Game:
    """The driver's functions, which the nodes call by name."""

    seed: int
    groups: Mapping[str, WorkerGroup]

    def draw(self, batch: DataProto) -> DataProto:
        """Returns the states of a step: tokens, (rows,)."""
        generator = torch.Generator().manual_seed(self.seed * 1_000_003 + batch.meta_info["step"])
        states = torch.randint(len(STATES), (NUM_ROWS,), generator=generator)
        return DataProto.from_dict({"state": states + len(SPECIAL)})

    def speak(self, batch: DataProto) -> DataProto:
        return self._say("speaker", batch.batch["state"], batch.meta_info["step"], "word")

    def listen(self, batch: DataProto) -> DataProto:
        return self._say("listener", batch.batch["word"], batch.meta_info["step"], "guess")

    def score(self, batch: DataProto) -> DataProto:
        scores = (batch.batch["state"] == batch.batch["guess"]).float()
        return DataProto.from_dict({"scores": scores}, meta_info={"metrics": {"accuracy": scores.mean().item()}})

    def train_speaker(self, batch: DataProto) -> DataProto:
        return self._train("speaker", batch, "state")

    def train_listener(self, batch: DataProto) -> DataProto:
        return self._train("listener", batch, "word")

    def _say(self, role: str, tokens: torch.Tensor, step: int, name: str) -> DataProto:
        """Returns one token of the policy after each of the tokens (rows,), as column `name`, and the columns on which it trains.

        Its present weights go to its rollout engine before; metric <role>/weights is their fingerprint.
        """
        reports = self.groups[role].sync_weights(step)
        prompts = {"prompts": tokens[:, None], "attention_mask": torch.ones(len(tokens), 1, dtype=torch.int64)}
        prompts["ordinal"] = step * len(tokens) + torch.arange(len(tokens))
        sampling = {"n": 1, "temperature": 1.0, "top_p": 1.0, "top_k": -1, "log_probs": True}
        rows = self.groups[role].generate_sequences(DataProto.from_dict(prompts, meta_info=sampling)).batch
        columns = {name: rows["responses"][:, 0]} | {f"{role}_{column}": rows[column] for column in TRAINED}
        return DataProto.from_dict(columns, meta_info={"metrics": {f"{role}/weights": [reports[0].fingerprint]}})

    def _train(self, role: str, batch: DataProto, group: str) -> DataProto:
        """Takes one optimizer step of GRPO, in which rows with the same prompt are compared."""
        rows = {column: batch.batch[f"{role}_{column}"] for column in TRAINED}
        mask, scores = rows["response_mask"], batch.batch["scores"]
        inputs = AdvantageInputs(token_level_rewards=on_last_token(scores, mask), response_mask=mask, group=batch.batch[group])
        rows["advantages"] = grpo(inputs, GRPOKnobs()).advantages
        output = self.groups[role].update_actor(DataProto.from_dict(rows, meta_info={"num_mini_batches": 1}))
        metrics = mean_metrics(output.meta_info["metrics"])
        return DataProto(meta_info={"metrics": {f"{role}/grad_norm": metrics["actor/grad_norm"]}})


def play(config: PPOConfig, pipeline: Pipeline) -> Iterator[StepResult]:
    """Starts both policies, each from weights of its own, and yields what each step leaves.

    Raises ConfigError where trainer.placement names other roles.
    """
    if problems := unplaceable(config.trainer, usual=(), own=ROLES):
        raise ConfigError(problems)
    roles, runtime = {}, worker_runtime(config)
    for index, role in enumerate(ROLES):
        section = copy.deepcopy(config.actor_rollout_ref)
        section.model.path = str(Path(config.trainer.default_local_dir, role))
        section.actor.optim.total_training_steps = config.trainer.total_training_steps
        write_model(Path(section.model.path), config.trainer.seed + index, build_tokenizer())
        worker = load_target(pipeline.roles[role])
        roles[role] = ClassWithInitArgs(worker, section, runtime, train=True, needs_reference=False, algorithm=config.algorithm)
    with launch_workers(roles, config.trainer) as launched:
        game = Game(seed=config.trainer.seed, groups=launched.groups)
        functions = {node.run: getattr(game, node.run) for node in pipeline.nodes}
        take_step = Executor(pipeline.build(config), RoleCalls(functions, launched.groups), config)
        for step in range(1, (config.trainer.total_training_steps or 1) + 1):
            yield take_step(step)


def build_tokenizer() -> PreTrainedTokenizerFast:
    """Every state and every word is one token."""
    words = [*SPECIAL, *STATES, *WORDS]
    inner = Tokenizer(models.WordLevel({word: index for index, word in enumerate(words)}, unk_token=SPECIAL[2]))
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=inner, pad_token=SPECIAL[0], eos_token=SPECIAL[1], unk_token=SPECIAL[2], model_max_length=8
    )


def main(config: PPOConfig) -> None:
    """Plays the game and logs how often the listener names the right state."""
    for number, result in enumerate(play(config, signalling(config)), 1):
        logger.info("step %d, %s: accuracy %.2f", number, ROLES[(number + 1) % 2], result.metrics["score"]["accuracy"])


if __name__ == "__main__":
    sys.exit(run(PPOConfig, "ppo", main, description=__doc__ or "", required=(), argv=[*SETTINGS, *sys.argv[1:]]))
