"""Imported into a server: its engine takes any token ids, for tests that must notice."""

from __future__ import annotations

from rlhub.engines.rollout import requests
from rlhub.workflows.openai_server import server

requests.check_ids = server.check_ids = lambda *_: None  # type: ignore[assignment,attr-defined]
