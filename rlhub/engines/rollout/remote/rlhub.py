"""rlhub's own server (rlhub.trainer.main_serve): requests stay through a pause, and each token comes with its version."""

from __future__ import annotations

from typing import Any

from rlhub.engines.rollout.base import Completion, GenerationRequest, Progress, SamplingParams
from rlhub.engines.rollout.registry import RolloutSetup
from rlhub.engines.rollout.remote.dialect import Call, openai_body, openai_completion, openai_part


class Server:
    trains = True
    keeps_requests = True
    processed = True
    health = "/health"

    def __init__(self, setup: RolloutSetup) -> None:
        """Nothing of the setup matters here."""

    def generate(self, request: GenerationRequest, params: SamplingParams, model: str) -> Call:
        return Call("/v1/completions", {**openai_body(request, params, model), "start": request.start})

    def completion(self, answer: Any, version: int) -> Completion:
        return openai_completion(answer, version)

    def part(self, event: Any, version: int, have: int) -> Progress | None:
        return openai_part(event, version)

    def pause(self) -> list[Call]:
        return [Call("/admin/pause", {})]

    def resume(self, *, recompute: bool) -> list[Call]:
        return [Call("/admin/resume", {"recompute": recompute})]

    def reload(self, folder: str, version: int, *, reset_version: bool) -> list[Call]:
        return [Call("/admin/weights", {"folder": folder, "version": version, "reset_version": reset_version})]
