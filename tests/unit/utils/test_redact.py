"""Secrets are hidden, the field's daily words are not."""

from __future__ import annotations

import pytest

from rlhub.utils.redact import HIDDEN, looks_secret, redact


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


@pytest.mark.parametrize(
    ("names", "secret"),
    [
        (
            "OPENAI_KEY MY_PAT HF_TOKEN WANDB_API_KEY AWS_SECRET_ACCESS_KEY AWS_ACCESS_KEY_ID PGPASSWORD MYSQL_PWD DB_PASS",
            True,
        ),
        ("GOOGLE_APPLICATION_CREDENTIALS OPENAI_APIKEY SSH_PASSPHRASE CLIENT_SECRET PASSWD DB_PASS api_key my-token", True),
        ("PATH PWD OLDPWD HOME TOKENIZERS_PARALLELISM KEYBOARD MONKEY PATTERN LD_LIBRARY_PATH NUM_TOKENS PASSAGE COMPASS", False),
    ],
)
def test_names_of_variables_that_hold_secrets(names: str, secret: bool) -> None:
    assert [name for name in names.split() if looks_secret(name) != secret] == []
