"""Generation with the policy's weights: the part that has the rollout engine, in the actor's processes or in its own.

The ranks that generate also score what they wrote: processes of the reward function beside each rank judge its rows while the
rank does other work, so that responses need not travel for it.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from rlhub.config.sections.env import EnvConfig
from rlhub.config.sections.ppo import ActorRolloutRefConfig
from rlhub.config.sections.vla import vla_of
from rlhub.engines.rollout.base import SamplingParams
from rlhub.engines.rollout.embodied import EpisodeRunner, embedded, starts_of, training_rows
from rlhub.engines.rollout.registry import build_rollout_engine
from rlhub.engines.training.collectives import ensure_process_group
from rlhub.envs.vector.manager import EnvManagerOptions
from rlhub.models.tokenizer import load_tokenizer, read_vocabulary
from rlhub.models.vla.policy import PIXEL_VALUES
from rlhub.protocol import DataProto
from rlhub.protocol.sequences import IMAGES, ROUTED_EXPERTS, repeat_rows
from rlhub.rewards.pool import RewardFunction
from rlhub.rewards.rows import BackgroundScorer, Decoder, PackedOutcomes
from rlhub.rewards.srpo import episode_encoder
from rlhub.sharding_manager.route import SyncReport
from rlhub.sharding_manager.separate import WeightReceiver
from rlhub.single_controller import AsyncActorOptions, Dispatch, Worker, make_nd_compute_dataproto_dispatch_fn, register
from rlhub.single_controller.dispatch import collect_list
from rlhub.workers.generation import (
    check_completions,
    experts_column,
    generation_requests,
    pad_completions,
    rollout_setup,
    spoil_log_probs,
    spoil_weights,
    training_columns,
)
from rlhub.workers.memory_handover import Rendezvous, WorkerRuntime
from rlhub.workers.simulators import RemoteSimulators

logger = logging.getLogger(__name__)
ROLLOUT = make_nd_compute_dataproto_dispatch_fn(mesh_name="rollout")
OUTCOMES = dataclasses.replace(ROLLOUT, name="outcomes of mesh rollout", collect_fn=collect_list, proto=False)
"""The same, for methods that return no batch: one output for each part of the rows, in their order."""


class ScoringPart(Worker):
    """The methods of every worker whose ranks have rows that the reward function scores."""

    def _init_scoring(self, reward: RewardFunction, tokenizer: Decoder, ranks: int) -> None:
        """Takes this rank's share of the machine's processes of the reward function, which start with the first rows.

        ranks: so many have the same rows, of which one scores.
        """
        pool = reward.pool(self.local_rank // ranks, -(-self.context.local_world_size // ranks))
        self.scorer = BackgroundScorer(pool, tokenizer)
        self.closing.callback(self.scorer.close)

    @register(dispatch_mode=OUTCOMES, deadline="generate")
    def begin_scoring(self, batch: DataProto, key: str, max_failures: int) -> None:
        """Begins to score the rank's rows by the reward function, beside the rank's next calls, and returns at once.

        batch: needs responses, response_length and the columns of the data that the function reads.  max_failures: after more
        failures the rank's other rows are skipped.
        """
        if self._meshes["rollout"].is_collect:
            self.scorer.begin(key, batch, max_failures)

    @register(dispatch_mode=OUTCOMES, deadline="generate")
    def take_outcomes(self, key: str) -> PackedOutcomes | None:
        """Waits for the outcomes of the rank's rows that began to be scored under this key, and returns them in their order."""
        return self.scorer.take(key) if self._meshes["rollout"].is_collect else None


