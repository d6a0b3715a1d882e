"""The policy that is trained, and the frozen reference: in the same processes, or in a pool of its own.

Thin shells: each method hands its rows to an engine and wraps what comes back.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path

from rlhub.algorithms.estimation import ColumnOutputs, compute_advantages, measure_batch, rollout_correction, select_tokens
from rlhub.algorithms.levels import Units
from rlhub.algorithms.statistics import Gather
from rlhub.config.sections.algorithm import AlgorithmConfig
from rlhub.config.sections.ppo import ActorRolloutRefConfig
from rlhub.config.sections.vla import vla_of
from rlhub.engines.training.base import TrainEngine
from rlhub.engines.training.collectives import check_finite, ensure_process_group
from rlhub.engines.training.registry import build_policy_engine, build_reference_engine
from rlhub.engines.training.updates import PolicyUpdater
from rlhub.models.throughput import ThroughputMeter
from rlhub.protocol import DataProto
from rlhub.sharding_manager.files import WeightWriter, new_in_memory
from rlhub.sharding_manager.mirror import COLLECTIVE, VersionServer
from rlhub.sharding_manager.route import SyncReport
from rlhub.sharding_manager.separate import WeightSender
from rlhub.single_controller import Dispatch, Worker, make_nd_compute_dataproto_dispatch_fn, register
from rlhub.single_controller.placement import DevicePlace, device_place
from rlhub.workers.base import EngineWorker
from rlhub.workers.memory_handover import Rendezvous, WorkerRuntime, memory_metrics, open_rendezvous, release_idle_memory

ACTOR = make_nd_compute_dataproto_dispatch_fn(mesh_name="actor")


class ActorPart(EngineWorker):
    """Has the methods of every worker with the actor, whatever else shares its process.  All methods run on every rank.

    train: False builds no optimizer.  needs_reference: keep the starting policy here too.  algorithm: read by what works on the
    token columns of a batch; None takes its defaults.  by_source: the same of data sources with an estimator of their own.
    """

    def __init__(
        self,
        config: ActorRolloutRefConfig,
        runtime: WorkerRuntime,
        *,
        train: bool = True,
        needs_reference: bool = False,
        algorithm: AlgorithmConfig | None = None,
        by_source: Mapping[str, AlgorithmConfig] | None = None,
    ) -> None:
        self.config, self.runtime, self.algorithm = config, runtime, algorithm or AlgorithmConfig()
        self.by_source = by_source or {}
        self.train, self.needs_reference = train, needs_reference
        self.device = runtime.torch_device(self.local_rank)
        self.hf_model = config.model
        vla = vla_of(config.model)
        self.units = Units(level=config.actor.log_prob_level, action_dim=vla.action_dim if vla else 1)
        self._writer: tuple[str, WeightWriter] | None = None  # and its folder
        self._server: VersionServer | None = None

    def _init_actor(self) -> None:
        """Builds the training engines (collective)."""
        ensure_process_group(self.device, timeout_s=self.runtime.deadline_s)
        self.engine = build_policy_engine(self.config, device=self.device, seed=self.runtime.seed, train=self.train)
        self.engine.publishes_adapters = self.config.rollout.lora_sync == "adapter" and self.config.model.lora_rank > 0
        self.engine.initialize()
        self.reference = self._build_reference()
        self._register_dispatch_collect_info("actor", self.engine.dp_rank, self.engine.is_collect)
        if self.train:
            self.throughput = ThroughputMeter(self.config.model, self.device, self.world_size // self.engine.dp_size)
            self.updater = PolicyUpdater(
                self.engine,
                self.config.actor,
                scale=self.config.actor.loss_scale_factor or self.runtime.max_response_length,
                correction=self.algorithm.rollout_correction,
                action_dim=self.units.action_dim,
            )
        self.engine.offload()  # what generates in this process is built next, and takes a share of the memory

    def _build_reference(self) -> TrainEngine | None:
        """Returns the frozen model, or None where the policy's own engine is the reference: with its adapters off."""
        if not self.needs_reference or (self.config.model.lora_rank > 0 and self.config.ref.model.path is None):
            return None
        reference = build_reference_engine(self.config, device=self.device, seed=self.runtime.seed)
        reference.initialize()
        reference.offload()
        return reference

    @register(dispatch_mode=ACTOR, deadline="infer", adds_columns=True)
    def compute_log_prob(self, batch: DataProto) -> DataProto:
        """Returns old_log_probs (rows, response) of the current policy, and sum_pi_squared and values where meta_info asks for
        them; meta_info["metrics"] are the throughput's."""
        release_idle_memory()
        started = time.perf_counter()
        extra = tuple(name for name in ("sum_pi_squared", "values") if batch.meta_info.get(name))
        outputs = self.engine.infer(dict(batch.batch.items()), outputs=("log_probs", *extra))
        columns = {"old_log_probs": outputs["log_probs"]} | {name: outputs[name] for name in extra}
        seconds = time.perf_counter() - started
        metrics = self.throughput.metrics("actor_infer", batch.batch["attention_mask"], 1, seconds * self._tokens_each())
        return DataProto.from_dict(tensors=columns, meta_info={"metrics": metrics})

    @register(dispatch_mode=ACTOR, deadline="infer", adds_columns=True)
    def compute_ref_log_prob(self, batch: DataProto) -> DataProto:
        """Returns ref_log_prob (rows, response) of the frozen reference."""
        release_idle_memory()
        engine = self.reference or self.engine
        outputs = engine.infer(dict(batch.batch.items()), outputs=("log_probs",), adapters=False)
        if self.reference is not None:
            self.reference.offload()
        return DataProto.from_dict(tensors={"ref_log_prob": outputs["log_probs"]})

    @register(dispatch_mode=ACTOR, deadline="infer", adds_columns=True)
    def compute_advantages(self, batch: DataProto) -> DataProto:
        """Returns advantages, returns and learn_mask (rows, response), with statistics of the whole batch (collective).

        meta_info: kl_coef, where the reward carries the KL; policy_version, with a column of that name.
        """
        outputs = compute_advantages(
            dict(batch.batch.items()),
            self._gather(batch),
            self.algorithm,
            kl_coef=batch.meta_info.get("kl_coef", 0.0),
            version=batch.meta_info.get("policy_version"),
            mask_truncated=self.config.actor.mask_truncated,
            by_source=self.by_source,
        )
        return self._new_columns(outputs)

    @register(dispatch_mode=ACTOR, deadline="infer")
    def measure_batch(self, batch: DataProto) -> DataProto:
        """Returns the metrics of a batch whose advantages are a user's own, in meta_info["metrics"] (collective).

        meta_info: as of `compute_advantages`.
        """
        columns, meta = dict(batch.batch.items()), batch.meta_info
        kl_coef, version = meta.get("kl_coef", 0.0), meta.get("policy_version")
        metrics = measure_batch(columns, self._gather(batch), self.algorithm, kl_coef=kl_coef, version=version)
        return DataProto(meta_info={"metrics": metrics if self.engine.dp_rank == 0 else {}})

    @register(dispatch_mode=ACTOR, deadline="infer", adds_columns=True)
    def rollout_correction(self, batch: DataProto) -> DataProto:
        """Returns loss_mask and, where tokens are weighted, importance_weights (rows, response) (collective)."""
        columns, config = dict(batch.batch.items()), self.algorithm.rollout_correction
        return self._new_columns(rollout_correction(columns, self._gather(batch), config, self.units))

    @register(dispatch_mode=ACTOR, deadline="infer", adds_columns=True)
    def select_tokens(self, batch: DataProto) -> DataProto:
        """Returns selected (rows, response), the tokens that the policy loss chose in training step meta_info["step"]
        (collective)."""
        columns, step, width = dict(batch.batch.items()), batch.meta_info["step"], self.units.action_dim
        chosen = select_tokens(
            columns, self._gather(batch), self.config.actor, seed=self.runtime.seed, step=step, action_dim=width
        )
        return self._new_columns(chosen)

    def _gather(self, batch: DataProto) -> Gather:
        """Returns the gather over the data-parallel ranks, which all have rows of the same batch (collective)."""
        return Gather.of(batch.batch["sample_index"], self.engine.gather if self.engine.dp_size > 1 else None)

    def _new_columns(self, outputs: ColumnOutputs) -> DataProto:
        """Returns new columns of the rank's rows; the metrics, which all ranks have, are the first one's."""
        metrics = outputs.metrics if self.engine.dp_rank == 0 else {}
        return DataProto.from_dict(tensors=outputs.columns, meta_info={"metrics": metrics})

    @register(dispatch_mode=ACTOR, deadline="update")
    def update_actor(self, batch: DataProto) -> DataProto:
        """Takes all optimizer steps of the batch; meta_info["metrics"] are global.  Raises NonFiniteError where they leave
        weights that are not finite."""
        release_idle_memory()
        started = time.perf_counter()
        rows, version = dict(batch.batch.items()), batch.meta_info.get("policy_version")
        metrics = self.updater.update(rows, batch.meta_info["num_mini_batches"], version)
        check_finite(self.engine, "after the update")
        seconds = time.perf_counter() - started
        epochs = self.config.actor.ppo_epochs
        metrics |= self.throughput.training("actor", batch.batch["attention_mask"], epochs, seconds * self._tokens_each())
        return DataProto(meta_info={"metrics": metrics | memory_metrics("actor", self.device)})

    def _tokens_each(self) -> float:
        """Returns the tokens of the last rows for each that was computed, by which a throughput counted of rows is too high."""
        counts = self.engine.token_counts
        return 1.0 if counts is None or not counts.rows else counts.ratio

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, deadline="sync")
    def write_weights(self, folder: str, version: int, full_every: int = 1) -> SyncReport:
        """Writes the policy's weights in the folder as `version` (collective); whoever generates with them goes on meanwhile.

        folder: COLLECTIVE for one of each rank's own, which it serves at the report's address.  full_every: see WeightWriter.
        """
        release_idle_memory()
        check_finite(self.engine, "before the sync")
        if self._writer is None or self._writer[0] != folder:
            self._writer = folder, self._new_writer(folder, full_every)
        report = self._writer[1].write(version)
        report.address = self._server.address if self._server is not None and folder == COLLECTIVE else ""
        return report

    def _new_writer(self, folder: str, full_every: int) -> WeightWriter:
        path = self._serve_own() if folder == COLLECTIVE else Path(folder)
        writer = WeightWriter(
            self.engine,
            path,
            bucket_bytes=self.config.rollout.update_weights_bucket_mb << 20,
            timeout_s=self.runtime.deadline_s,
            full_every=full_every,
            own_folder=folder == COLLECTIVE,
        )
        self.closing.callback(writer.close)
        return writer

    def _serve_own(self) -> Path:
        """Opens a folder in this machine's memory and serves it."""
        own = new_in_memory()
        self.closing.callback(own.close)
        self._server = VersionServer(
            own.path, host=self.context.node, rank=self.rank, timeout_s=self.runtime.deadline_s, device=self.engine.device
        )
        self.closing.callback(self._server.close)
        return own.path

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, deadline="sync")
    def device_places(self) -> DevicePlace:
        """Returns where this rank computes, for a replica of the rollout service that shares its device."""
        return device_place(self.context)


