"""How deep the call of vLLM lies under the driver's `generate_sequences`, over both processes."""

from __future__ import annotations

from typing import Any

import pytest
import ray
import torch

from rlhub.protocol import DataProto
from rlhub.single_controller.ray import RayClassWithInitArgs, RayResourcePool, RayWorkerGroup
from tests.integration.call_depth_worker import LOG_PROB, TOKEN, EnteredRollout, frames

MOST_FRAMES = 9


def prompts() -> DataProto:
    ids = torch.tensor([[3, 4], [5, 6]])
    tensors = {"prompts": ids, "attention_mask": torch.ones_like(ids), "ordinal": torch.arange(2)}
    return DataProto.from_dict(tensors, meta_info={"n": 1, "temperature": 1.0, "top_p": 1.0, "top_k": -1, "log_probs": True})


def test_nine_frames_lie_between_the_driver_and_vllm(ray_cluster: None, monkeypatch: pytest.MonkeyPatch) -> None:
    pool = RayResourcePool([1])
    group: Any = RayWorkerGroup(pool, RayClassWithInitArgs(EnteredRollout))
    sent: list[list[str]] = []
    remote = ray.actor.ActorMethod._remote

    def noting(method: Any, *args: Any, **kwargs: Any) -> Any:
        sent.append(frames())
        return remote(method, *args, **kwargs)

    try:
        group.generate_sequences(prompts())  # which asks for the mesh too, once
        with monkeypatch.context() as patch:
            patch.setattr(ray.actor.ActorMethod, "_remote", noting)
            rows = group.generate_sequences(prompts())
        (worker,) = group.frames_of_vllms_caller()
    finally:
        group.close()
        pool.release()
    assert rows.batch["responses"].tolist() == [[TOKEN], [TOKEN]]
    assert rows.batch["rollout_log_probs"].tolist() == [[LOG_PROB], [LOG_PROB]]
    (driver,) = sent
    assert driver[0].endswith(":__call__") and worker[-1] == "engines/rollout/vllm/engine.py:generate"
    assert "workers/rollout.py:generate_sequences" in worker
    assert len(driver) + len(worker) <= MOST_FRAMES, "\n" + "\n".join([*driver, "-- the actor --", *worker])
