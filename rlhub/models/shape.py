"""The facts in a model's `config.json`: its sizes, for checks before the start and for counting floating-point work, and the
kinds of model that it can be.

This module reads JSON only, so it costs milliseconds and loads neither torch nor transformers.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from rlhub.config.sections.training import Recompute
from rlhub.errors import ConfigError

ModelKind = Literal["policy", "value", "reward", "vla"]
"""A policy gives a distribution over the next token, a value model one number per token, a reward model one number per row; a
vla is a policy that reads images and writes action tokens."""
POLICIES: tuple[ModelKind, ...] = ("policy", "vla")
"""The kinds with a language-model head."""
SCALAR_HEAD = "score"
"""The linear layer of transformers' sequence classifiers: hidden size -> 1, without bias."""

CLASSIFIER = "ForSequenceClassification"
LANGUAGE_MODEL = "ForCausalLM"
DEFAULT_LABELS = 2  # transformers' default if config.json names no labels

NUM_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")
"""The names that configurations use for the number of a layer's experts."""


ROUTED = ("qwen2_moe", "qwen3_moe")
"""Models whose routers weigh experts by the softmax over all of them, at the chosen ones."""
PREFIX_LAYERS = ("full_attention", "sliding_attention")
"""The kinds of layers in which a token's output depends on the tokens before it in its row by attention alone."""
STATES = (
    "layers_block_type",
    "hybrid_override_pattern",
    "state_size",
    "mamba_d_state",
    "mamba_d_ssm",
    "ssm_cfg",
    "attn_layer_period",
)
"""Entries by which configurations of models with recurrent states are known."""
CAPACITIES = ("expert_capacity", "capacity_factor", "moe_capacity_factor", "expert_capacity_factor")
"""The names that configurations use for a limit on the tokens of an expert."""


@dataclass(slots=True, kw_only=True, frozen=True)
class ModelShape:
    """The sizes of a decoder-only transformer.

    mlp_columns: the inner columns that a token passes, over all layers; in a mixture of experts, those of the experts that a
        token is sent to.
    max_positions: 0 if the configuration names no limit.
    tied: whether the head's matrix is the embedding.
    """

    model_type: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    mlp_columns: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_positions: int
    tied: bool

    @property
    def num_matmul_params(self) -> int:
        """Returns the number of weights that every token is multiplied with: projections and head, without the embedding
        lookup."""
        attention = self.hidden_size * self.head_dim * (2 * self.num_heads + 2 * self.num_kv_heads)
        mlp = 3 * self.hidden_size * self.mlp_columns
        return self.num_layers * attention + mlp + self.vocab_size * self.hidden_size

    def forward_flops(self, num_tokens: int, mean_length: float, *, head: bool = True) -> float:
        """Returns the floating-point operations of a forward pass over `num_tokens` tokens in sequences of `mean_length`.

        It counts 2 per weight and token, plus 2 * layers * heads * head_dim * length for causal attention (half of the
        square), as in PaLM (arXiv 2204.02311, appendix B); a backward pass takes twice as many.  head: True includes the
        language-model head.
        """
        attention = 2.0 * self.num_layers * self.num_heads * self.head_dim * mean_length
        weights = self.num_matmul_params - (0 if head else self.vocab_size * self.hidden_size)
        return num_tokens * (2.0 * weights + attention)

    def activation_bytes(self, num_tokens: float, item_bytes: int, *, recompute: Recompute) -> tuple[float, float]:
        """Returns the bytes that a forward pass over `num_tokens` tokens keeps for its backward pass, and those that a layer's
        backward pass adds to them; both without the head's.

        A layer keeps for each token what its matrices and products read: three tensors of each norm, whose input is in float32,
        the queries, keys, values and output of an attention kernel that keeps no scores, and four tensors of the MLP, as in
        Korthikanti et al. (arXiv 2205.05198, section 4).  Its backward pass adds gradients of half the norms' and MLP's size.
        item_bytes: bytes of an activation.  recompute: full keeps the input of each layer, selective also the results of products
            and attention; one layer's rest is computed again.
        """
        norms = 2 * self.hidden_size * (4 + 2 * item_bytes)
        attention = 2 * (self.num_heads + self.num_kv_heads) * self.head_dim * item_bytes
        mlp = 4 * self.mlp_columns / self.num_layers * item_bytes
        layer, gradients = norms + attention + mlp, norms / 2 + mlp / 2
        if recompute == "none":
            return num_tokens * self.num_layers * layer, num_tokens * gradients
        columns = self.hidden_size
        if recompute == "selective":
            columns += 2 * self.hidden_size + 2 * (self.num_heads + self.num_kv_heads) * self.head_dim
            columns += 2 * self.mlp_columns // self.num_layers
        kept = columns * item_bytes
        return num_tokens * self.num_layers * kept, num_tokens * (layer - kept + self.hidden_size * item_bytes + gradients)


