"""Generation with vLLM: inside the trainer's or a replica's own process (`engine`), or in processes of vLLM's (`async_engine`).

In this process the weights are read back where they were written and no token crosses a socket, so that is the default.  A
replica that is tensor-parallel has its ranks in processes of vLLM's, over its AsyncLLMEngine; `rollout.name=vllm_async` asks for
that with one device too.

    engine, in_process      RolloutEngine in this process, and the LLM that it drives
    async_engine, client    RolloutEngine over processes of vLLM's, and the AsyncLLMEngine that it drives
    worker                  what rlhub adds to those processes: the way to their weights
    arguments, conversion   what vLLM is built with; requests and answers in its terms
    weights                 its parameters as views under Hugging Face names
    environment             what vLLM needs from a process and changes there; its processes' end with their owner
    internals               the names of vLLM's that it does not promise to keep

Nothing in this package imports vLLM before `initialize`: the import takes seconds and reads environment variables that must be
set first.  The engines and `environment` may be imported anywhere; the other modules import vLLM.
"""
