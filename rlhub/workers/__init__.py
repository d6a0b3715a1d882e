"""Workers: thin shells that offer engines to the driver as `@register`ed methods, one process per rank.

roles            the workers by role: ActorRolloutRefWorker, CriticWorker, RewardModelWorker, JudgeWorker, supervised training
actor            the policy in training and the frozen reference, with or without the rollout engine in their processes
rollout          generation by the rollout engine, in the actor's processes or in its own
base             EngineWorker: saves and loads what a training engine has
simulators       the environments of a rollout rank in actors of a pool of their own
generation       requests from prompts, and training columns from completions
memory_handover  the device memory that the roles of a process use in turn, and the addresses at which pools meet
export           writes a checkpoint as a Hugging Face folder, and verifies it
"""
