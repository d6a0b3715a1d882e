"""The table of rollout engines, the engine that a configuration selects, and the settings that an engine cannot serve.

Importing this module loads neither torch nor an engine, so names can be checked before any process starts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlhub.config.sections.reward import JudgeConfig
from rlhub.config.sections.rollout import RolloutConfig
from rlhub.config.sections.training import ModelConfig
from rlhub.errors import ConfigError
from rlhub.models.shape import NUM_EXPERTS, read_model_values
from rlhub.registry import Registry

if TYPE_CHECKING:
    import torch

    from rlhub.engines.rollout.base import RolloutEngine


@dataclass(slots=True, kw_only=True)
class RolloutSetup:
    """Everything that an engine is built from.

    seed: the base seed of the run; engines add `dp_rank` where they need a generator of their own.
    max_prompt_length, max_response_length: limits in tokens.
    dp_rank, tp_rank: the number of this rank's replica of the engine, and the rank's place inside the replica.
    load_checkpoint: True reads the model's weights from disk; False leaves them undefined until the first update.
    structured: requests may have a JSON schema, for which the engine reads the model's tokenizer.
    routed_experts: whole batches may ask for the experts of their tokens.
    """

    config: RolloutConfig
    model: ModelConfig
    device: torch.device
    seed: int
    max_prompt_length: int
    max_response_length: int
    dp_rank: int = 0
    tp_rank: int = 0
    load_checkpoint: bool = False
    structured: bool = False
    routed_experts: bool = False

    @property
    def adapters(self) -> bool:
        """Returns whether updates bring LoRA adapters alone: the engine then always reads the base from the model's files."""
        return self.config.lora_sync == "adapter" and self.model.lora_rank > 0

    @property
    def reads_files(self) -> bool:
        """Returns whether the engine reads weights from the model's files."""
        return self.load_checkpoint or self.adapters

    @property
    def max_model_len(self) -> int:
        """Returns the longest prompt plus completion, in tokens."""
        return self.config.max_model_len or self.max_prompt_length + self.max_response_length

    def step_limits(self) -> dict[str, int | None]:
        """Returns the limits of an engine's step; None lets the engine choose for the GPU."""
        sequences, tokens = self.config.max_num_seqs, self.config.max_num_batched_tokens
        if self.device.type == "cpu":
            sequences, tokens = self.config.most_sequences, self.config.most_tokens
        if tokens is not None:
            tokens = max(tokens, self.max_model_len, sequences or 0)
        return {"max_num_seqs": sequences, "max_num_batched_tokens": tokens}


EngineFactory = Callable[[RolloutSetup], "RolloutEngine"]

ROLLOUT_ENGINES: Registry[EngineFactory] = Registry("rollout engine")
"""`requires` names the Python packages that an engine needs.  A row may have these companions:

problems: (rollout section, *, trains: whether the job updates the weights) -> sentences on what is wrong with the settings that
    the engine reads.
PARALLEL_SERVICE: the engine that takes this one's place where single requests are served with tensor parallelism.
MOST_REPLICAS: (rollout section) -> the largest number of replicas of a service; without it every place may have one.
MEMORY_SHARE: (rollout or judge section) -> the share of a GPU's memory that the engine reserves, 0 for an engine that allocates
    only what it needs; without it the engine has no model on the run's GPUs.
MODEL_PROBLEMS: (content of config.json, *, where: the key of the engine's name) -> sentences on what keeps the engine from
    running a model; it loads no torch.
QUANTIZED: (rollout section, content of config.json, *, device, reads_files) -> reasons why the engine cannot generate with
    rollout.quantization; an engine without it holds weights as they are.
RECORDING_PROBLEMS: (rollout section, device) -> sentences on what keeps the engine from telling the experts of its tokens;
    without it the engine cannot.
SLEEPS: (rollout section) -> whether a replica's engine frees memory when it sleeps; without it the engine does not.
"""

