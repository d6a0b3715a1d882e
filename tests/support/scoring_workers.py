"""A worker that samples and scores as a rollout's rank does, without an engine; worker processes import it."""

from __future__ import annotations

import time
from pathlib import Path

import torch

from rlhub.config.sections.ppo import ActorRolloutRefConfig
from rlhub.models.tokenizer import load_tokenizer
from rlhub.protocol import DataProto
from rlhub.rewards.pool import RewardFunction
from rlhub.single_controller import Dispatch, register
from rlhub.workers.rollout import ROLLOUT, RolloutPart

WIDTH, SAMPLES = 24, 2
REWARD = """
import os, signal, time
from pathlib import Path

def compute_score(data_source, solution_str, ground_truth, extra_info):
    marks = Path(extra_info["marks"])
    if solution_str == "raise":
        raise RuntimeError("cannot judge this")
    if solution_str == "die once" and not (marks / "died").exists():
        (marks / "died").touch()
        os.kill(os.getpid(), signal.SIGKILL)
    if solution_str == "hang":
        (marks / f"hangs-{extra_info['row']}").touch()
        time.sleep(1000)
    if solution_str == "wait":
        (marks / f"began-{extra_info['row']}").touch()
        while not (marks / "passed-0").exists() or not (marks / "passed-1").exists():
            time.sleep(0.01)
    return {"score": len(solution_str) / 7, "acc": solution_str == ground_truth, "letters": len(set(solution_str))}
"""
"""A reward that waits for the forward passes of both ranks, hangs, fails, or dies once, as the response says."""


class ScoringWorker(RolloutPart):
    """folder: of the tokenizer."""

    def __init__(self, folder: str, reward: RewardFunction) -> None:
        self.config, self.folder, self.reward = ActorRolloutRefConfig(), folder, reward

    @register(Dispatch.ONE_TO_ALL)
    def init_model(self) -> None:
        assert self.reward is not None
        self.tokenizer = load_tokenizer(self.folder)
        self._init_scoring(self.reward, self.tokenizer, 1)
        self._register_dispatch_collect_info("rollout", self.rank, True)

    @register(ROLLOUT)
    def sample(self, prompts: DataProto) -> DataProto:
        """Both responses to a prompt are its column `text`, the second one letter shorter; the prompt is one token."""
        texts = [text[: len(text) - cut] for text in prompts.non_tensor_batch["text"] for cut in range(SAMPLES)]
        rows = [self.tokenizer(text)["input_ids"] for text in texts]
        lengths = torch.tensor([len(row) for row in rows], dtype=torch.int64)
        mask = (torch.arange(WIDTH) < lengths[:, None]).long()
        responses = torch.zeros(len(rows), WIDTH, dtype=torch.int64)
        responses[mask.bool()] = torch.tensor([token for row in rows for token in row], dtype=torch.int64)
        first = torch.full((len(rows), 1), 7)
        columns = {
            "input_ids": torch.cat([first, responses], 1),
            "attention_mask": torch.cat([torch.ones_like(first), mask], 1),
            "responses": responses,
            "response_mask": mask,
            "response_length": lengths,
        }
        return DataProto.from_dict(columns)

    @register(ROLLOUT)
    def compute_log_prob(self, batch: DataProto, marks: str) -> DataProto:
        """A forward pass that ends only after the rewards of all rows began: nothing is done unless both run at once."""
        folder, deadline = Path(marks), time.monotonic() + 120
        while len(list(folder.glob("began-*"))) < 2:
            assert time.monotonic() < deadline, "the reward does not run beside the pass"
            time.sleep(0.01)
        (folder / f"passed-{self.rank}").touch()
        return DataProto.from_dict({"rank": torch.full((len(batch),), self.rank)})
