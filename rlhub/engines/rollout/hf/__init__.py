"""Generation with a Hugging Face model in this process: no extra dependency, and right for small models and CPU runs.

It is the simple reference for every other rollout engine.

engine  RolloutEngine, and the continuous batch of its single requests
decode  whole batches, the sampling of a token from its logits, and actions of a vision-language-action policy
cache   the key-value cache, and the reading of prompts
"""
