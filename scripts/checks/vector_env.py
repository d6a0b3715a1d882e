"""Whether environments in lock-step pass the conformance suite, in processes of a manager or in this one.

python scripts/checks/vector_env.py reach_color --settings '{"size": 32}' --processes 2
"""

from __future__ import annotations

import argparse
import json
import sys

from rlhub.envs.vector.check import check_vector_env
from rlhub.envs.vector.lockstep import make_vector_env
from rlhub.envs.vector.manager import EnvManager, EnvManagerOptions


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", help="registered, module:name or path/to/file.py:name")
    parser.add_argument("--settings", type=json.loads, default={}, help="keyword arguments of the environment, as JSON")
    parser.add_argument("--num-envs", type=int, default=4)
    parser.add_argument("--processes", type=int, default=2, help="0: in this process")
    parser.add_argument("--python", default="", help="interpreter of the Python environment with the simulator's packages")
    parser.add_argument("--chunk", type=int, default=0)
    parser.add_argument("--chunks", type=int, default=100, help="length of the trajectories from a saved state")
    given = parser.parse_args()
    options = {"name": given.name, "settings": given.settings, "num_envs": given.num_envs, "chunk": given.chunk}
    env = (
        EnvManager(EnvManagerOptions(processes=given.processes, python=given.python, **options))
        if given.processes
        else make_vector_env(**options)
    )
    try:
        sys.stdout.write("".join(f"passed  {name}\n" for name in check_vector_env(env, chunks=given.chunks)))
    finally:
        env.close()


if __name__ == "__main__":
    main()
