"""GRPO with a second scorer, shaped rewards, an advantage of its own and no reference: a pipeline of one's own in one file.

python -m rlhub.trainer.main_ppo trainer.pipeline=recipes/pipelines/brevity.py:pipeline [settings of main_ppo]
"""

import torch

from rlhub.config.sections.ppo import PPOConfig
from rlhub.pipeline.builtin import Needs, ppo
from rlhub.pipeline.graph import Pipeline
from rlhub.protocol import DataProto


def brevity(batch: DataProto) -> DataProto:
    return DataProto.from_dict({"brevity": 1.0 / batch.batch["response_length"].clamp(min=1)})


def shape(batch: DataProto) -> DataProto:
    shaped = batch.batch["scores"] + 0.1 * batch.batch["brevity"]
    return DataProto.from_dict({"shaped": shaped}, meta_info={"metrics": {"critic/shaped/mean": shaped.mean().item()}})


def advantages(batch: DataProto) -> DataProto:
    """Returns the shaped reward minus the mean of its group, on every token that trains."""
    rows = batch.batch
    _, group, sizes = rows["uid"].unique(return_inverse=True, return_counts=True)
    means = torch.zeros(len(sizes)).index_add(0, group, rows["shaped"]) / sizes
    mask = rows["response_mask"].bool() & rows["valid"].bool()[:, None]
    return DataProto.from_dict({"advantages": (rows["shaped"] - means[group])[:, None] * mask, "learn_mask": mask})


def pipeline(config: PPOConfig, needs: Needs) -> Pipeline:
    step = ppo(config, needs)
    step.insert("brevity", below="score", run=f"{__file__}:brevity", reads="response_length", writes="brevity:float32(rows)")
    step.insert("shape", below="brevity", run=f"{__file__}:shape", reads="scores brevity", writes="shaped:float32(rows)")
    own = {"run": f"{__file__}:advantages", "reads": "shaped uid valid response_mask row_order"}
    step.replace("compute_advantages", "advantages", **own, writes="advantages learn_mask")
    return step.remove("compute_ref_log_prob")
