"""Which columns each worker call reads: only these travel."""

from __future__ import annotations

from rlhub.protocol import DataProto

MODEL = ("input_ids", "attention_mask", "response_mask")
POLICY = (*MODEL, "mini_batch", "advantages", "old_log_probs", "ref_log_prob", "importance_weights", "selected", "staleness")
VALUE = (*MODEL, "critic_mini_batch", "values", "returns")


def view(batch: DataProto, names: tuple[str, ...], **meta: object) -> DataProto:
    """The named columns of `batch` that exist, without copying, with `meta` as meta_info."""
    present = [name for name in names if name in batch.batch.keys()]
    selected = batch.select(batch_keys=present, non_tensor_batch_keys=[], meta_info_keys=[])
    selected.meta_info.update(meta)
    return selected


def model_inputs(batch: DataProto) -> DataProto:
    """What a forward pass reads."""
    return view(batch, MODEL)


def log_prob_inputs(batch: DataProto, *, sum_pi_squared: bool) -> DataProto:
    """What the policy's forward pass before the update reads, and whether it returns sum_pi_squared beside the log-probs."""
    return view(batch, MODEL, **({"sum_pi_squared": True} if sum_pi_squared else {}))


def policy_inputs(batch: DataProto, *, rollout_log_probs: bool) -> DataProto:
    """What the policy update reads.  The rollout's log-probs go only where the update reads them or where the mismatch is
    measured in the update itself."""
    names = POLICY
    if rollout_log_probs or "old_log_probs" not in batch.batch.keys():
        names = (*POLICY, "rollout_log_probs")
    return view(batch, names, num_mini_batches=count(batch, "mini_batch"))


def value_inputs(batch: DataProto) -> DataProto:
    """What the critic's update reads."""
    selected = view(batch, VALUE, num_mini_batches=count(batch, "critic_mini_batch"))
    selected.batch["mini_batch"] = selected.batch.pop("critic_mini_batch")
    return selected


def count(batch: DataProto, column: str) -> int:
    """Number of mini-batches that a column of their indices (from 0) tells apart."""
    return int(batch.batch[column].max().item()) + 1
