"""The server process: an engine that holds a model, the endpoint over it, and new weights while it serves."""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import signal
from functools import partial
from pathlib import Path

import torch

from rlhub.agents.openai_server.server import OpenAIServer, ServerOptions
from rlhub.config.devices import count_gpus, torch_has_cuda
from rlhub.config.sections.serve import ServeConfig
from rlhub.engines.rollout.base import ExternalWeights, RolloutEngine, SamplingParams
from rlhub.engines.rollout.registry import RolloutSetup, build_rollout_engine
from rlhub.errors import ConfigError
from rlhub.models.shape import read_model_shape
from rlhub.models.tokenizer import check_tokenizer, load_tokenizer, read_vocabulary
from rlhub.tools.registry import TOOL_FORMATS
from rlhub.trainer.serve_engine import ServedEngine, ServeLimits
from rlhub.utils.atomic import write_text

logger = logging.getLogger(__name__)

DEFAULT_MODEL_LEN = 8192
"""Bound where neither the settings nor the model name one."""
KEY_BYTES = 32
INITIAL_VERSION = 0


def serve(config: ServeConfig) -> int:
    """Until SIGINT or SIGTERM; the exit status is 0."""
    check_tokenizer(config.model)
    rollout = config.rollout
    limits = ServeLimits(
        recompute=rollout.recompute_kv_cache,
        bucket_bytes=rollout.update_weights_bucket_mb << 20,
        rebuilds=rollout.replica_restarts,
    )
    engine = ServedEngine(partial(build_engine, config), limits)
    try:
        return asyncio.run(_serve(config, engine))
    finally:
        engine.shutdown()


async def _serve(config: ServeConfig, engine: ServedEngine) -> int:
    stopped = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, stopped.set)
    key = read_key("api_key_file", config.server.api_key_file)
    server = build_server(config, engine, key, read_key("admin_key_file", config.server.admin_key_file))
    address = await server.start()
    logger.info("serving %s at %s/v1", config.model.path, address)
    if config.server.ready_file is not None:
        write_text(Path(config.server.ready_file).expanduser(), address)
    watching = asyncio.create_task(engine.watch())
    stopping = asyncio.create_task(stopped.wait())
    await asyncio.wait({watching, stopping}, return_when=asyncio.FIRST_COMPLETED)
    logger.info("stopping")
    await server.aclose()
    if watching.done():
        watching.result()  # raises why the engine cannot be mended
    watching.cancel()
    return 0


def build_engine(config: ServeConfig) -> RolloutEngine:
    """With the model's weights, as version 0."""
    config.rollout.max_model_len = max_model_len(config)
    config.rollout.mode = "async"  # single requests, that come and go
    engine = build_rollout_engine(
        RolloutSetup(
            config=config.rollout,
            model=config.model,
            device=torch.device(device_of(config)),
            seed=config.seed,
            max_prompt_length=0,
            max_response_length=0,
            load_checkpoint=True,
        )
    )
    engine.initialize()
    if isinstance(engine, ExternalWeights):
        with engine.overwriting(INITIAL_VERSION):
            """They are those of the files already; its workers are told the version."""
    else:
        engine.version = INITIAL_VERSION
    return engine


def max_model_len(config: ServeConfig) -> int:
    """Longest conversation: as set, else what the model has positions for, within reason."""
    if config.rollout.max_model_len is not None:
        return config.rollout.max_model_len
    path = Path(config.model.path or "")
    positions = read_model_shape(path, config.model.override_config).max_positions if path.is_dir() else 0
    return min(positions or DEFAULT_MODEL_LEN, DEFAULT_MODEL_LEN)


def device_of(config: ServeConfig) -> str:
    """Where the engine computes."""
    if config.device != "auto":
        return config.device
    return "cuda" if count_gpus() > 0 and torch_has_cuda() else "cpu"


def build_server(config: ServeConfig, engine: ServedEngine, key: str, admin_key: str) -> OpenAIServer:
    """The endpoint, not yet listening."""
    tokenizer = load_tokenizer(config.model.path, trust_remote_code=config.model.trust_remote_code)
    asked, length, vocabulary = config.server, max_model_len(config), read_vocabulary(config.model, tokenizer)
    sampling = SamplingParams(
        temperature=asked.temperature,
        top_p=asked.top_p,
        top_k=asked.top_k,
        max_new_tokens=length,
        stop_token_ids=vocabulary.stop_token_ids,
    )
    options = ServerOptions(
        model=asked.model_name,
        max_model_len=length,
        host=asked.host,
        port=asked.port,
        key=key,
        admin_key=admin_key,
        max_concurrent=asked.max_concurrent,
        max_samples=asked.max_samples,
        connection_s=asked.connection_s,
        request_s=asked.request_s,
        vocab_size=vocabulary.size,
        find_calls=TOOL_FORMATS.get(asked.tool_format),
        template_kwargs=asked.chat_template_kwargs,
    )
    return OpenAIServer(engine, tokenizer, sampling, options, admin=engine)


def read_key(setting: str, file: str | None) -> str:
    """The key in the file, which is made with a random one if it does not exist; without a file a random one, which is logged."""
    if file is None:
        key = secrets.token_urlsafe(KEY_BYTES)
        logger.info("the %s of this run is %s (server.%s keeps one)", setting.removesuffix("_file"), key, setting)
        return key
    path = Path(file).expanduser()
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError:
        key = path.read_text(encoding="utf-8").strip()
        if not key:
            raise ConfigError(f"server.{setting}: {path} is empty; write a key to it, or remove it") from None
        return key
    except OSError as error:
        raise ConfigError(f"server.{setting}: {path} cannot be made: {error}") from error
    key = secrets.token_urlsafe(KEY_BYTES)
    with os.fdopen(descriptor, "w", encoding="utf-8") as stream:
        stream.write(key)
    return key
