"""Resharding: the weights move from the trainer's layout to the rollout engine's by a plan that is checked at every update.

Weights are published in one of three ways.  From the actor's ranks to the engine they pass at most three classes on a side:

    ranks that train and generate    ShardingManager -> Route -> Transport
    two pools of processes           WeightSender -> Route -> Transport; and Transport -> Route -> WeightReceiver
    jobs that share a folder         WeightWriter; and WeightReader

Route is one process's part of the plan (`plan`, cut into messages by `schedule`), from its LocalPieces to those of other
processes; Transport carries messages between Peers.  `layout_exchange` tells every process all layouts.  An engine's
first weights come through its own loader (`update_by_stream` in `manager`).
"""
