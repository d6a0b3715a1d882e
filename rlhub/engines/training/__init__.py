"""Training engines: one model sharded over ranks, its passes and its optimizer.

base         TrainEngine, the interface of every backend
registry     names of the backends, and building each role's engine from the configuration
updates      an update of the policy or the value model: mini-batches, losses, metrics
preference   the same on preference pairs
correction   the rollout correction that is computed in the update
micro_batch  cutting rows into forward passes
packing      one pass without padding
optimizer    the rules that all engines' optimizers share
host_memory  tensors in host memory while others need the device's
collectives  the process group, and the check that all weights are finite
fsdp/        FSDP2
megatron/    Megatron-core
"""