PARALLEL_SERVICE, MOST_REPLICAS, MEMORY_SHARE, SLEEPS = "parallel_service", "most_replicas", "memory_share", "sleeps"
MODEL_PROBLEMS, QUANTIZED, RECORDING_PROBLEMS = "model_problems", "quantized", "recording_problems"
_CHECKS = "rlhub.engines.rollout.registry"
_PROCESSES = "rlhub.engines.rollout.vllm.async_engine:AsyncVLLMEngine"
EXPERTS_ON_VLLM = ("qwen2_moe", "qwen3_moe")
"""Models with experts whose weights vLLM takes under the names that the trainer sends."""
_VLLM = {MEMORY_SHARE: f"{_CHECKS}:gpu_memory_utilization", MODEL_PROBLEMS: f"{_CHECKS}:vllm_problems"}
ROLLOUT_ENGINES.add_lazy(
    "vllm",
    "rlhub.engines.rollout.vllm.engine:VLLMEngine",
    requires={"vllm"},
    companions={
        PARALLEL_SERVICE: _PROCESSES,
        QUANTIZED: f"{_CHECKS}:vllm_reasons",
        RECORDING_PROBLEMS: f"{_CHECKS}:vllm_recording_problems",
        SLEEPS: f"{_CHECKS}:is_one_process",
        **_VLLM,
    },
)
ROLLOUT_ENGINES.add_lazy(
    "vllm_async", _PROCESSES, requires={"vllm"}, companions={"problems": f"{_CHECKS}:service_problems", **_VLLM}
)
ROLLOUT_ENGINES.add_lazy(
    "hf",
    "rlhub.engines.rollout.hf.engine:HFEngine",
    companions={
        "problems": f"{_CHECKS}:one_device_problems",
        MEMORY_SHARE: f"{_CHECKS}:no_share",
        QUANTIZED: f"{_CHECKS}:hf_reasons",
        RECORDING_PROBLEMS: f"{_CHECKS}:no_recording_problems",
        SLEEPS: f"{_CHECKS}:is_one_process",
    },
)
ROLLOUT_ENGINES.add_lazy(
    "remote",
    "rlhub.engines.rollout.remote.engine:RemoteEngine",
    companions={
        "problems": "rlhub.engines.rollout.remote.server:remote_problems",
        MOST_REPLICAS: "rlhub.engines.rollout.remote.server:one_replica_per_server",
    },
)
ROLLOUT_ENGINES.add_lazy("fake", "rlhub.engines.rollout.fake:FakeEngine")


def resolve_engine_name(name: str) -> str:
    """Returns the engine's name.  `auto` becomes vllm where it is installed and hf elsewhere; any other name is returned
    unchanged."""
    if name != "auto":
        return name
    return "vllm" if find_spec("vllm") is not None else "hf"


def engine_factory(config: RolloutConfig) -> EngineFactory:
    """Returns the factory of the configured engine.  Raises RegistryError for an unknown `config.name`."""
    name = resolve_engine_name(config.name)
    if config.mode == "async" and config.tensor_model_parallel_size > 1:
        in_its_place: EngineFactory | None = ROLLOUT_ENGINES.companion(name, PARALLEL_SERVICE)
        return in_its_place or ROLLOUT_ENGINES.get(name)
    return ROLLOUT_ENGINES.get(name)


def most_replicas(config: RolloutConfig) -> int | None:
    """Returns the largest number of replicas that a service of single requests can have, or None if the engine has no limit."""
    limit: Callable[[RolloutConfig], int] | None = ROLLOUT_ENGINES.companion(resolve_engine_name(config.name), MOST_REPLICAS)
    return None if limit is None else limit(config)


def replicas_sleep(config: RolloutConfig) -> bool:
    """Returns whether replicas with the configured engine free memory when they sleep, as `free_cache_engine` wants."""
    judge: Callable[[RolloutConfig], bool] | None = ROLLOUT_ENGINES.companion(resolve_engine_name(config.name), SLEEPS)
    return config.free_cache_engine and judge is not None and judge(config)


def is_one_process(config: RolloutConfig) -> bool:
    """Returns whether a replica's engine is in the replica's own process."""
    return config.tensor_model_parallel_size == 1


def memory_share(name: str, config: RolloutConfig | JudgeConfig) -> float | None:
    """Returns the share of a GPU's memory that the engine `name` reserves, weights included: 0 for an engine that allocates
    only what it needs, None for one that has no model on the run's GPUs."""
    name = resolve_engine_name(name)
    if name not in ROLLOUT_ENGINES:
        return None
    share: Callable[[RolloutConfig | JudgeConfig], float] | None = ROLLOUT_ENGINES.companion(name, MEMORY_SHARE)
    return None if share is None else share(config)


