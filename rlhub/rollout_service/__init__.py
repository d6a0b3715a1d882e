"""The rollout service: replicas of the rollout engine that serve requests while training goes on.

service.py            starts the service, publishes weights to it, reports on it and closes it
router.py             sends each request to a replica, and repeats it on another one when the replica dies
fleet.py              the set of replicas: starts, restarts, weight updates and removals
elastic.py            the rule by which their number follows the queue of requests
replica_control.py    adds and removes replicas during a run, by that rule and by calls
replica.py            the state of one replica, as the router sees it
server.py             the actor of a replica: a rollout engine behind asyncio methods
weights_folder.py     the folder or connections through which weights are published, and the readers
trajectory_files.py   finished episodes in files, for training in another job
trajectory_rows.py    their tokens, which the training ranks read by themselves
executor/             admission of prompts within the staleness bound, their ledger, groups and batches
"""
