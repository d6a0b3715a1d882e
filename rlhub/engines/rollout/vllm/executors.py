"""vLLM's executors, in whose engine core our watch runs: the core imports this module to know its executor's class.

Imports vLLM: see `environment`.
"""

from __future__ import annotations

from vllm.v1.executor.multiproc_executor import MultiprocExecutor
from vllm.v1.executor.uniproc_executor import UniProcExecutor

from rlhub.engines.rollout.vllm.watch import end_with_owner


class CoreExecutor(UniProcExecutor):
    """The model is in the engine core."""


class WorkersExecutor(MultiprocExecutor):
    """The model's parts are in worker processes."""


end_with_owner()