def read_model_values(path: str | Path, override_config: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Reads a local folder's config.json with the user's overrides.  Raises ConfigError if there is none, or if it is not
    JSON."""
    file = Path(path) / "config.json"
    try:
        values = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"{file} does not exist: {path} is not a model folder") from None
    except (OSError, ValueError) as error:
        raise ConfigError(f"{file} cannot be read as JSON ({error})") from error
    vision_language = values.get("vlm_config", values)  # PI0 has its language model in a vision-language model
    return {**values, **vision_language, **vision_language.get("text_config", {}), **(override_config or {})}


def text_config(config: Any) -> Any:
    """Returns the part of a transformers configuration that has the sizes of the language model."""
    return getattr(config, "vlm_config", config).get_text_config()


def local_shape(path: str | None, overrides: Mapping[str, Any]) -> ModelShape | None:
    """Returns the sizes of a model in a local folder, None for one that is elsewhere."""
    folder = Path(path or "").expanduser()
    return read_model_shape(folder, overrides) if path and folder.is_dir() else None


def read_model_shape(path: str | Path, override_config: Mapping[str, Any] | None = None) -> ModelShape:
    """Reads the shape of the model in a local folder.  Raises ConfigError if config.json is missing, is not JSON, or lacks a
    size."""
    try:
        return _shape(read_model_values(path, override_config))
    except KeyError as error:
        raise ConfigError(
            f"{Path(path) / 'config.json'} has no {error.args[0]!r}: not a decoder-only transformer that rlhub knows"
        ) from None


def count_params(path: str | Path, override_config: Mapping[str, Any] | None = None, *, language_model: bool = True) -> int:
    """Counts the elements of all matrices of the model in a local folder, including all experts.

    Norms, biases and routers, which are thousands of times fewer, are left out.  Raises the errors of `read_model_shape`.
    language_model: True includes the head, if it is not the embedding itself.
    """
    shape, values = read_model_shape(path, override_config), read_model_values(path, override_config)
    experts = next((int(values[name]) for name in NUM_EXPERTS if values.get(name)), 1)
    attention = shape.num_layers * shape.hidden_size * shape.head_dim * (2 * shape.num_heads + 2 * shape.num_kv_heads)
    mlp = 3 * shape.hidden_size * _mlp_columns(values, shape.intermediate_size, experts)
    vocabularies = 2 if language_model and not shape.tied else 1
    return attention + mlp + vocabularies * shape.vocab_size * shape.hidden_size


def _shape(values: Mapping[str, Any]) -> ModelShape:
    heads, hidden = int(values["num_attention_heads"]), int(values["hidden_size"])
    intermediate = int(values.get("intermediate_size") or 4 * hidden)
    return ModelShape(
        model_type=str(values["model_type"]),
        vocab_size=int(values["vocab_size"]),
        hidden_size=hidden,
        intermediate_size=intermediate,
        mlp_columns=_mlp_columns(values, intermediate, int(values.get("num_experts_per_tok") or 1)),
        num_layers=int(values["num_hidden_layers"]),
        num_heads=heads,
        num_kv_heads=int(values.get("num_key_value_heads") or heads),
        head_dim=int(values.get("head_dim") or hidden // heads),
        max_positions=int(values.get("max_position_embeddings") or 0),
        tied=bool(values.get("tie_word_embeddings", False)),
    )


def _mlp_columns(values: Mapping[str, Any], dense: int, experts: int) -> int:
    """Counts inner columns over all layers, with `experts` experts in each sparse layer, by the names of Qwen's
    configurations."""
    width, step = values.get("moe_intermediate_size"), int(values.get("decoder_sparse_step") or 1)
    shared = int(values.get("shared_expert_intermediate_size") or 0)
    total = 0
    for layer in range(int(values["num_hidden_layers"])):
        is_dense = not width or layer in (values.get("mlp_only_layers") or ()) or (layer + 1) % step
        total += dense if is_dense else int(width or 0) * experts + shared
    return total


def reward_problem(path: str, architectures: Sequence[str], num_labels: int) -> str | None:
    """Returns why a checkpoint cannot be a reward model, or None.  It must be a sequence classifier with one label, or a
    causal language model, which gets a new head."""
    if not all(name.endswith((CLASSIFIER, LANGUAGE_MODEL)) for name in architectures):
        return (
            f"{path!r} holds {', '.join(architectures)}: a reward model is a sequence classifier with one label or a causal "
            "language model (which gets a new head); name another model"
        )
    if any(name.endswith(CLASSIFIER) for name in architectures) and num_labels != 1:
        return f"{path!r} is a classifier with {num_labels} labels: a reward model has 1; name another model"
    return None


def read_labels(folder: Path) -> tuple[list[str], int]:
    """Returns (architectures, number of labels) of a model folder whose config.json can be read."""
    values = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    labels = values.get("id2label")
    return list(values.get("architectures") or ()), len(labels) if labels else int(values.get("num_labels", DEFAULT_LABELS))


def routing_problems(values: Mapping[str, Any]) -> list[str]:
    """Returns why the experts of a model's tokens cannot be recorded and replayed; [] where they can.  values: the content of its
    config.json."""
    if values.get("vision_config"):
        return ["the model reads images, whose rows bring no experts of their tokens"]
    if not any(values.get(name) for name in NUM_EXPERTS):
        return [f"the model is a {values.get('model_type')} without experts, so there is no routing to replay"]
    if values.get("model_type") not in ROUTED:
        return [f"the routers of a {values.get('model_type')} are not known ({' and '.join(ROUTED)} are)"]
    return []


def expert_layers(values: Mapping[str, Any]) -> list[int]:
    """Returns the numbers of the layers with experts, by the names of Qwen's configurations."""
    dense, step = values.get("mlp_only_layers") or (), int(values.get("decoder_sparse_step") or 1)
    return [layer for layer in range(int(values["num_hidden_layers"])) if layer not in dense and (layer + 1) % step == 0]


def prefix_problems(values: Mapping[str, Any], override_config: Mapping[str, Any]) -> list[str]:
    """Returns why rows of a model cannot share the computation of their prefixes; [] where they can.

    It holds where a token's output follows from the tokens before it in its row and their positions alone: for attention of
    any width, and experts without limits.  values: the content of its config.json.  override_config: the user's entries, which
    alone set a dropout.
    """
    found, values = [], {**values, **override_config}
    if values.get("vision_config"):
        found.append("the model reads images, which belong to rows")
    if kinds := sorted(set(values.get("layer_types") or ()) - set(PREFIX_LAYERS)):
        found.append(f"the model has layers of {', '.join(kinds)}, which read whole rows")
    elif states := [name for name in STATES if values.get(name)]:
        found.append(f"the model has layers with a state that runs through the row ({', '.join(states)})")
    if limits := [name for name in CAPACITIES if values.get(name)]:
        found.append(f"the model's experts take so many tokens of a pass at most ({', '.join(limits)})")
    if values.get("alibi") or values.get("position_embedding_type") == "alibi":
        found.append("the model's attention counts places in the pass and not positions (alibi)")
    if random := [name for name, rate in override_config.items() if ("dropout" in name or name.endswith("pdrop")) and rate]:
        found.append(f"rows would share random numbers (model.override_config.{', '.join(random)} is above 0)")
    return found