def model_problems(name: str, model: ModelConfig, *, where: str) -> list[str]:
    """Returns sentences on what keeps the engine `name` from running a local model, judged by its config.json.

    Returns [] for a hub name, and for a folder that cannot be read, which other checks report.  where: the key of the engine's
    name.
    """
    name, values = resolve_engine_name(name), _local_values(model)
    judge = ROLLOUT_ENGINES.companion(name, MODEL_PROBLEMS) if name in ROLLOUT_ENGINES else None
    found: list[str] = judge(values, where=f"{where}={name}") if judge is not None and values else []
    return found


def quantization_problems(config: RolloutConfig, model: ModelConfig, *, device: str, reads_files: bool = False) -> list[str]:
    """Returns sentences on what keeps the configured engine from generating with `config.quantization`.

    reads_files: its weights are those of the model's files, not a trainer's.
    """
    name = resolve_engine_name(config.name)
    if config.quantization is None or name not in ROLLOUT_ENGINES:
        return []
    judge = ROLLOUT_ENGINES.companion(name, QUANTIZED)
    others = ", ".join(other for other in ROLLOUT_ENGINES.names() if ROLLOUT_ENGINES.companion(other, QUANTIZED))
    reasons = [f"this engine holds its weights as they are; set {KEY}.name to one of {others}"]
    if judge is not None:
        reasons = judge(config, _local_values(model), device=device, reads_files=reads_files)
    if config.lora_sync == "adapter" and model.lora_rank > 0:
        reasons.append(f"an adapter alone would be added to a base that no update quantizes; set {KEY}.lora_sync=merged")
    if model.vla:
        reasons.append("a policy of actions (model.vla) is not stored quantized")
    return [f"{KEY}.quantization={config.quantization} with {KEY}.name={name}: {reason}" for reason in reasons]


def _local_values(model: ModelConfig) -> dict[str, Any]:
    """Returns the content of the config.json of a model in a folder; {} for one that is elsewhere or cannot be read."""
    path = Path(model.path or "").expanduser()
    try:
        return read_model_values(path, model.override_config) if model.path and path.is_dir() else {}
    except ConfigError:
        return {}


def build_rollout_engine(setup: RolloutSetup) -> RolloutEngine:
    """Builds the configured engine, not yet initialized.  Raises RegistryError for an unknown `config.name`."""
    return engine_factory(setup.config)(setup)


# --- the companions of the rows above ----------------------------------------------------------------------------------------

KEY = "actor_rollout_ref.rollout"


def one_device_problems(config: RolloutConfig, *, trains: bool) -> list[str]:
    """Returns a sentence if the settings ask an engine without tensor parallelism for several devices."""
    size = config.tensor_model_parallel_size
    if size == 1:
        return []
    return [
        f"{KEY}.tensor_model_parallel_size={size} with {KEY}.name={config.name}: this engine has one device a copy; set it to 1, "
        f"or {KEY}.name=vllm"
    ]


def service_problems(config: RolloutConfig, *, trains: bool) -> list[str]:
    """Returns a sentence if the settings use an engine that only serves single requests for whole batches."""
    if config.mode == "async":
        return []
    return [f"{KEY}.name={config.name} with {KEY}.mode={config.mode}: this engine is for mode=async; set that, or name=vllm"]


def vllm_problems(values: Mapping[str, Any], *, where: str) -> list[str]:
    """Returns a sentence if vLLM would generate with a model that reads images, or with experts whose names in its layout of them
    are not known."""
    if values.get("vision_config"):
        return [
            f"{where}: the model reads images. vLLM's models of pictures import torchvision, which is not in this environment's "
            "constraints, and fuse vision weights, which no check after a sync could read; for a policy of actions it also lacks "
            f"sampling at given places and the value head; set {where.partition('=')[0]}=hf"
        ]
    count = next((int(values[name]) for name in NUM_EXPERTS if values.get(name)), 1)
    if count == 1 or values.get("model_type") in EXPERTS_ON_VLLM:
        return []
    kind, key, known = values.get("model_type"), where.partition("=")[0], " and ".join(EXPERTS_ON_VLLM)
    return [
        f"{where}: the model is a {kind} with {count} experts. vLLM fuses experts into a layout of its own, in which new weights "
        f"are known to be right for {known}; set {key}=hf (slower), or have a server of another job generate (name=remote)"
    ]


def no_recording_problems(config: RolloutConfig, device: str) -> list[str]:
    """Returns []: the engine sees the model's routers."""
    return []


