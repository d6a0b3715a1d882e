"""Rules between settings.  They read no files but the configuration's own, and load no torch.

derive.py         fills the settings that follow from others
checks.py         all checks of a derived configuration, with the arithmetic
parallel.py       the layout of a training engine over ranks
engines.py        the training engines of all roles together
placement.py      trainer.pools and trainer.placement
asynchronous.py   rollout.mode=async, staleness, collected trajectories
embodied.py       env, the simulators
sources.py        data.sources and data.sampler
faults.py         trainer.faults
effects.py        warnings about settings that have no effect
"""
