"""Secrets are hidden, the field's daily words are not."""

from __future__ import annotations

import pytest

from rlhub.utils.redact import HIDDEN, redact


@pytest.mark.parametrize(
    "key",
    ["api_key", "WANDB_API_KEY", "openai-api-key", "token", "hf_token", "HF_TOKEN", "auth_token", "password", "db_passwd",
     "client_secret", "AWS_SECRET_ACCESS_KEY", "AWS_ACCESS_KEY_ID", "credentials"],
)  # fmt: skip
def test_secret_keys(key: str) -> None:
    assert redact({"outer": [{key: "hunter2"}]}) == {"outer": [{key: HIDDEN}]}


@pytest.mark.parametrize(
    "key",
    ["ppo_max_token_len_per_gpu", "max_num_batched_tokens", "eos_token", "pad_token", "prompt_key", "token_level_scores", "keys"],
)
def test_ordinary_keys(key: str) -> None:
    assert redact({key: "value"}) == {key: "value"}


def test_passwords_in_urls_and_unset_values() -> None:
    assert redact({"proxy": "http://me:hunter2@host:80/x"}) == {"proxy": f"http://me:{HIDDEN}@host:80/x"}
    assert redact({"api_key": None, "token": ""}) == {"api_key": None, "token": ""}
