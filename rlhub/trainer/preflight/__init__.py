"""What is checked before any process starts: files, names, models, memory and settings, all problems reported together.

checks.py    runs all of them for a main
model.py     whether the model folder holds what the run needs
memory.py    whether parameters, moments and caches fit the devices, by plain arithmetic
rollout.py   workflows (own_workflows.py: those of the user), tools and environments of asynchronous rollouts
serve.py     the rollout server
"""
