"""TRL's side of algorithm_trl.py: the methods of its trainers as functions of drawn numbers.

No trainer and no model is built: a method is called on a stand-in that has the attributes it reads and no other, so a method
that reads more after an update of TRL fails by name.  What a model would compute (log-probs of tokens, scores) is drawn.
"""

from __future__ import annotations

import warnings
from collections import defaultdict
from types import SimpleNamespace
from typing import Any
from unittest import mock

import algorithm_inputs as drawn
import torch
from algorithm_inputs import Batch
from torch import Tensor

with warnings.catch_warnings(), mock.patch("trl.import_utils.is_vllm_available", return_value=False):
    warnings.simplefilter("ignore")  # vLLM takes as long to import as all the rest, and nothing here generates
    from trl.experimental.gmpo import GMPOTrainer  # type: ignore[attr-defined]
    from trl.trainer.dpo_trainer import DPOTrainer
    from trl.trainer.grpo_trainer import GRPOTrainer
    from trl.trainer.reward_trainer import RewardTrainer
    from trl.trainer.rloo_trainer import RLOOTrainer
    from trl.trainer.utils import selective_log_softmax_and_entropy

Numbers = dict[str, Tensor]
PAD = 0


def _same(values: Any, **_: Any) -> Any:
    return values


def _metrics() -> dict[str, Any]:
    return {"train": defaultdict(list)}


def _accelerator() -> SimpleNamespace:
    """Of one process."""
    kept = dict.fromkeys(("gather", "gather_for_metrics", "reduce"), _same)
    return SimpleNamespace(device=torch.device("cpu"), process_index=0, num_processes=1, **kept)


def _model() -> SimpleNamespace:
    return SimpleNamespace(training=True, is_gradient_checkpointing=False)


def grpo_loss(
    b: Batch, advantages: Tensor, loss_type: str, cuts: int = 1, trainer: Any = GRPOTrainer, **settings: Any
) -> Numbers:
    """`_compute_loss` over micro-batches of equally many rows, summed as gradients are; advantages: (rows, response) or (rows,).

    settings: attributes of the trainer or, where it has none of that name, of its arguments; `weights`: (rows, response), the
    correction of the rollout engine's probabilities; `reference`: log-probs of the reference.
    """
    columns: dict[str, Tensor] = {"old_per_token_logps": b.old_log_probs, "advantages": advantages}
    columns |= {"completion_ids": torch.ones_like(b.mask), "completion_mask": torch.ones_like(b.mask), "tool_mask": b.mask}
    columns |= {"prompt_ids": torch.ones_like(b.mask[:, :1]), "prompt_mask": torch.ones_like(b.mask[:, :1])}
    if "weights" in settings:
        columns["importance_sampling_ratio"] = settings.pop("weights")
        settings["use_vllm"] = True
    if "reference" in settings:
        columns["ref_per_token_logps"] = settings.pop("reference")
    current = b.log_probs.clone().requires_grad_()
    self = _loss_trainer(loss_type, cuts, settings)
    total = torch.zeros((), dtype=current.dtype)
    for rows in torch.arange(len(current)).chunk(cuts):
        self._get_per_token_logps_and_entropies = lambda *_, rows=rows, **__: (
            current[rows],
            torch.zeros_like(current[rows]),
            None,
        )
        inputs = {name: column[rows] for name, column in columns.items()} | {"num_items_in_batch": b.mask.sum()}
        total = total + trainer._compute_loss(self, None, inputs)
    (gradient,) = torch.autograd.grad(total, current)
    return {"loss": total.detach(), "gradient": gradient}


