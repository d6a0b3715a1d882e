"""The root of `python -m rlhub.trainer.main_serve`'s configuration, and its own checks."""

from __future__ import annotations

from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from rlhub.config.schema import NonNegativeFloat, PositiveFloat, PositiveInt, PositiveUnitFloat, Range, Seed
from rlhub.config.sections.rollout import RolloutConfig, TopK
from rlhub.config.sections.training import ModelConfig

Port = Annotated[int, Range(ge=0)]
MAX_PORT = 65535


@dataclass(slots=True, kw_only=True)
class ServerConfig:
    host: str = "127.0.0.1"
    """Address to listen on. Loopback admits this machine only; another address (0.0.0.0) admits all machines with the key."""
    port: Port = 8000
    """Port to listen on; 0: a free one, which the log names."""
    api_key_file: str | None = None
    """File with the key that clients send; a file that does not exist is created with a random key. null: a random key, in the
    log."""
    admin_key_file: str | None = None
    """File with the key of /admin (pause, resume, new weights, status), as api_key_file; the clients' key does not open it. A
    trainer that generates here names the file in rollout.remote.admin_key_file. null: a random key, in the log."""
    model_name: str = "policy"
    """Name of the model that clients see."""
    max_concurrent: PositiveInt = 1024
    """Largest number of requests that are answered at once; further ones are refused (429)."""
    max_samples: PositiveInt = 512
    """Largest number of answers to one request, which is its prompts times n; a larger request is refused (400)."""
    connection_s: PositiveFloat = 60.0
    """Seconds for a client to send a request's head, to send its body, to take each part of a stream, and between two requests;
    then its connection is closed."""
    request_s: PositiveFloat = 7200.0
    """Seconds for the answer to a request, its time in the queue and in pauses included; then the answer is 504."""
    tool_format: str = "hermes"
    """Format of tool calls in the model's text: a registered name, or vllm:<name> for a tool parser of vLLM's."""
    reasoning_parser: str | None = None
    """Name of vLLM's parser that takes the thoughts out of answers (qwen3, deepseek_r1, ...); they are returned beside the text.
    null: thoughts are text."""
    temperature: NonNegativeFloat = 1.0
    """Sampling temperature of requests that name none; 0 is greedy."""
    top_p: PositiveUnitFloat = 1.0
    """Nucleus (top-p) of requests that name none; 1 is off."""
    top_k: TopK = -1
    """Top-k of requests that name none; -1 is off."""
    chat_template_kwargs: dict[str, Any] = field(default_factory=dict)
    """Variables of the chat template, such as enable_thinking."""
    ready_file: str | None = None
    """File to which the server writes its address once it answers, for programs that started it; null: none."""


@dataclass(slots=True, kw_only=True)
class ServeConfig:
    model: ModelConfig = field(default_factory=ModelConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    """The engine; its settings for training (n, temperature, mode, weights, agents) are not read. An engine that has failed is
    rebuilt, at most replica_restarts times without a completion in between; then the server ends. With
    tensor_model_parallel_size above 1 vLLM runs in processes of its own, one for each part of the model."""
    server: ServerConfig = field(default_factory=ServerConfig)
    device: Literal["auto", "cuda", "cpu"] = "auto"
    """Device on which the engine computes; auto: cuda if this machine has GPUs."""
    seed: Seed = 1
    """Seed of the engine's sampling; requests with a seed of their own do not read it."""
    plugins: list[str] = field(default_factory=list)
    """Python modules that register your own parts; they are imported first."""


def problems(config: ServeConfig, set_keys: AbstractSet[str]) -> list[str]:
    """Returns the problems that the settings alone show."""
    found = []
    if config.server.port > MAX_PORT:
        found.append(f"server.port={config.server.port}: at most {MAX_PORT}")
    return found
