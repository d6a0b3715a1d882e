"""The mathematics of policy optimisation as pure functions of tensors: one file an algorithm, its knobs and its paper.

registry         the names of all algorithms, with what each requires; loads no torch
estimation       the work on a batch's token columns between the forward passes and the updates
inputs           the inputs and outputs of estimators and losses
advantages/      advantage estimators
policy_losses/   policy losses
correction/      corrections of the gap between the policies that sample and that train
kl               KL estimators, and the KL penalty in the reward
returns          returns, and the critic's loss
preference       losses on pairs of answers: DPO and its relatives, reward models
mismatch         the distance of the rollout engine's probabilities from the trainer's
statistics       statistics of the samples of one prompt, and of the whole batch from numbers of its rows
levels           the unit of a loss: a token, an action or a whole response
masked           values and sums over tokens that count, and the aggregation of token losses

Importing this package loads no torch.
"""