def _loss_trainer(loss_type: str, cuts: int, settings: dict[str, Any]) -> SimpleNamespace:
    read: dict[str, Any] = {"delta": None, "use_bias_correction_kl": False, "steps_per_generation": cuts}
    read |= {"sapo_temperature_pos": 1.0, "sapo_temperature_neg": 1.05}
    arguments = {name: settings.pop(name, value) for name, value in read.items()}
    attributes: dict[str, Any] = {
        "loss_type": loss_type,
        "epsilon_low": drawn.CLIP_LOW,
        "epsilon_high": drawn.CLIP_HIGH,
        "importance_sampling_level": "token",
        "beta": 0.0,
        "max_completion_length": drawn.SCALE,
        "current_gradient_accumulation_steps": cuts,
        "use_vllm": False,
        "vllm_importance_sampling_correction": True,
        "off_policy_mask_threshold": None,
        "top_entropy_quantile": 1.0,
        "_entropy_bonus_enabled": False,
        "aux_loss_enabled": False,
    }
    own = {"args": SimpleNamespace(**arguments), "model": _model(), "accelerator": _accelerator(), "_metrics": _metrics()}
    return SimpleNamespace(**attributes | settings | own)


def scored(b: Batch, rewards: Tensor, group: int, trainer: Any = GRPOTrainer, **settings: Any) -> dict[str, Tensor]:
    """`_generate_and_score_completions` of a batch that is already there: what it hands to the loss.

    rewards: (rows, functions).  Every response is as wide as the batch; b.mask stands in for the mask of tool output.
    """
    rows, width = b.mask.shape
    names = [f"reward-{number}" for number in range(rewards.shape[1])]
    attributes: dict[str, Any] = {
        "num_generations": group,
        "reward_weights": torch.ones(len(names), dtype=rewards.dtype),
        "multi_objective_aggregation": "sum_then_normalize",
        "scale_rewards": "group",
        "normalize_advantages": False,
        "reward_clip_range": None,
        "beta": 0.0,
        "use_vllm": False,
        "vllm_importance_sampling_correction": True,
        "vllm_importance_sampling_mode": "token_truncate",
        "vllm_importance_sampling_clip_min": None,
        "vllm_importance_sampling_clip_max": 1.5,
    }
    nothing = ("environment_factories", "environments", "tools", "pad_to_multiple_of")
    model, reference = _model(), _model()

    def log_probs(which: Any, *_: Any, **__: Any) -> tuple[Tensor, None, None]:
        return b.old_log_probs if which is model else b.rollout_log_probs, None, None

    ids = [[1] * width] * rows
    made: tuple[Any, ...] = ([[1]] * rows, ids, [""] * rows)
    if trainer is GRPOTrainer:
        made = ([[1]] * rows, ids, b.mask.tolist(), [""] * rows, b.rollout_log_probs.tolist(), {}, None, None)
    logs: dict[str, Any] = {"prompt": [], "completion": [], "advantages": []}
    logs |= {"rewards": defaultdict(list), "extra": defaultdict(list)}
    self = SimpleNamespace(
        **attributes | settings,
        **dict.fromkeys(nothing),
        args=SimpleNamespace(
            per_device_train_batch_size=rows,
            gradient_checkpointing_kwargs=None,
            steps_per_generation=1,
            gradient_accumulation_steps=1,
        ),
        model=model,
        ref_model=reference,
        accelerator=_accelerator(),
        _tokenizer=SimpleNamespace(pad_token_id=PAD),
        _generate=lambda prompts: made,
        _calculate_rewards=lambda *_: rewards,
        _get_per_token_logps_and_entropies=log_probs,
        _metrics=_metrics(),
        _logs=logs,
        _pending_extra_logs={},
        _pending_metrics={},
        reward_funcs=names,
        reward_func_names=names,
        mask_truncated_completions=False,
        num_iterations=1,
        log_multimodal=False,
    )
    found: dict[str, Tensor] = trainer._generate_and_score_completions(self, [{"prompt": "p"}] * rows)
    return found


def advantages(b: Batch, rewards: Tensor, group: int, trainer: Any = GRPOTrainer, **settings: Any) -> Numbers:
    """On tokens, as both trainers' losses use them."""
    per_row = scored(b, rewards, group, trainer, **settings)["advantages"]
    return {"advantages": per_row[:, None] * b.mask}


