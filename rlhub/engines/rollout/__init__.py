"""Generation with the policy's weights: token ids in, token ids with log-probs and policy versions out.

base                 RolloutEngine, the interface, with requests, their checks and completions; ExternalWeights; weight streams
registry             the table of engines, and the settings that each of them cannot serve; loads no torch
vllm/ hf/ remote/    the engines: vLLM, a plain Hugging Face model, and a server of another job
fake                 an engine without a model, for tests of the code that uses an engine
embodied             episodes of an action policy in simulators, as training rows
continuous_batching  single requests for every engine that is driven step by step
streaming            passes a request's tokens from the engine's event loop to the caller's
"""
