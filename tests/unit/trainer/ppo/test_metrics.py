"""Metrics that ranks return, and milliseconds per token."""

from __future__ import annotations

import pytest

from rlhub.trainer.ppo.metrics import mean_metrics, timing_per_token

TOKENS, RESPONSE_TOKENS = 13.0, 5.0


def test_metrics_of_several_ranks_are_averaged_and_single_ones_kept() -> None:
    assert mean_metrics({"a": [1.0, 3.0], "b": [2.0]}) == {"a": 2.0, "b": 2.0}
    assert mean_metrics({"a": 4}) == {"a": 4.0}


def test_a_metric_that_no_rank_gave_is_left_out() -> None:
    assert mean_metrics({"a": [], "b": [2.0]}) == {"b": 2.0}


def test_milliseconds_per_token_of_the_phases_that_ran() -> None:
    timings = {"timing_s/generate_sequences": 0.5, "timing_s/compute_ref_log_prob": 1.3, "timing_s/update_actor": 2.6}
    assert timing_per_token(timings | {"timing_s/reward": 9.0}, TOKENS, RESPONSE_TOKENS) == pytest.approx(
        {"timing_per_token_ms/gen": 100.0, "timing_per_token_ms/ref": 100.0, "timing_per_token_ms/update_actor": 200.0}
    )
    others = {"timing_s/compute_values": 0.013, "timing_s/compute_advantages": 0.026, "timing_s/update_critic": 0.039}
    assert timing_per_token(others, TOKENS, RESPONSE_TOKENS) == pytest.approx(
        {"timing_per_token_ms/values": 1.0, "timing_per_token_ms/adv": 2.0, "timing_per_token_ms/update_critic": 3.0}
    )


def test_without_a_response_token_generation_has_no_time_per_token() -> None:
    assert timing_per_token({"timing_s/generate_sequences": 0.5}, TOKENS, 0.0) == {}
