"""The facts of a model in its `config.json`: its sizes, for checks before anything starts and for counting floating-point work,
and which kind of model it can be.

Reads JSON only, so it costs milliseconds and loads neither torch nor transformers.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from rlhub.errors import ConfigError

ModelKind = Literal["policy", "value", "reward"]
"""policy: a distribution over the next token; value: a number a token; reward: a number a row."""
SCALAR_HEAD = "score"
"""The linear layer of transformers' sequence classifiers: hidden size -> 1, without bias."""

CLASSIFIER = "ForSequenceClassification"
LANGUAGE_MODEL = "ForCausalLM"
DEFAULT_LABELS = 2  # what transformers takes where config.json names no labels

NUM_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")
"""The names that configurations have for the number of a layer's experts."""


@dataclass(slots=True, kw_only=True, frozen=True)
class ModelShape:
    """Sizes of a decoder-only transformer.  `max_positions` 0: the configuration names no limit.  `mlp_columns`: inner columns
    that a token passes, over all layers; of a mixture of experts those of the experts it is sent to."""

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
        """Weights that every token is multiplied with: projections and head, without the embedding lookup."""
        attention = self.hidden_size * self.head_dim * (2 * self.num_heads + 2 * self.num_kv_heads)
        mlp = 3 * self.hidden_size * self.mlp_columns
        return self.num_layers * attention + mlp + self.vocab_size * self.hidden_size

    def forward_flops(self, num_tokens: int, mean_length: float, *, head: bool = True) -> float:
        """Returns the floating-point operations of a forward pass over `num_tokens` tokens in sequences of `mean_length`.

        2 per weight and token, plus 2 * layers * heads * head_dim * length for causal attention (half of the square), as
        counted in PaLM (arXiv 2204.02311, appendix B); a backward pass takes twice as many.  head: with the language-model head.
        """
        attention = 2.0 * self.num_layers * self.num_heads * self.head_dim * mean_length
        weights = self.num_matmul_params - (0 if head else self.vocab_size * self.hidden_size)
        return num_tokens * (2.0 * weights + attention)


def read_model_values(path: str | Path, override_config: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Reads a local folder's config.json, with the user's entries.  Raises ConfigError: there is none, or it is not JSON."""
    file = Path(path) / "config.json"
    try:
        values = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"{file} does not exist: {path} is not a model folder") from None
    except (OSError, ValueError) as error:
        raise ConfigError(f"{file} cannot be read as JSON ({error})") from error
    return {**values, **values.get("text_config", {}), **(override_config or {})}


def read_model_shape(path: str | Path, override_config: Mapping[str, Any] | None = None) -> ModelShape:
    """Reads the shape of the model in a local folder.  Raises ConfigError: no config.json, no JSON, or no such sizes."""
    try:
        return _shape(read_model_values(path, override_config))
    except KeyError as error:
        raise ConfigError(
            f"{Path(path) / 'config.json'} has no {error.args[0]!r}: not a decoder-only transformer that rlhub knows"
        ) from None


def count_params(path: str | Path, override_config: Mapping[str, Any] | None = None, *, language_model: bool = True) -> int:
    """Counts the elements of all matrices of the model in a local folder, those of all experts too; norms, biases and routers,
    thousands of times fewer, are left out.  language_model: with its head, where that is not the embedding itself.  Raises as
    `read_model_shape`."""
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
    """Counts inner columns over all layers, `experts` experts in each sparse one (by the names of Qwen's configurations)."""
    width, step = values.get("moe_intermediate_size"), int(values.get("decoder_sparse_step") or 1)
    shared = int(values.get("shared_expert_intermediate_size") or 0)
    total = 0
    for layer in range(int(values["num_hidden_layers"])):
        is_dense = not width or layer in (values.get("mlp_only_layers") or ()) or (layer + 1) % step
        total += dense if is_dense else int(width or 0) * experts + shared
    return total


def reward_problem(path: str, architectures: Sequence[str], num_labels: int) -> str | None:
    """Returns why a checkpoint cannot be a reward model, or None: it must be a sequence classifier with one label, or a causal
    language model (which gets a new head)."""
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
