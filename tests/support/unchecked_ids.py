"""Imported into a server: its engine takes any token ids, for tests that must notice."""

from __future__ import annotations

from rlhub.agents.openai_server import answering
from rlhub.engines.rollout import base

base.check_ids = answering.check_ids = lambda *_: None  # type: ignore[assignment,attr-defined]
