"""The environment variables that a child receives: few for code that a model wrote, all except secrets for the user's own
code."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass

from rlhub.errors import ConfigError
from rlhub.utils.redact import looks_secret

BARE = {"PATH": os.defpath, "HOME": "/", "LANG": "C.UTF-8", "TMPDIR": ""}
"""The variables of code that a model wrote, with the values that replace unset ones; "" leaves the variable out."""
THREADS = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")


@dataclass(frozen=True, slots=True, kw_only=True)
class Access:
    """The environment variables of a child.  env: names of additional variables that are passed on.  setting: the setting that
    lists them, for messages.

    untrusted: the child runs code that a model wrote.  It receives only PATH, HOME, LANG, TMPDIR and `env`, only root can inspect
    its process, and its imports count as its own time.
    """

    setting: str = "env"
    env: tuple[str, ...] = ()
    untrusted: bool = False

    def variables(self) -> dict[str, str]:
        """Returns the child's environment.  Raises ConfigError for a name in `env` that is not set here."""
        unset = [name for name in self.env if name not in os.environ]
        if unset:
            raise ConfigError(
                f"{self.setting} lists {', '.join(unset)}: not set where the run starts; set it, or remove it there"
            )
        if not self.untrusted:
            return THREADS | {name: value for name, value in os.environ.items() if self._passed(name)}
        bare = {name: os.environ.get(name, value) for name, value in BARE.items()}
        return {name: value for name, value in bare.items() if value} | THREADS | {name: os.environ[name] for name in self.env}

    def hint(self, message: str) -> str:
        """Returns a hint to append to an error's message that names a variable which is set here but not passed to the child,
        otherwise ""."""
        kept = [name for name in os.environ if not self._passed(name) and _missed(name, message)]
        if not kept:
            return ""
        verb = "is" if len(kept) == 1 else "are"
        return f"\n({', '.join(kept)} {verb} set, but kept from this process: add to {self.setting} what it may read)"

    def _passed(self, name: str) -> bool:
        return name in self.env or (name in BARE if self.untrusted else not looks_secret(name))


def _missed(name: str, message: str) -> bool:
    return f"KeyError: '{name}'" in message or (looks_secret(name) and re.search(rf"\b{re.escape(name)}\b", message) is not None)
