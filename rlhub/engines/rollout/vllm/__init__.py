"""Generation with vLLM: inside the trainer's or a replica's own process (`engine`), or in processes of vLLM's (`async_engine`).

In this process the weights are read back where they were written and no token crosses a socket, so that is the default.  A
replica that is tensor-parallel has its ranks in processes of vLLM's, over its AsyncLLM; `rollout.name=vllm_async` asks for that
with one device too.

Nothing in this package imports vLLM before `initialize`: the import takes seconds and reads environment variables that must be
set first.  The engines, `environment`, `memory` and `watch` may be imported anywhere; the other modules import vLLM.
"""
