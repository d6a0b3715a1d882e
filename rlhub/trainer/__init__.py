"""The driver's side of every job: the control flow, and the run folder with all that a run leaves there.

The driver owns no device and no model.

main_*.py        the commands: parse, check, build, fit
preflight/       the checks before any process starts
training.py      a training job from data to exit status, and the check that it can resume from its checkpoint
launch.py        starts the workers of a job, or every rank with the loop (trainer.controller=multi), under Ray or torchrun
run.py           everything around the training steps: run folder, metrics, checkpoints, signals
ppo/             reinforcement learning; ppo/step.py is one training step
supervised.py    training on demonstrations and on preference pairs
export.py        writes a checkpoint as a Hugging Face model
serve.py         serves a model by OpenAI's interface
"""
