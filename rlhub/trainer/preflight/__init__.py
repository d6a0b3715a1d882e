"""The checks before any process starts: names, files, models, memory and settings.  All problems are reported together.

checks.py         all checks of a training or evaluation job, without reading weights
rollout.py        the workflow, tools and environments of episodes, and the rollout engine
memory.py         parameters, optimizer states, caches and activations against the GPUs' memory, by plain arithmetic
model_bytes.py    the bytes of a model on one rank, and of the activations of its largest pass
model_folders.py  the sizes of local models
weights.py        the weights and vocabularies of local models
serve.py          all checks of a server
"""