class ActorWorker(ActorPart):
    """Is the actor alone; the rollout engines are on a pool of their own and get the weights sent."""

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, deadline="start")
    def init_model(self) -> None:
        """Builds the training engines (collective)."""
        self._init_actor()
        self.sender = WeightSender(self.engine, bucket_bytes=self.config.rollout.update_weights_bucket_mb << 20)
        self.closing.callback(self.sender.close)

    @register(dispatch_mode=Dispatch.RANK_ZERO, deadline="sync")
    def open_transfer(self, num_receivers: int) -> Rendezvous:
        """Returns the address at which the ranks of this group and `num_receivers` of the rollout's can meet."""
        return open_rendezvous(self.context.node, self.world_size, num_receivers)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, deadline="sync")
    def join_transfer(self, rendezvous: Rendezvous) -> None:
        """Joins the rollout's ranks (collective over both groups)."""
        self.sender.connect(rendezvous.address, rendezvous.port, self.rank, rendezvous.size, self.runtime.deadline_s)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, deadline="sync")
    def sync_weights(self, version: int) -> SyncReport:
        """Sends the policy's weights as `version` (collective over both groups)."""
        check_finite(self.engine, "before the sync")
        return self.sender.send(version)


REFERENCE = make_nd_compute_dataproto_dispatch_fn(mesh_name="reference")


class ReferenceWorker(Worker):
    """Is the frozen starting policy, of a policy with adapters the model under them, or a model of its own.

    All methods run on every rank.
    """

    def __init__(self, config: ActorRolloutRefConfig, runtime: WorkerRuntime) -> None:
        self.config, self.runtime = config, runtime
        self.device = runtime.torch_device(self.local_rank)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, deadline="start")
    def init_model(self) -> None:
        """Builds the reference's engine (collective)."""
        ensure_process_group(self.device, timeout_s=self.runtime.deadline_s)
        self.engine = build_reference_engine(self.config, device=self.device, seed=self.runtime.seed)
        self.engine.initialize()
        self.engine.offload()
        self._register_dispatch_collect_info("reference", self.engine.dp_rank, self.engine.is_collect)

    @register(dispatch_mode=REFERENCE, deadline="infer", adds_columns=True)
    def compute_ref_log_prob(self, batch: DataProto) -> DataProto:
        """Returns ref_log_prob (rows, response) of the frozen reference."""
        outputs = self.engine.infer(dict(batch.batch.items()), outputs=("log_probs",))
        self.engine.offload()
        return DataProto.from_dict(tensors={"ref_log_prob": outputs["log_probs"]})
