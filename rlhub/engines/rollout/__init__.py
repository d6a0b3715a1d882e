"""Generation with the policy's weights: token ids in, token ids with log-probs and policy versions out.

base                 RolloutEngine, the interface and its requests and completions; ExternalWeights; applying a stream of weights
registry             which engines exist, and what of a configuration each cannot do; loads no torch
vllm/ hf/ remote/    the engines: vLLM, a plain Hugging Face model, a server of another job
fake                 an engine without a model, for tests of what uses one
continuous_batching  single requests for every engine that is driven step by step
request_checks       what every engine refuses before it generates
streaming            a request's tokens, from the engine's event loop to the caller's
"""