class RolloutPart(ScoringPart):
    """The methods of every worker that has the rollout engine.  All run on every rank; ranks of one tensor-parallel engine
    get the same prompts.

    reward: the function that scores rows; None where none does.  env: the simulators, each rank's own; None without any.
    """

    config: ActorRolloutRefConfig
    runtime: WorkerRuntime
    device: torch.device
    reward: RewardFunction | None = None
    env: EnvConfig | None = None

    def _init_rollout(self) -> None:
        """Builds the rollout engine (collective); it has no weights yet.  The process group must exist."""
        model = self.config.model
        tokenizer = load_tokenizer(model.path, trust_remote_code=model.trust_remote_code)
        self.vocabulary = read_vocabulary(model, tokenizer)
        dp_rank, tp_rank = divmod(self.rank, self.config.rollout.tensor_model_parallel_size)
        if self.reward is not None and tp_rank == 0:
            self._init_scoring(self.reward, tokenizer, self.config.rollout.tensor_model_parallel_size)
        setup = rollout_setup(self.config, self.runtime, self.device, dp_rank=dp_rank, tp_rank=tp_rank)
        self.records_experts = setup.routed_experts
        self.rollout = build_rollout_engine(setup)
        self.closing.callback(self.rollout.shutdown)
        self.rollout.initialize()
        self._register_dispatch_collect_info("rollout", dp_rank, tp_rank == 0)
        vla = vla_of(model)
        if self.env is not None and vla is not None:
            self.make_runner = partial(EpisodeRunner, self.rollout, self.env, vla, tokenizer)
            self.episodes = self.make_runner()
            self.closing.callback(lambda: self.episodes.close())
            self.encode = episode_encoder(self.env.srpo, self.device) if self.env.reward == "srpo" else None

    @property
    def bucket_bytes(self) -> int:
        """Size of the buckets in which weights come."""
        return self.config.rollout.update_weights_bucket_mb << 20

    def _wake_rollout(self) -> None:
        """Makes sure, before generation, that the engine has its weights and its memory."""

    @register(dispatch_mode=ROLLOUT, deadline="generate")
    def generate_sequences(self, prompts: DataProto) -> DataProto:
        """Generates meta_info["n"] samples per prompt, neighbours in prompt order, as training columns, with the images of a
        policy that reads them (pixel_values, images), and the experts of their tokens where the trainer replays them."""
        self._wake_rollout()
        meta, columns = prompts.meta_info, prompts.batch
        requests = generation_requests(
            columns["prompts"],
            columns["attention_mask"],
            columns["ordinal"],
            num_samples=meta["n"],
            run_seed=self.runtime.seed,
            images=columns.get(PIXEL_VALUES),
            pictures=columns.get(IMAGES),
        )
        sampling = dataclasses.replace(self._sampling(meta), routed_experts=self.records_experts and meta["log_probs"])
        completions = self.rollout.generate(requests, sampling)
        spoil_log_probs(completions, self.rank)
        check_completions(completions, self.vocabulary.size, meta["log_probs"])
        padded = pad_completions(
            completions, pad_id=self.vocabulary.pad_id, with_log_probs=meta["log_probs"], widest=self._widest
        )
        rows = training_columns(columns["prompts"], columns["attention_mask"], padded, meta["n"])
        if PIXEL_VALUES in columns.keys():
            rows[PIXEL_VALUES] = columns[PIXEL_VALUES].repeat_interleave(meta["n"], 0)
        if IMAGES in columns.keys():
            rows[IMAGES] = repeat_rows(columns[IMAGES], meta["n"])
        if sampling.routed_experts and completions:
            rows[ROUTED_EXPERTS] = experts_column(requests, completions)
        return DataProto.from_dict(tensors=rows)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, deadline="start")
    def place_simulators(self, places: Sequence[AsyncActorOptions]) -> None:
        """Starts the simulators in actors at these places, of which each rank has an equal part, in order; each of its stages has
        an equal part of those."""
        stages = len(self.episodes.stages)
        share = len(places) // (self.world_size * stages)
        own = iter(range(self.rank * stages * share, len(places), share))

        def make_env(options: EnvManagerOptions) -> RemoteSimulators:
            start = next(own)
            return RemoteSimulators(options, places[start : start + share])

        self.episodes = self.make_runner(make_env)
        for stage in self.episodes.stages:
            logger.info("%s runs in actors: %s", stage.env.options.name, stage.env.spec)

    @register(dispatch_mode=ROLLOUT, deadline="generate")
    def run_episodes(self, scenes: DataProto) -> DataProto:
        """Runs meta_info["n"] episodes from each scene in the rank's simulators (see `starts_of`).

        Returns a row for each call of the policy, in the order of scene, episode and call (see `training_rows`), with
        meta_info["policy_version"], where it is given, as a column (rows, response) int32, and with the embeddings of episodes
        where meta_info["embed"] asks for them.
        """
        self._wake_rollout()
        meta = scenes.meta_info
        calls = self.episodes.run(starts_of(scenes.batch, samples=meta["n"], run_seed=self.runtime.seed), self._sampling(meta))
        completions = [call.completion for call in calls]
        spoil_log_probs(completions, self.rank)
        check_completions(completions, self.vocabulary.size, meta["log_probs"])
        rows = training_rows(calls, self.episodes.vla, self.episodes.pad_id, samples=meta["n"], widest=self._widest)
        if meta.get("policy_version") is not None:
            rows["policy_version"] = torch.full(rows["responses"].shape, meta["policy_version"], dtype=torch.int32)
        if meta.get("embed") and self.env is not None and self.encode is not None:
            rows |= embedded(calls, self.encode, self.env.srpo.task)
        return DataProto.from_dict(tensors=rows)

    def _sampling(self, meta: Mapping[str, Any]) -> SamplingParams:
        return SamplingParams(
            temperature=float(meta["temperature"]),
            top_p=float(meta["top_p"]),
            top_k=int(meta["top_k"]),
            max_new_tokens=self.runtime.max_response_length,
            stop_token_ids=self.vocabulary.stop_token_ids,
            ignore_eos=self.config.rollout.ignore_eos,
            log_probs=bool(meta["log_probs"]),
        )

    def _widest(self, width: int) -> int:
        """Returns the longest row over all ranks, so that their parts join without padding again."""
        widest = torch.tensor([width], device=self.device)
        dist.all_reduce(widest, op=dist.ReduceOp.MAX)
        return int(widest)


class RolloutWorker(RolloutPart):
    """The rollout engine alone; its weights come from the actor's pool.  It keeps its memory while others train."""

    def __init__(
        self,
        config: ActorRolloutRefConfig,
        runtime: WorkerRuntime,
        *,
        reward: RewardFunction | None = None,
        env: EnvConfig | None = None,
    ) -> None:
        self.config, self.runtime, self.reward, self.env = config, runtime, reward, env
        self.device = runtime.torch_device(self.local_rank)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, deadline="start")
    def init_model(self) -> None:
        """Builds the engine without weights (collective)."""
        ensure_process_group(self.device, timeout_s=self.runtime.deadline_s)
        self._init_rollout()
        self.receiver = WeightReceiver(self.rollout, self.device, bucket_bytes=self.bucket_bytes)
        self.closing.callback(self.receiver.close)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, deadline="sync")
    def join_transfer(self, rendezvous: Rendezvous) -> None:
        """Connects with the actor's ranks (collective over both groups)."""
        rank = rendezvous.num_senders + self.rank
        self.receiver.connect(rendezvous.address, rendezvous.port, rank, rendezvous.size, self.runtime.deadline_s)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, deadline="sync")
    def sync_weights(self, version: int) -> SyncReport:
        """Receives the policy's weights as `version`, checked weight by weight (collective over both groups)."""
        report = self.receiver.receive(version)
        spoil_weights(self.rollout, self.rank)
        return report
