"""A step with a second scorer and a shaping node, advantages of its own, and no reference."""

from rlhub.pipeline.builtin import TEXT, ppo
from rlhub.protocol import DataProto


def brevity(batch):
    """Scores by length: 1 for a response of one token."""
    return DataProto.from_dict({"brevity": 1.0 / batch.batch["response_length"]})


def shape(batch):
    """Adds both scores."""
    columns = batch.batch
    return DataProto.from_dict({"shaped": columns["scores"] + 0.5 * columns["brevity"]})


def advantages(batch):
    """Puts on every token how much better its sample is than the mean of its prompt's."""
    scores, uid = batch.batch["shaped"], batch.batch["uid"]
    same = (uid[:, None] == uid).float()
    means = same @ scores / same.sum(1)
    mask = batch.batch["response_mask"] * batch.batch["valid"][:, None]
    better = (scores - means)[:, None] * mask
    metrics = {"critic/shaped/mean": float(scores.mean())}
    return DataProto.from_dict({"advantages": better, "learn_mask": mask}, meta_info={"metrics": metrics})


def mine(config, needs):
    step, here = ppo(config, needs), f"{__file__}:"
    step.insert("brevity", below="balance", run=here + "brevity", reads=TEXT, writes="brevity:float32(rows)")
    step.insert("shape", below="brevity", run=here + "shape", reads="scores brevity", writes="shaped:float32(rows)")
    step.replace(
        "compute_advantages", "advantages", run=here + "advantages",
        reads="shaped uid valid response_mask row_order", writes="advantages learn_mask",
    )  # fmt: skip
    return step.remove("compute_ref_log_prob")
