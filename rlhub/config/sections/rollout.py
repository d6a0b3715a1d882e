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
    """Run episodes of several turns with tools (workflow tool_agent), unless agent.default_agent_loop names another workflow."""
    max_assistant_turns: PositiveInt | None = None
    """Largest number of generations in an episode; null: no limit but max_response_length."""
    max_user_turns: PositiveInt | None = None
    """Largest number of answers of tools or environments in an episode; null: no limit but max_response_length."""
    tool_config_path: str | None = None
    """YAML file that lists the tools by registered name or module:function, with their settings."""
    format: str = "hermes"
    """Format of tool calls in the model's text: hermes (<tool_call> tags), json (a bare JSON object), or vllm:<name> for a tool
    parser of the installed vLLM."""


@dataclass(slots=True, kw_only=True)
class AgentConfig:
    default_agent_loop: str | None = None
    """Workflow of rows without an agent_name: a registered name, or path/to/file.py:ClassName; null: single_turn, with
    multi_turn.enable tool_agent."""
    kwargs: dict[str, Any] = field(default_factory=dict)
    """Settings of the workflow, by its own names."""
    num_workers: NonNegativeInt | None = None
    """Processes on the driver's machine that run the episodes' own code (tools, templates, agents) and, with
    trainer.batches=reference, keep their tokens until they are trained and score them; the driver chooses the replicas at which
    they generate. 0: the driver does all of that itself; null: 1 with trainer.batches=reference, else 0. Raise it where that
    code keeps a process busy."""
    num_env_hosts: NonNegativeInt = 0
    """Ray actors, on any machines of the cluster, that run the environments of workflow `environment`, each with
    kwargs.num_env_workers processes; 0: the process that runs the episodes runs them. Set it for more simulators than the
    driver's machine carries, where a simulator's step takes long compared with a call of a Ray actor (5 to 10 ms)."""
    env_host_cpus: NonNegativeFloat = 0.0
    """CPUs that each of these actors reserves on its machine; 0: none, and the actors are spread over the machines in turn."""
    env_host_gpus: NonNegativeFloat = 0.0
    """GPUs that each of these actors reserves, for simulators that compute there; set it where GPUs belong to no pool."""
    max_concurrent: PositiveInt | None = None
    """Largest number of prompts whose episodes run at once; null: (max_staleness + 1) * train_batch_size."""
    episode_timeout_s: PositiveFloat | None = None
    """Seconds after which an episode is aborted and counted as timed out; null: deadline_s.generate."""
    episode_retries: NonNegativeInt = 2
    """Further attempts of an episode that failed or ran out of time, each with another seed. With a tenth of the episodes
    failing, 2 lose one sample in 1000 for 11% more episodes; 0 loses one in 10, and long episodes first."""
    min_samples: PositiveInt | None = None
    """Smallest number of samples with which a prompt's group still trains when others have failed; with fewer the prompt is given
    up. null: half of n, and at least 2 where n is. n: whole groups only; lower it where every sample is dear."""
    max_failed_batches: PositiveInt = 10
    """Stop the run, with the last error, after so many batches' worth of failed episodes in a row."""

    @property
    def has_frozen_roles(self) -> bool:
        """Returns whether some conversations of the agents do not train, whose answers may then follow a JSON schema."""
        return "frozen" in (self.kwargs.get("roles") or {}).values()


@dataclass(slots=True, kw_only=True)
class RemoteConfig:
    """Settings of name=remote: the servers of another job generate."""

    urls: list[str] = field(default_factory=list)
    """Addresses (http://host:port) of the servers; rank i of the rollout uses the server of index i modulo their number, and with
    mode=async each server gets one replica at most."""
    server: Literal["rlhub", "vllm", "sglang", "openai"] = "rlhub"
    """Kind of the servers: rlhub (rlhub.trainer.main_serve), vllm (api_server with VLLM_SERVER_DEV_MODE=1), sglang
    (launch_server), or openai, any other server with that interface, which serves evaluation only."""
    model_name: str = "policy"
    """The model's name on the server (vllm: --served-model-name)."""
    api_key_file: str | None = None
    """File with the key of the servers; null: they need none."""
    admin_key_file: str | None = None
    """File with the key of the servers' administration (rlhub: server.admin_key_file), which pauses and weight updates need;
    null: the key of api_key_file."""
    weights_folder: str | None = None
    """Folder for new weights that this job and the servers reach under the same path; null: no training, only evaluation."""
    start_s: PositiveFloat = 600.0
    """Seconds to wait for a server to answer at the start."""
    request_s: PositiveFloat = 3600.0
    """Seconds after which a request fails."""