def vllm_recording_problems(config: RolloutConfig, device: str) -> list[str]:
    """Returns the settings with which vLLM does not return the experts of tokens."""
    if device == "cpu":
        return [f"vLLM records experts by its second model runner, which needs Triton and so a GPU; set {KEY}.name=hf"]
    if not config.enable_prefix_caching:
        return [f"vLLM keeps the experts of tokens with the blocks of its prefix cache; set {KEY}.enable_prefix_caching=true"]
    if config.tensor_model_parallel_size > 1:
        return [f"vLLM tells the experts of tokens on an engine's first rank alone; set {KEY}.tensor_model_parallel_size=1"]
    return []


def no_share(config: RolloutConfig | JudgeConfig) -> float:
    """Returns 0: the engine allocates only the memory that its weights and requests need."""
    return 0.0


def gpu_memory_utilization(config: RolloutConfig | JudgeConfig) -> float:
    """Returns the share of a GPU's memory that vLLM reserves for weights and key-value cache together."""
    return config.gpu_memory_utilization


# --- engines with quantized weights ---------------------------------------------------------------------------------------------

BLOCK = 128
"""Rows and columns of the blocks of protocol.weights.pieces, which loads torch."""
VLLM_QUANTIZES_NO_FILES = (
    "vLLM would read the model's files as if they were quantized already; only weights that a trainer sends are quantized on the "
    f"way. Set it to null, or {KEY}.name=hf"
)


def hf_reasons(config: RolloutConfig, values: Mapping[str, Any], *, device: str, reads_files: bool) -> list[str]:
    """Returns why the hf engine cannot generate with quantized weights.  values: the content of config.json, empty where that is
    not known.  device: cpu or cuda.  reads_files: as in `quantization_problems`."""
    return [*_model_reasons(values)]


def vllm_reasons(config: RolloutConfig, values: Mapping[str, Any], *, device: str, reads_files: bool) -> list[str]:
    """Returns why vLLM cannot generate with quantized weights.  Arguments as in `hf_reasons`."""
    found = [*_model_reasons(values)]
    if reads_files:
        found.append(VLLM_QUANTIZES_NO_FILES)
    if device == "cpu":
        found.append(
            "vLLM's kernels for this on CPU need AMX and repack the weights, which could not be written again; set "
            f"{KEY}.name=hf, or run on GPUs"
        )
    if config.dtype == "float32":
        found.append(f"vLLM computes with such weights in 16 bits only; set {KEY}.dtype=bfloat16")
    if config.mode == "async" and config.tensor_model_parallel_size > 1:
        found.append(
            f"replicas with {KEY}.tensor_model_parallel_size={config.tensor_model_parallel_size} hold their weights in processes "
            "of vLLM's, to which none go quantized; set it to 1"
        )
    return found + [*_block_reasons(values, config.tensor_model_parallel_size)]


def _model_reasons(values: Mapping[str, Any]) -> Iterator[str]:
    if count := next((int(values[name]) for name in NUM_EXPERTS if int(values.get(name) or 0) > 1), 0):
        yield f"the model has {count} experts in a layer, whose fused weights no engine here stores quantized"
    if values.get("vision_config"):
        yield "the model reads images, and its vision tower is not stored quantized"


def _block_reasons(values: Mapping[str, Any], ranks: int) -> Iterator[str]:
    """Yields the sizes of the model, for one of `ranks` tensor-parallel ranks, that are no whole blocks."""
    if not {"hidden_size", "num_attention_heads", "intermediate_size"} <= values.keys():
        return
    heads, hidden = int(values["num_attention_heads"]), int(values["hidden_size"])
    width = int(values.get("head_dim") or hidden // heads)
    kv_heads = int(values.get("num_key_value_heads") or heads)
    of_ranks = f" / {ranks} ranks" if ranks > 1 else ""
    sizes = {
        f"hidden_size={hidden}": hidden,
        f"intermediate_size={values['intermediate_size']}{of_ranks}": int(values["intermediate_size"]) / ranks,
        f"{heads} heads x {width}{of_ranks}": heads * width / ranks,
        f"{kv_heads} key-value heads x {width}{of_ranks}": max(kv_heads // ranks, 1) * width,
    }
    if cut := [f"{name} = {size:g}" for name, size in sizes.items() if size % BLOCK]:
        lower = f", or {KEY}.tensor_model_parallel_size lower" if ranks > 1 else ""
        yield (
            f"a scale belongs to {BLOCK} x {BLOCK} elements, and vLLM stores projections one below the other, so that sizes must "
            f"be multiples of {BLOCK}: {', '.join(cut)}; set {KEY}.name=hf{lower}"
        )
