"""The actions of a vision-language-action policy: the settings that `model.vla` gives by name, with their checks.

They belong to the model as its tokenizer does, so every role that uses the policy reads the same ones.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Literal

from rlhub.config.load import build
from rlhub.config.schema import NonNegativeInt, PositiveFloat, PositiveInt
from rlhub.config.sections.training import ModelConfig
from rlhub.errors import ConfigError
from rlhub.registry import suggest

FLOW = "flow"
"""The decoding of a policy that writes numbers, and no tokens."""


@dataclass(slots=True, kw_only=True)
class VLAConfig:
    """A vision-language-action policy: a call reads images and an instruction and writes chunk x action_dim action tokens."""

    chunk: PositiveInt = 1
    """Actions in a response, which are executed one after the other."""
    action_dim: PositiveInt = 1
    """Numbers in an action; each is one token."""
    bins: PositiveInt = 256
    """Action tokens: the bins into which the range of a number is divided."""
    first_bin_id: NonNegativeInt = 0
    """Token id of the lowest bin; the others follow it. No other token can be sampled."""
    decoding: Literal["causal", "bidirectional", "sequential", "flow"] = "causal"
    """causal, bidirectional: all tokens of a response in one forward pass, at places that see the places before them, or all
    places (OpenVLA-OFT); sequential: one token after the other, each read by the next (OpenVLA); flow: numbers and no tokens, for
    cloning PI0 by its flow loss (main_sft)."""
    place_ids: list[int] = field(default_factory=list)
    """With decoding in one pass, the input tokens at the places: one id for all, or one for each of the chunk x action_dim
    places. They stand for tokens that are not known yet, so no prompt should contain them."""
    image_token_id: NonNegativeInt = 0
    """Token id that stands for a part of an image in a prompt, as in the model's config.json."""
    tokens_per_image: PositiveInt = 1
    """Image tokens of one image; for SmolVLM (image_size / patch_size / scale_factor) squared."""
    value_head: bool = False
    """Predict the return at each place by a linear head on the policy's own hidden states, trained with actor.value_loss_coef."""
    value_scale: PositiveFloat = 10.0
    """Factor of the value head's output: under AdamW the head learns that many times as fast as the rest."""
    action_low: list[float] = field(default_factory=lambda: [-1.0])
    """Lower end of the range of the numbers of an action: one for all, or one each."""
    action_high: list[float] = field(default_factory=lambda: [1.0])
    """Upper end of that range."""
    pixel_mean: list[float] = field(default_factory=lambda: [0.5])
    """Mean that is subtracted from pixels in [0, 1]: one for all colours, or one each; that of the model's image processor."""
    pixel_std: list[float] = field(default_factory=lambda: [0.5])
    """Divisor of pixels after that."""

    @property
    def num_tokens(self) -> int:
        """Returns the number of tokens of a response."""
        return self.chunk * self.action_dim

    def problems(self) -> list[str]:
        """Returns sentences on settings that contradict each other; those that depend on the model are checked with it."""
        found = []
        if self.decoding == FLOW and self.value_head:
            found.append("model.vla.value_head=True: a policy with decoding=flow is cloned only, so set value_head=False")
        if self.decoding in ("causal", "bidirectional") and len(self.place_ids) not in (1, self.num_tokens):
            found.append(
                f"model.vla.place_ids has {len(self.place_ids)} ids; with decoding={self.decoding} give 1, or chunk x action_dim "
                f"= {self.chunk} x {self.action_dim} = {self.num_tokens}"
            )
        for name in ("action_low", "action_high"):
            size = len(getattr(self, name))
            if size not in (1, self.action_dim):
                found.append(f"model.vla.{name} has {size} numbers; give 1, or one for each of action_dim={self.action_dim}")
        if any(std <= 0 for std in self.pixel_std):
            found.append(f"model.vla.pixel_std={self.pixel_std}: pixels are divided by it, so it must be positive")
        return found


def vla_of(model: ModelConfig) -> VLAConfig | None:
    """Returns the actions of the policy with this section, None for a language model.  Raises ConfigError with all problems."""
    if not model.vla:
        return None
    known = {one.name for one in fields(VLAConfig)}
    problems = [
        f"model.vla.{name}: no such setting{suggest(name, known)}; known: {', '.join(sorted(known))}"
        for name in model.vla
        if name not in known
    ]
    vla = build(VLAConfig, model.vla, problems, prefix="model.vla.")
    if vla.value_head and model.lora_rank > 0:
        problems.append(f"model.lora_rank={model.lora_rank} trains adapters only; model.vla.value_head=True needs a trained head")
    if vla.decoding == FLOW and model.lora_rank > 0:
        problems.append(f"model.lora_rank={model.lora_rank} with model.vla.decoding=flow: PI0 trains whole; set lora_rank=0")
    if problems := problems or vla.problems():
        raise ConfigError(problems)
    return vla


def problems_of(model: ModelConfig) -> list[str]:
    """Returns the problems of the section; [] for a language model."""
    try:
        vla_of(model)
    except ConfigError as error:
        return list(error.problems)
    return []
