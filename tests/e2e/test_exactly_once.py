"""A job of agents with several trajectories and failing attempts, whose driver is killed: every token and reward counts once.

The matrix of kills on Ray, and online sessions under the same kills, are scripts/checks/exactly_once.py's own.
"""

from __future__ import annotations

import json
from pathlib import Path

from rlhub.protocol import DataProto
from scripts.checks.exactly_once import Kill, Plan, audit, carry_out


def test_all_trajectories_of_retried_episodes_train_once_over_a_killed_driver(tmp_path: Path) -> None:
    """The controls change what the run left: a reward, a lost prompt, a batch that trained twice."""
    kill = Kill(target="driver", number=0, steps=3, delay_s=0.2)
    plan = Plan(name="agents", folder=tmp_path, kills=[kill], seed=1, backend="local")
    assert carry_out(plan), plan.problems
    assert plan.lives == 2 and plan.numbers["of agent or application"]["failed"] > 0
    run = tmp_path / "run"
    assert found(plan) == []

    first, second = (run / "batches" / f"step-{step:06d}.safetensors" for step in (1, 2))
    whole = first.read_bytes()
    batch = DataProto.load_from_disk(first)
    batch.batch["scores"][:2] *= 2
    batch.save_to_disk(first)
    assert any("it was given [" in problem for problem in found(plan))
    first.write_bytes(second.read_bytes())
    assert any("no prompt trained twice" in problem for problem in found(plan))
    first.write_bytes(whole)
    log = run / "prompts.jsonl"
    lines = log.read_text().splitlines(keepends=True)
    log.write_text("".join(lines[1:]))
    assert any("no prompt is lost" in problem for problem in found(plan))
    log.write_text("".join(lines))
    attempts = tmp_path / "attempts.jsonl"
    events = [json.loads(line) for line in attempts.read_text().splitlines()]
    attempts.write_text("".join(json.dumps(event) + "\n" for event in events if event["event"] != "failed"))
    assert any("came without" in problem for problem in found(plan))


def found(plan: Plan) -> list[str]:
    """What the audit finds now."""
    plan.problems.clear()
    audit(plan)
    return plan.problems
