"""Reinforcement learning of a policy: the control flow on the driver, which owns no device.

  step.py               one training step, the same for every schedule: read this first
  dealing.py            its mini-batches, and the rank that trains each row
  graph_step.py         the same as the graph of a pipeline, whose nodes a user may replace
  plan.py               the graph before anything starts: built, checked, and described for --dry-run
  trainer.py            the fit loop around it (resume, validate, save, log), and how it is built from a configuration

Where samples come from; each is a SampleSource (step.py):
  sync_source.py        whole batches in turns with training
  dynamic_sampling.py   the buffer of groups whose samples differ in reward
  group_filter.py       the user's own filter of groups
  feedback.py           what samples score, on its way to the sampler of the prompts
  stream_source.py      episodes that run all the time: one step ahead, or fully asynchronous
  embodied.py           scenes and episodes of simulators for sync_source.py, and validation on fixed scenes
  episode_stream.py     such episodes while the policy trains on those before
  offline_source.py     files of a collecting job, and batches that an earlier run recorded

What the step does with them:
  scoring.py            the reward of each response, and what is compared with it
  metrics.py            metrics out of what workers return and what phases took; how far apart the two policies may be
  requirements.py       what the chosen algorithm requires of all this

What a stream of episodes needs:
  build_stream.py       the service, executor and workflows of a run
  episodes.py           which workflow runs a prompt's episodes, with what sampling, and validation by episodes
  episode_scoring.py    scores of finished episodes while others still run
  timelines.py          when single episodes waited, generated, ran their own code and were scored
  publication.py        weights on their way to the replicas while generation goes on

Validation:
  validation.py         samples and scores the validation set, while training waits or while it goes on
  validation_metrics.py pass@k and its relatives

Workers:
  worker_groups.py      the worker group of each role, and their checkpoints
"""
