"""Section `actor_rollout_ref.rollout`: generation."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from rlhub.config.schema import NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt, PositiveUnitFloat, Range

TopK = Annotated[int, Range(ge=1, off=-1)]


@dataclass(slots=True, kw_only=True)
class ValSamplingConfig:
    n: PositiveInt = 1
    """Samples per validation prompt; pass@k is reported up to n."""
    temperature: NonNegativeFloat = 0.0
    """Sampling temperature with do_sample; 0 is greedy."""
    top_p: PositiveUnitFloat = 1.0
    """Nucleus: sample from the smallest set of tokens with this much probability; 1 is off."""
    top_k: TopK = -1
    """Sample from the k most likely tokens; -1 is off."""
    do_sample: bool = False
    """False: greedy, whatever the temperature."""


@dataclass(slots=True, kw_only=True)
class MultiTurnConfig:
    enable: bool = False
    """Episodes of several turns with tools (workflow tool_agent), unless agent.default_agent_loop names another."""
    max_assistant_turns: PositiveInt | None = None
    """Most generations in an episode; null: until the response is full."""
    max_user_turns: PositiveInt | None = None
    """Most answers of tools or environments in an episode; null: no limit of their own."""
    tool_config_path: str | None = None
    """YAML file that lists the tools by registered name or module:function, with their settings."""
    format: str = "hermes"
    """How tool calls stand in the model's text: hermes (<tool_call> tags) or json (a bare JSON object)."""


@dataclass(slots=True, kw_only=True)
class AgentConfig:
    default_agent_loop: str | None = None
    """Workflow of rows without an agent_name: a registered name, or path/to/file.py:ClassName; null: single_turn, with
    multi_turn.enable tool_agent."""
    kwargs: dict[str, Any] = field(default_factory=dict)
    """The workflow's own settings."""
    num_workers: NonNegativeInt = 0
    """Processes, on the driver's machine, that run the episodes' own code (tools, templates, agents); generation and scoring
    are asked of the driver. 0: its event loop runs them too; set it where that code keeps the loop busy."""
    num_env_hosts: NonNegativeInt = 0
    """Actors, on any machines of the cluster, that run the environments of workflow `environment` with kwargs.num_env_workers
    processes each; 0: the episodes' own process runs them. Set it for more simulators than the driver's machine carries,
    where a step is slow beside the 5 to 10 ms that a call of a Ray actor and its answer take."""
    env_host_cpus: NonNegativeFloat = 0.0
    """CPUs that each of them reserves on its machine; 0: none, one machine after the other gets one."""
    env_host_gpus: NonNegativeFloat = 0.0
    """GPUs that each of them reserves, for simulators that compute there; set it with GPUs that no other pool takes."""
    max_concurrent: PositiveInt | None = None
    """Most prompts in work at once; null: (max_staleness + 1) * train_batch_size."""
    episode_timeout_s: PositiveFloat | None = None
    """Seconds after which an episode is given up and counted as timed out; null: deadline_s.generate."""
    max_failed_batches: PositiveInt = 10
    """Stop the run, with the last error, after so many batches' worth of failed episodes in a row."""


@dataclass(slots=True, kw_only=True)
class RemoteConfig:
    """name=remote: generation by a server that another job runs."""

    urls: list[str] = field(default_factory=list)
    """Addresses (http://host:port) of the servers; rank i of the rollout uses number i modulo their count, and with mode=async
    each server has one replica at most."""
    server: Literal["rlhub", "vllm", "sglang", "openai"] = "rlhub"
    """What they are: rlhub (rlhub.trainer.main_serve), vllm (api_server with VLLM_SERVER_DEV_MODE=1), sglang (launch_server);
    openai, any other of that interface, serves evaluation only."""
    model_name: str = "policy"
    """The model's name on the server (vllm: --served-model-name)."""
    api_key_file: str | None = None
    """File with the servers' key; null: they ask for none."""
    admin_key_file: str | None = None
    """File with the key of the servers' administration (rlhub: server.admin_key_file), which pausing and new weights need;
    null: the same key."""
    weights_folder: str | None = None
    """Folder that this job and the servers reach under the same path, for new weights; null: no training, only evaluation."""
    start_s: PositiveFloat = 600.0
    """Seconds to wait for a server to answer at the start."""
    request_s: PositiveFloat = 3600.0
    """Seconds for one request; then it fails."""


