"""The sections of a configuration.  Each is a dataclass whose fields hold the only defaults and whose docstrings are `--help`.

ppo sft preference export serve  the roots, one for each kind of job
actor rollout training           the policy, generation, and the settings of every training engine
env                              simulators in which an action policy is trained
vla                              the actions of a vision-language-action policy
algorithm rollout_correction     advantages, and the gap between sampling and training
reward                           reward models, judges and reward functions
trainer                          the run: devices, placement, checkpoints, asynchrony
"""
