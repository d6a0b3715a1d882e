"""An application that knows only HTTP drives a run's episodes over a killed driver; one of them is sampled again afterwards."""

from __future__ import annotations

from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from scripts import replay_episode
from scripts.checks.online import Check, Found, drive, matching


def test_online_sessions_are_exact_over_a_killed_driver_and_can_be_replayed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The program's own check with fewer episodes.  Controls of the replay: the noise of another run, and a changed weight."""
    found: Found = drive(Check(folder=tmp_path, episodes=60, kills=1))
    assert found.problems == [] and len(found.qualities) == 3
    run = tmp_path / "run"
    episodes = [f"{number}-{sample}" for number in (0, 1) for sample in (0, 1)]
    outcomes = {episode: replay_episode.main([str(run), episode]) for episode in episodes}
    assert replay_episode.SAME in outcomes.values() and replay_episode.DIFFERENT not in outcomes.values(), capsys.readouterr().out
    same = next(episode for episode, outcome in outcomes.items() if outcome == replay_episode.SAME)
    capsys.readouterr()
    assert replay_episode.main([str(run), same, "--seed", "2"]) == replay_episode.DIFFERENT
    assert "first difference: token" in capsys.readouterr().out
    changed = tmp_path / "changed"
    (changed).mkdir()
    for path in (tmp_path / "task" / "chat").iterdir():
        (changed / path.name).write_bytes(path.read_bytes())
    weights = load_file(changed / "model.safetensors")
    save_file({name: -weight for name, weight in weights.items()}, changed / "model.safetensors", metadata={"format": "pt"})
    assert replay_episode.main([str(run), same, "--model", str(changed)]) == replay_episode.DIFFERENT
    assert "first difference: token" in capsys.readouterr().out
    assert replay_episode.main([str(run), "99999-0"]) == replay_episode.IMPOSSIBLE
    report = (run / "report.html").read_text()
    assert "Single episodes" in report and "generate: " in report.split("Single episodes", 1)[1]


def test_the_audit_finds_a_reward_that_counts_twice() -> None:
    ends = [
        {"event": "completed", "sample": 0, "reward": 0.5},
        {"event": "completed", "sample": 0, "reward": 0.25},  # given again after a kill
        {"event": "completed", "sample": 1, "reward": 0.5},
        {"event": "unknown", "sample": 1, "reward": 0.75},  # the driver died before it answered, or after
    ]
    assert matching([0.25, 0.5], ends) == [ends[1], ends[2]]
    assert matching([0.25, 0.75], ends) == [ends[1], ends[3]]
    for trained in ([0.5, 0.5], [0.5, 0.75], [0.25], [0.25, 1.0], [0.25, 0.5, 0.5]):
        assert matching(trained, ends) is None
