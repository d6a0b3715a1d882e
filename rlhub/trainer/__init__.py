"""The driver's side of every job: what runs when, and what a run leaves behind.  The driver owns no device and no model.

main_*.py        the commands: parse, check, build, fit
preflight/       what is checked before any process starts
training.py      a training job from data to exit status
launch.py        starting the workers of a job
run.py           what surrounds the steps of any training: run folder, metrics, checkpoints, signals
resume.py        whether a run can go on from its checkpoint
ppo/             reinforcement learning; ppo/step.py is one training step
supervised.py    demonstrations, preference pairs, reward models
export.py        a checkpoint as a Hugging Face model
serve*.py        a model behind OpenAI's interface
"""
