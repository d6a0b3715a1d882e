"""Training engines: one model sharded over ranks, its passes and its optimizer.

base         TrainEngine, the interface of every backend
registry     the table of backends, and the construction of each role's engine from the configuration
updates      the updates of a batch: losses on an engine's outputs, optimizer steps, metrics
micro_batch  cutting rows into forward passes
packing      one pass without padding
expert_load  how evenly a mixture of experts is used
prefixes     prefixes that rows of a pass share
optimizer    the rules of a step that all optimizers share, and state in host memory
collectives  the process group, and the check that all weights are finite
fsdp/        FSDP2
megatron/    Megatron-core
"""
