"""Resharding: the weights move from the trainer's layout to the rollout engine's by a plan that is checked at every update.

Weights are published in one of three ways.  From the actor's ranks to the engine they pass at most three classes on a side:

    ranks that train and generate    ShardingManager -> Route -> Transport
    two pools of processes           WeightSender -> Route -> Transport; and Transport -> Route -> WeightReceiver
    jobs that share a folder         WeightWriter; and WeightReader

manager          ShardingManager; and an engine's first weights, which come through its own loader
separate         WeightSender, WeightReceiver
files            WeightWriter, and folders in a machine's memory
reader           WeightReader
mirror           versions that go from every training rank to every replica
versions delta   the files of a version, and the code for blocks that changed little
route            Route: one process's part of the plan, from its own pieces to those of other processes
plan             the parts of each weight that each rank sends to each rank
schedule         the plan cut into messages
transport peers  the messages, and the processes that exchange them
local_pieces     the pieces of weights in this process
layout_exchange  tells every process all layouts
"""
