"""Hugging Face engines that exchange their weights: bits of a cast, completions of a new engine, requests that go on."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
import torch

from rlhub.config.sections.ppo import ActorRolloutRefConfig
from rlhub.engines.rollout.base import GenerationRequest, SamplingParams
from rlhub.rollout_service.server import RolloutServer
from rlhub.sharding_manager.files import WeightWriter
from tests.support.plain_train_engine import PlainTrainEngine
from tests.support.rollout_service import RUNTIME
from tests.support.tiny_models import save_tiny_model

REQUESTS = [GenerationRequest(prompt_ids=[5, 6, 7 + i], seed=i) for i in range(4)]
SAMPLING = SamplingParams(max_new_tokens=12, ignore_eos=True)


async def replica(folder: Path, dtype: str) -> RolloutServer:
    config = ActorRolloutRefConfig()
    config.model.path = str(folder)
    config.rollout.name, config.rollout.dtype = "hf", dtype  # type: ignore[assignment]
    server = RolloutServer(config, RUNTIME)
    await server.start()
    return server


@pytest.mark.parametrize(("tied", "dtype"), [(True, "bfloat16"), (False, "float32")])
def test_exchanged_weights_generate_as_loaded_ones(tmp_path: Path, tied: bool, dtype: str) -> None:
    """A replica over four versions, and one that joins at the last: equal bits, fingerprints, tokens and log-probs."""
    train = PlainTrainEngine(save_tiny_model(tmp_path / "model", tied=tied))
    writer = WeightWriter(train, tmp_path / "weights", bucket_bytes=1 << 16, full_every=3)

    async def scenario() -> None:
        server = await replica(tmp_path / "model", dtype)
        for version in range(4):
            train.perturb(version)
            written = writer.write(version)
            running = asyncio.create_task(server.agenerate(REQUESTS[0], SAMPLING)) if version else None
            report = await server.update_weights(str(tmp_path / "weights"), version)
            assert report.fingerprint == written.fingerprint or version == 0
            if running is not None:
                versions = (await running).versions
                assert versions == sorted(versions) and versions[-1] in (version - 1, version)
        live = {piece.name: piece.tensor for piece in server.engine.live_weights()}
        for name, parameter in train.model.named_parameters():
            assert torch.equal(live[name], parameter.detach().to(live[name].dtype)), name
        late = await replica(tmp_path / "model", dtype)
        assert (await late.update_weights(str(tmp_path / "weights"), 3)).fingerprint == report.fingerprint
        ours, theirs = [[await one.agenerate(request, SAMPLING) for request in REQUESTS] for one in (server, late)]
        assert [(one.token_ids, one.log_probs) for one in ours] == [(one.token_ids, one.log_probs) for one in theirs]
        for one in (server, late):
            await one.shutdown()

    asyncio.run(scenario())
    writer.close()
