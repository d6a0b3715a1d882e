"""Where prompts came from, so that a resumed run finds them again, and the log of how they ended."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from rlhub.data.order import ResumableLoader
from rlhub.protocol import DataProto
from rlhub.rollout_service.executor.ledger import Phase
from rlhub.trainer.ppo.stream_source import LoaderPositions, PromptLog


class Numbers:
    """Rows that are their own number."""

    fingerprint = "numbers"

    def __len__(self) -> int:
        return 10

    def batch(self, indices: Any) -> DataProto:
        tokens = torch.tensor(indices)[:, None] + 100
        return DataProto.from_dict({"prompts": tokens, "attention_mask": torch.ones_like(tokens)}, {"name": indices.astype(str)})


def loader() -> ResumableLoader:
    return ResumableLoader(Numbers(), 4, seed=3)


def test_a_prompt_that_has_not_ended_is_found_again() -> None:
    """From the state for any ordinal, whatever was drawn since and forgotten before it, over epochs."""
    first = loader()
    positions = LoaderPositions(first)  # type: ignore[arg-type]
    items = positions.items(first.endless())
    drawn = [next(items) for _ in range(23)]
    assert [item.ordinal for item in drawn] == list(range(23))
    for ordinal in (0, 3, 4, 11, 22):
        positions.forget(ordinal)
        again = loader()
        again.load_state(positions.state(ordinal))
        found = next(item for item in LoaderPositions(again).items(again.endless()) if item.ordinal == ordinal)  # type: ignore[arg-type]
        assert found == drawn[ordinal]
    assert positions.state(22)["consumed"] == 20


def test_a_resumed_run_takes_back_the_ends_of_prompts_in_work(tmp_path: Path) -> None:
    log = PromptLog(tmp_path / "prompts.jsonl")
    for ordinals, phase in (((0, 1), Phase.TRAINED), ((2,), Phase.DROPPED), ((5,), Phase.REJECTED)):
        log.ended(ordinals, phase, "why")
    log.load_state({"next_ordinal": 4, "open": [[1, "finished"], [3, "issued"]]})
    rows = [json.loads(line) for line in log.path.read_text().splitlines()]
    assert [(row["ordinal"], row["end"]) for row in rows] == [(0, "trained"), (2, "dropped")]
    log.start()
    assert not log.path.exists()


def test_a_prompt_is_said_to_be_trained_in_the_step_that_took_it(tmp_path: Path) -> None:
    """Its weights may arrive when training is steps further, and those of several steps at once."""
    log = PromptLog(tmp_path / "prompts.jsonl")
    for step, ordinals in ((1, (0, 2)), (2, (1, 5)), (3, (3, 4))):
        log.take(step, ordinals)
    log.ended((0, 2, 1), Phase.TRAINED, "")
    log.ended((6,), Phase.REJECTED, "filtered out")
    log.ended((5, 3, 4), Phase.TRAINED, "")
    rows = [json.loads(line) for line in log.path.read_text().splitlines()]
    assert {row["ordinal"]: row["step"] for row in rows} == {0: 1, 2: 1, 1: 2, 6: 3, 5: 2, 3: 3, 4: 3}
