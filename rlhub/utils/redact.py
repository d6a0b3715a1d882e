"""Hides secrets in what is written to disk, shown or sent to a tracker."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

HIDDEN = "<redacted>"

# `token` alone or as an access token; not max_token_len, eos_token or num_tokens, which are this field's daily words
SECRET_KEY = re.compile(
    r"(^|[_.])(api_?key|secret|(secret|secret_access|access|private)_?key(_id)?|passw(or)?d|passphrase|credentials?|authorization"
    r"|(auth|access|bearer|hf|hub|api|wandb|github|session|refresh)_?token)$|^token$",
    re.IGNORECASE,
)
SECRET_WORDS = frozenset(
    ("KEY", "KEYS", "APIKEY", "TOKEN", "SECRET", "SECRETS", "PASSWORD", "PASSWORDS", "PASSWD", "PASSPHRASE", "PASS", "PAT")
    + ("CREDENTIAL", "CREDENTIALS")
)
SECRET_ENDS = ("PASSWORD", "APIKEY", "_PWD")  # PGPASSWORD, MYSQL_PWD
ENVIRONMENT = "env_vars"
"""The mapping of a runtime environment (`trainer.ray_init.runtime_env`) whose values are never shown, whatever their names."""
ORDINARY_KEY = re.compile(
    r"(^|_)(prompt|response|chosen|rejected|margin|image|images|video|videos|message|messages|tool|tools|thinking|fn|data|dict)_keys?$"
    r"|key_value|(^|_)(bos|eos|pad|unk|sep|cls|mask|image|video|stop|special|per|num|max|min)_token|token_(len|level|id|type)|^keys$|_file$"
)
"""Names that contain a word of a secret but are common in this field."""
SECRET_IN_URL = re.compile(r"(?<=://)([^/\s:@]+):([^/\s@]+)(?=@)")


def looks_secret(name: str) -> bool:
    """Returns whether an environment variable of this name is likely to hold a secret, as OPENAI_KEY, MY_PAT or
    AWS_SECRET_ACCESS_KEY are (but not TOKENIZERS_PARALLELISM or PWD)."""
    name = name.replace("-", "_").upper()
    return not SECRET_WORDS.isdisjoint(name.split("_")) or name.endswith(SECRET_ENDS) or SECRET_KEY.search(name) is not None


def redact(value: Any, key: str = "") -> Any:
    """Returns a copy of nested mappings and sequences in which `<redacted>` replaces the values of secret-looking keys, all
    values of environments, and passwords inside URLs.  Unset values (None, "") stay, so that one can see that nothing was
    given."""
    if isinstance(value, Mapping):
        if key == ENVIRONMENT:
            return {name: inner if inner in (None, "") else HIDDEN for name, inner in value.items()}
        return {name: redact(inner, str(name)) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [redact(inner, key) for inner in value]
    if value in (None, ""):
        return value
    if SECRET_KEY.search(key.replace("-", "_")) or (isinstance(value, str) and _is_secret(key)):
        return HIDDEN
    return SECRET_IN_URL.sub(rf"\1:{HIDDEN}", value) if isinstance(value, str) else value


def redact_override(text: str) -> str:
    """Returns `key=value` in a form that may be shown in a message; `key` may contain dots."""
    key, sign, value = text.partition("=")
    names = key.split(".")
    hidden = ENVIRONMENT in names or any(SECRET_KEY.search(name.replace("-", "_")) or _is_secret(name) for name in names)
    return f"{key}={HIDDEN}" if sign and value and hidden else SECRET_IN_URL.sub(rf"\1:{HIDDEN}", text)


def _is_secret(name: str) -> bool:
    return looks_secret(name) and ORDINARY_KEY.search(name) is None