@dataclass(slots=True, kw_only=True)
class RolloutConfig:
    name: str = "auto"
    """Generation engine: auto (vllm where it is installed, else hf), vllm, hf, remote (see remote.urls), vllm_async (async:
    vLLM's AsyncLLM in processes of its own, which vllm becomes with tensor_model_parallel_size above 1)."""
    mode: Literal["sync", "async"] = "sync"
    """sync: whole batches, in turns with training; async: a service in processes of its own, where episodes run as workflows."""
    n: PositiveInt = 1
    """Samples per prompt; group estimators (grpo, rloo) need 2 or more."""
    temperature: PositiveFloat = 1.0
    """Sampling temperature; log-probs are those of the tempered distribution, in training too."""
    top_p: PositiveUnitFloat = 1.0
    """Nucleus sampling; 1 is off. Below 1 the trainer's log-probs no longer match the sampler's."""
    top_k: TopK = -1
    """Sample from the k most likely tokens; -1 is off. The same caution as top_p."""
    tensor_model_parallel_size: PositiveInt = 1
    """Ranks that share one copy of the engine (vllm), in mode async devices of a replica; divides ranks and attention heads."""
    gpu_memory_utilization: PositiveUnitFloat = 0.5
    """GPU: share of memory for weights and KV cache of the engine."""
    kv_cache_gb: PositiveFloat | None = None
    """CPU: size of the KV cache in GiB; null: from max_num_seqs and the lengths."""
    enforce_eager: bool = False
    """GPU: no CUDA graphs; slower, starts sooner. On CPU always eager."""
    free_cache_engine: bool = True
    """GPU: give the KV cache's memory back during training."""
    dtype: Literal["auto", "bfloat16", "float16", "float32"] = "auto"
    """Dtype of the engine's weights; auto: bfloat16 on CUDA, float32 on CPU."""
    max_num_batched_tokens: PositiveInt = 8192
    """vllm: most tokens in one engine step; without chunked prefill at least max_model_len."""
    max_num_seqs: PositiveInt = 256
    """Most sequences generated at once by an engine."""
    max_model_len: PositiveInt | None = None
    """Longest sequence in tokens; null: max_prompt_length + max_response_length."""
    enable_chunked_prefill: bool = True
    """vllm on GPU: mix pieces of long prompts with decoding. On CPU always off: there it fails with seeds."""
    enable_prefix_caching: bool = True
    """vllm: share the KV cache of common prefixes, such as the n samples of a prompt; emptied at each weight update."""
    ignore_eos: bool = False
    """Generate max_response_length tokens regardless of end-of-sequence; for benchmarks."""
    update_weights_bucket_mb: PositiveInt = 256
    """MiB of weights moved to the engine at a time; extra memory is at most two buckets."""
    recompute_kv_cache: bool = True
    """async: after a weight update compute the KV cache of running requests anew; False keeps it: faster, less exact."""
    weights_folder: str | None = None
    """async: folder through which weights are published; null: memory of this machine, on several machines the run folder."""
    trajectories_folder: str | None = None
    """async: train on what another job collects into this folder (a path or any fsspec URL), which takes its weights from
    weights_folder; null: this job generates by itself."""
    replica_restarts: NonNegativeInt = 3
    """async: how often a replica that died is started again before the run stops."""
    multi_turn: MultiTurnConfig = field(default_factory=MultiTurnConfig)
    agent: AgentConfig = field(default_factory=AgentConfig)
    remote: RemoteConfig = field(default_factory=RemoteConfig)
    val_kwargs: ValSamplingConfig = field(default_factory=ValSamplingConfig)
    log_prob_micro_batch_size_per_gpu: PositiveInt | None = None
    """Rows in a forward pass for old log-probs; null: the actor's micro-batch."""
    log_prob_use_dynamic_bsz: bool | None = None
    """Cut by tokens; null: as the actor."""
    log_prob_max_token_len_per_gpu: PositiveInt | None = None
    """Most tokens in a forward pass; null: as the actor."""
