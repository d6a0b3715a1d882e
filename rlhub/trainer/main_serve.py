"""Serve a model by OpenAI's interface: `python -m rlhub.trainer.main_serve model.path=<folder>`"""

from __future__ import annotations

import sys

from rlhub.config.cli import run as run_cli
from rlhub.config.sections.serve import ServeConfig
from rlhub.trainer.preflight.serve import check

DESCRIPTION = (
    "Serve a model folder by OpenAI's interface (/v1/chat/completions with streaming, tools and log-probs, /v1/completions, "
    "/v1/models), by any rollout engine.  Another training job can generate with it (rollout.name=remote) and gives it new "
    "weights while it serves.  Every request carries the key as a bearer token.  Example: model.path=my_model rollout.name=hf "
    "server.port=8000 server.api_key_file=key.txt"
)


def main(config: ServeConfig) -> int:
    """Serves the model until a signal comes, and returns the exit status."""
    from rlhub.trainer.serve import serve

    return serve(config)


if __name__ == "__main__":
    sys.exit(run_cli(ServeConfig, "serve", main, description=DESCRIPTION, preflight=check, required=("model.path",)))
