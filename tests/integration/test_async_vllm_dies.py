"""A worker of vLLM's that dies while nobody asks for anything: the replica says so by itself."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import psutil

from rlhub.config.sections.ppo import ActorRolloutRefConfig
from rlhub.rollout_service.server import ReplicaStatus, RolloutServer
from rlhub.single_controller import AsyncActorOptions, ClassWithInitArgs, start_async_actor
from rlhub.utils.aio.loop_thread import LoopThread
from rlhub.workers.memory_handover import WorkerRuntime
from tests.support.chat_model import save_chat_model
from tests.support.tiny_models import save_tiny_model

RUNTIME = WorkerRuntime(device="cpu", seed=0, max_prompt_length=8, max_response_length=8, deadline_s=60.0)
LIMIT_S = 600.0  # three processes import vLLM, on a machine that may be busy


def test_an_idle_replica_says_that_its_engine_has_died(ray_cluster: None, tmp_path: Path) -> None:
    save_chat_model(tmp_path)
    save_tiny_model(tmp_path)
    config = ActorRolloutRefConfig()
    config.model.path = str(tmp_path)
    config.rollout.name, config.rollout.mode, config.rollout.tensor_model_parallel_size = "vllm", "async", 2
    options = AsyncActorOptions(name="rollout-0", num_cpus=0.0, start_deadline_s=LIMIT_S)
    actor = start_async_actor(ClassWithInitArgs(RolloutServer, config, RUNTIME, load_checkpoint=True), options)
    loop = LoopThread("caller")
    try:
        loop.run(actor.call("start", deadline_s=LIMIT_S))

        def status() -> ReplicaStatus:
            found = loop.run(actor.call("status", deadline_s=LIMIT_S))
            assert isinstance(found, ReplicaStatus)
            return found

        assert status().failure == ""
        (core,) = [child for child in psutil.Process(status().pid).children() if child.children()]
        os.kill(core.children()[0].pid, signal.SIGKILL)
        deadline = time.monotonic() + LIMIT_S
        while not status().failure:
            assert time.monotonic() < deadline, "it never says so"
            time.sleep(0.05)
        assert "has ended" in status().failure
    finally:
        actor.kill()
        loop.stop()
