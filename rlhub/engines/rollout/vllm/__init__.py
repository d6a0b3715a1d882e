"""Generation with vLLM inside the trainer's own process.

Nothing in this package imports vLLM before `VLLMEngine.initialize`: the import takes seconds and reads environment
variables that must be set first.  `engine` may be imported anywhere; `build` and `weights` import vLLM.
"""
