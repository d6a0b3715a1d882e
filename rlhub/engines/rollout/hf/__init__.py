"""Generation with a Hugging Face model in this process: no extra dependency, right for small models and CPU runs.

The simple reference of what a rollout engine does: `engine` holds the model, `decode` samples whole batches and
`continuous_batch` single requests that join and leave; both share `cache` (keys and values, reading prompts) and `sampling`.
"""