@dataclass(slots=True, kw_only=True)
class RolloutConfig:
    name: str = "auto"
    """Generation engine: auto (vllm where it is installed, else hf), vllm, hf, remote (see remote.urls), vllm_async (async:
    vLLM's AsyncLLM in processes of its own, which vllm becomes with tensor_model_parallel_size above 1)."""
    mode: Literal["sync", "async"] = "sync"
    """sync: generate whole batches in turns with training; async: a rollout service in processes of its own runs episodes as
    workflows while the actor trains; with env.name the rollout's ranks run the next batch of episodes meanwhile."""
    n: PositiveInt = 1
    """Samples per prompt; group estimators (grpo, rloo) need 2 or more."""
    temperature: PositiveFloat = 1.0
    """Sampling temperature; log-probs belong to the tempered distribution, in training too."""
    top_p: PositiveUnitFloat = 1.0
    """Nucleus sampling; 1 is off. Below 1 the trainer's log-probs no longer match the sampler's."""
    top_k: TopK = -1
    """Sample from the k most likely tokens; -1 is off. With k the trainer's log-probs no longer match the sampler's."""
    tensor_model_parallel_size: PositiveInt = 1
    """Ranks that share one copy of the model (vllm), with mode=async the devices of a replica; divides ranks and attention
    heads."""
    enable_expert_parallel: bool = False
    """vllm on GPUs: tensor_model_parallel_size ranks share out the experts of a mixture of experts, instead of a part of each."""
    gpu_memory_utilization: PositiveUnitFloat = 0.5
    """GPU: fraction of the memory for the engine's weights and KV cache."""
    kv_cache_gb: PositiveFloat | None = None
    """CPU: size of the KV cache in GiB; null: from max_num_seqs and the lengths."""
    enforce_eager: bool = False
    """GPU: run without CUDA graphs, which is slower and starts sooner. On CPU it is always eager."""
    free_cache_engine: bool = True
    """GPU: free the memory of the engine during training. With mode=async vllm does so where its replicas are on the actor's GPUs
    and trainer.max_staleness is 0."""
    dtype: Literal["auto", "bfloat16", "float16", "float32"] = "auto"
    """Dtype of the engine's weights; auto: bfloat16 on CUDA, float32 on CPU."""
    quantization: Literal["fp8"] | None = None
    """fp8: the engine (hf, or vllm on GPUs) stores the matrices of attention and MLP as float8_e4m3fn with a scale for each block
    of 128 x 128, quantized from the trainer's weights at each update; algorithm.rollout_correction corrects for that. null: all
    weights in dtype. Set it where weights crowd out the KV cache or where decoding waits for memory."""
    max_num_batched_tokens: PositiveInt | None = None
    """Largest number of tokens in an engine step; vllm without chunked prefill: at least max_model_len. null: vllm's own for the
    GPU (16384 on an H100), else 8192."""
    max_num_seqs: PositiveInt | None = None
    """Largest number of sequences that an engine generates at once. null: vllm's own for the GPU (1024 on an H100), else 256;
    with min_replicas or max_replicas 256, since these count the places of a replica."""
    max_model_len: PositiveInt | None = None
    """Longest sequence in tokens; null: max_prompt_length + max_response_length."""
    enable_chunked_prefill: bool = True
    """vllm on GPU: mix chunks of long prompts with decoding. It is always off on CPU, where vllm fails with it and seeds."""
    enable_prefix_caching: bool = True
    """vllm: share the KV cache of common prefixes, such as the prompt of n samples; each weight update empties it."""
    ignore_eos: bool = False
    """Generate max_response_length tokens regardless of end-of-sequence; for benchmarks."""
    update_weights_bucket_mb: PositiveInt = 256
    """MiB of weights that are moved to the engine at a time; the extra memory is at most two such buckets."""
    lora_sync: Literal["merged", "adapter"] = "merged"
    """What the engine gets of a policy with LoRA adapters. merged: all weights, with the adapters added in; generation costs
    what it does without adapters. adapter: the adapters alone; vllm and hf read the base from model.path once, so a version has
    a hundredth of the bytes, and nothing is rounded into a bfloat16 weight, but vllm computes the adapters in every layer. Set
    adapter where weights cross a network or a disk, or where merging in bfloat16 shows as mismatch."""
    recompute_kv_cache: bool = True
    """async: recompute the KV cache of running requests after a weight update; false keeps it, which is faster and less exact."""
    weights: Literal["auto", "memory", "collective", "folder"] = "auto"
    """async: source of the replicas' new weights: memory (this machine's, which all replicas map), collective (NCCL or gloo, from
    every training rank to every replica), folder (weights_folder), or auto: memory where all are on one machine, else folder."""
    weights_folder: str | None = None
    """async: folder through which weights are published; null: with weights=folder, or several machines, below the run folder."""
    weights_full_every: PositiveInt = 8
    """async, weights=folder or collective: every so many versions are in full, and those between have only the values that
    changed, where these are few. More saves bytes; fewer spares late readers. 1: all in full, and the ranks keep no copy."""
    trajectories_folder: str | None = None
    """async: train on the episodes that another job collects into this folder (a path or any fsspec URL); that job takes its
    weights from weights_folder. null: this job generates itself."""
    replica_restarts: NonNegativeInt = 3
    """async: number of times that a replica that died is started again before the run stops."""
    min_replicas: PositiveInt | None = None
    """async: smallest number of replicas of the rollout service, with which it starts. With this or max_replicas replicas are
    added while requests queue and removed while they idle; null: 1 where max_replicas is set, else the number is fixed, as many
    as the rollout's pool holds. Set it to what validation and slow steps need."""
    max_replicas: PositiveInt | None = None
    """async: largest number of replicas, of which the rollout's pool must hold all; null: as many as it holds."""
    multi_turn: MultiTurnConfig = field(default_factory=MultiTurnConfig)
    agent: AgentConfig = field(default_factory=AgentConfig)
    remote: RemoteConfig = field(default_factory=RemoteConfig)
    val_kwargs: ValSamplingConfig = field(default_factory=ValSamplingConfig)
    log_prob_micro_batch_size_per_gpu: PositiveInt | None = None
    """Rows in a forward pass for old log-probs; null: the actor's micro-batch."""
    log_prob_use_dynamic_bsz: bool | None = None
    """Cut forward passes for old log-probs by tokens; null: as the actor."""
    log_prob_max_token_len_per_gpu: PositiveInt | None = None
    """Largest number of tokens in a forward pass for old log-probs; null: the actor's."""

    @property
    def most_tokens(self) -> int:
        """Tokens in a step of an engine that has no limit of its own."""
        return self.max_num_batched_tokens or 8192

    @property
    def most_sequences(self) -> int:
        """Sequences that an engine without a limit of its own generates at once."""
        return self.max_num_seqs or 256
