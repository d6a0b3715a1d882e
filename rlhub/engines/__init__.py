"""Engines: the computing behind the workers, for one model over its ranks.

training/  forward and backward passes, optimizer steps and sharded weights: FSDP2, Megatron-core
rollout/   generation with the policy's weights: vLLM, a plain Hugging Face model, a server of another job

Each kind has one interface (`base`), one table of engines (`registry`) and one contract test that all of them pass.
"""