def weights(b: Batch, mode: str, low: float | None, high: float) -> Numbers:
    """The correction of the rollout engine's probabilities, (rows, response)."""
    bounds = {"vllm_importance_sampling_clip_min": low, "vllm_importance_sampling_clip_max": high}
    found = scored(b, b.per_row[:, None], 1, use_vllm=True, vllm_importance_sampling_mode=mode, **bounds)
    return {"weights": found["importance_sampling_ratio"].expand_as(b.mask) * b.mask}


def off_policy_kept(b: Batch, per_row: Tensor, threshold: float) -> Numbers:
    """The mask of DeepSeek-V3.2, on tokens."""
    kept = GRPOTrainer.get_off_policy_mask(per_row[:, None], b.log_probs, b.rollout_log_probs, b.mask, threshold)
    return {"kept": (kept * b.mask).double()}


def dpo_loss(b: Batch, loss_type: str, beta: float, label_smoothing: float = 0.0) -> Numbers:
    """`_compute_loss`: the first half of the rows was preferred to the second."""
    current = b.log_probs.clone().requires_grad_()
    shown = torch.zeros_like(current)
    outputs = SimpleNamespace(log_probs=current * b.mask, entropy=shown, mean_logits=shown, is_top1=shown.bool())
    chosen, rejected = (b.rollout_log_probs * b.mask).sum(1).chunk(2)
    mask = torch.cat([torch.zeros_like(b.mask[:, :1]), b.mask], 1)  # a prompt of one token
    inputs = {"input_ids": torch.ones_like(mask), "attention_mask": torch.ones_like(mask), "completion_mask": mask}
    self: Any = SimpleNamespace(
        loss_types=[loss_type],
        loss_weights=[1.0],
        beta=beta,
        label_smoothing=label_smoothing,
        precompute_ref_logps=True,
        f_divergence_type="reverse_kl",
        ld_alpha=None,
        use_weighting=False,
        aux_loss_enabled=False,
        model=_model(),
        accelerator=_accelerator(),
        _metrics=_metrics(),
        _tp_size=1,
        _total_train_tokens=0,
    )
    references = {"ref_chosen_logps": chosen, "ref_rejected_logps": rejected}
    loss = DPOTrainer._compute_loss(self, lambda **_: outputs, inputs | references, return_outputs=False)
    (gradient,) = torch.autograd.grad(loss, current)
    return {"loss": loss.detach(), "gradient": gradient}


def reward_loss(scores: Tensor, margin: Tensor | None = None) -> Numbers:
    """`compute_loss`: the first half of the scores (2 pairs,) belongs to the preferred answers."""
    current = scores.clone().requires_grad_()
    inputs: dict[str, Any] = {"attention_mask": torch.ones(len(scores), 1)} | ({} if margin is None else {"margin": margin})
    self: Any = SimpleNamespace(
        args=SimpleNamespace(center_rewards_coefficient=None),
        model=_model(),
        accelerator=_accelerator(),
        _metrics=_metrics(),
        _tp_size=1,
        _total_train_tokens=0,
    )
    loss = RewardTrainer.compute_loss(self, lambda **_: SimpleNamespace(logits=current[:, None]), inputs)
    (gradient,) = torch.autograd.grad(loss, current)
    return {"loss": loss.detach(), "gradient": gradient}


def token_numbers(hidden: Tensor, weight: Tensor, targets: Tensor, temperature: float) -> Numbers:
    """Log-probs and entropies of a head's logits, (tokens,), and the gradient of both together."""
    hidden = hidden.clone().requires_grad_()
    log_probs, entropy = selective_log_softmax_and_entropy((hidden @ weight.T)[None], targets[None], temperature=temperature)
    (gradient,) = torch.autograd.grad(log_probs.sum() + entropy.square().sum(), hidden)
    return {"log_probs": log_probs[0].detach(), "entropy": entropy[0].detach(), "gradient": gradient}


__all__ = ["GMPOTrainer", "GRPOTrainer", "RLOOTrainer"]
