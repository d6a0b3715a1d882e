"""Reinforcement learning of a policy: the control flow on the driver, which owns no device.

  step.py               one training step, the same for every schedule: read this first
  trainer.py            the fit loop around it: resume, validate, save, log

Where samples come from; each is a SampleSource (step.py):
  sync_source.py        whole batches in turns with training
  dynamic_sampling.py   the buffer of groups whose samples differ in reward
  stream_source.py      episodes that run all the time: one step ahead, or fully asynchronous
  offline_source.py     files of a collecting job, and batches that an earlier run recorded

What the step does with them:
  scoring.py            the reward of each response, and what is compared with it
  mini_batches.py       which rows make which optimizer step, on which rank, and which of their tokens a loss chose
  advantages.py         from scores to advantages
  correction.py         the rollout engine's policy against the trained one: measured, bounded, corrected
  metrics.py            the numbers of a training batch
  requirements.py       what the chosen algorithm requires of all this

What a stream of episodes needs:
  episodes.py           which workflow runs a prompt's episodes, with what sampling, and validation by episodes
  episode_scoring.py    scores of finished episodes while others still run
  publication.py        weights on their way to the replicas while generation goes on
  prompt_progress.py    where in the data a prompt came from, and how it ended

Validation:
  validation.py, validation_metrics.py   sample and score the validation set; pass@k and its relatives
  validation_schedule.py                 while training waits, or while it goes on

From a configuration to a trainer:
  build.py, build_stream.py, reward.py, worker_groups.py
"""
