"""A plugin that breaks online sessions: rewards add up, also those of repeated requests, and each repeated chat is a sample of
its own.  It is the control of online.py."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rlhub.agents.openai_server.online import OnlineSession
from rlhub.agents.openai_server.repeats import ClientCall, ClientCalls


def add_rewards(self: OnlineSession, rewards: Mapping[str, float], key: str) -> bool:
    """Replaces OnlineSession.take_rewards."""
    for name, value in rewards.items():
        self.rewards[name] = self.rewards.get(name, (0.0, ""))[0] + value, key
    return True


def always_new(self: ClientCalls, *request: Any) -> ClientCall:
    """Replaces ClientCalls.of."""
    return ClientCall()


ClientCalls.of = always_new  # type: ignore[method-assign,assignment]
OnlineSession.take_rewards = add_rewards  # type: ignore[method-assign]
