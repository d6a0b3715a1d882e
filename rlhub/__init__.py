"""rlhub: reinforcement-learning post-training for language models.

trainer/            the commands, and the control flow on the driver
pipeline/           one training step as a graph of nodes
rollout_service/    replicas that serve generation while training goes on
agents/             episodes, and the services that agents use
workers/            the roles that the driver calls
sharding_manager/   weights on their way from trainer to rollout engine
engines/            training and generation on the devices
models/ data/ rewards/ tools/ envs/ tracking/ checkpoint/   one file each thing
algorithms/         the mathematics
sandboxes/          where code that a model wrote runs
single_controller/  worker groups: one driver, many processes
protocol/ config/   batches and weights between processes; typed configuration
registry errors utils/

A folder imports only from those below it.  Importing the package loads neither torch nor ray; import what you need from its
modules.
"""

__version__ = "0.1.0"
