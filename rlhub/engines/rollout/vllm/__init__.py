"""Generation with vLLM: inside the trainer's or a replica's own process (`engine`), or in processes of vLLM's (`async_engine`).

The engine in this process is the default: it reads weights back where they were written, and no token crosses a socket.  A
tensor-parallel replica of single requests has its ranks in processes of vLLM's, over AsyncLLMEngine; `rollout.name=vllm_async`
selects that with one device too.

    engine        RolloutEngine in this process
    async_engine  RolloutEngine over processes of vLLM's
    entrypoints   the LLM and the AsyncLLMEngine that the two drive, and the arguments these are built with
    conversion    requests and outputs in vLLM's terms
    parsers       vLLM's parsers of tool calls and reasoning
    worker        vLLM's parameters as views under Hugging Face names, also inside its worker processes
    environment   the environment that vLLM needs in a process, and the end of its processes with their owner
    internals     the names of vLLM's that it does not promise to keep

No module of this package imports vLLM before `initialize`: the import takes seconds and reads environment variables that must be
set first.  The engines and `environment` may be imported anywhere; the other modules import vLLM.
"""
