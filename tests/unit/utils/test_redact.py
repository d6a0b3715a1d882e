"""Secrets are hidden, the field's daily words are not."""

from __future__ import annotations

import pytest

from rlhub.utils.redact import HIDDEN, looks_secret, redact, redact_override


@pytest.mark.parametrize(
    "key",
    ["api_key", "WANDB_API_KEY", "openai-api-key", "token", "hf_token", "HF_TOKEN", "auth_token", "password", "db_passwd",
     "client_secret", "AWS_SECRET_ACCESS_KEY", "AWS_ACCESS_KEY_ID", "credentials", "OPENAI_KEY",
     "MY_PAT", "openai_key", "PGPASSWORD"],
)  # fmt: skip
def test_secret_keys(key: str) -> None:
    assert redact({"outer": [{key: "hunter2"}]}) == {"outer": [{key: HIDDEN}]}


@pytest.mark.parametrize(
    "key",
    [
        "ppo_max_token_len_per_gpu",
        "max_num_batched_tokens",
        "eos_token",
        "pad_token",
        "prompt_key",
        "token_level_scores",
        "keys",
        "num_key_value_heads",
        "stop_token_ids",
        "PWD",
        "TOKENIZERS_PARALLELISM",
    ],
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
            "OPENAI_KEY MY_PAT HF_TOKEN WANDB_API_KEY AWS_SECRET_ACCESS_KEY AWS_ACCESS_KEY_ID PGPASSWORD MYSQL_PWD my-token",
            True,
        ),
        ("GOOGLE_APPLICATION_CREDENTIALS OPENAI_APIKEY SSH_PASSPHRASE CLIENT_SECRET PASSWD DB_PASS api_key my-token", True),
        ("PATH PWD OLDPWD HOME TOKENIZERS_PARALLELISM KEYBOARD MONKEY PATTERN LD_LIBRARY_PATH NUM_TOKENS PASSAGE COMPASS", False),
    ],
)
def test_names_of_variables_that_hold_secrets(names: str, secret: bool) -> None:
    assert [name for name in names.split() if looks_secret(name) != secret] == []


def test_no_value_of_an_environment_is_shown_whatever_its_name() -> None:
    environment = {"CACHE_DIR": "/scratch", "LOGIN": "hunter2", "EMPTY": "", "NONE": None}
    shown = redact({"runtime_env": {"env_vars": environment, "pip": ["x"]}})
    hidden = {"CACHE_DIR": HIDDEN, "LOGIN": HIDDEN, "EMPTY": "", "NONE": None}
    assert shown == {"runtime_env": {"env_vars": hidden, "pip": ["x"]}}
    assert redact(shown) == shown


def test_names_of_secrets_in_an_environment() -> None:
    assert all(looks_secret(name) for name in ("OPENAI_KEY", "MY_PAT", "HF_TOKEN", "DB_PASSWORD", "my-secret", "SSH_CREDENTIALS"))
    assert not any(looks_secret(name) for name in ("PATH", "PWD", "TOKENIZERS_PARALLELISM", "KEYBOARD", "COMPAT", "PATTERN"))


def test_a_setting_in_a_message_is_shown_without_its_secret() -> None:
    assert (
        redact_override("trainer.ray_init.runtime_env.env_vars.ANY=hunter2")
        == f"trainer.ray_init.runtime_env.env_vars.ANY={HIDDEN}"
    )
    assert redact_override("a.MY_PAT=x=y") == f"a.MY_PAT={HIDDEN}"
    assert redact_override("data.prompt_key=question") == "data.prompt_key=question"
    assert redact_override("url=http://me:hunter2@host") == f"url=http://me:{HIDDEN}@host"
