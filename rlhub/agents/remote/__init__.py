"""Runs episodes and environments in actors of their own, so that their CPU work does not hold up the driver.

actor_pool.py            the actors of one kind, with restarts and metrics
workflow.py              an episode whose code runs in an episode actor, as the driver sees it, and the pool of these actors
episode_actor.py         the actor that runs the episodes' own code
episode_messages.py      the messages of many episodes between the two, which travel together as numbers
trajectory_store.py      the tokens of finished episodes, in the process that ran them, until they are trained
holders.py               these processes as the driver reaches them: who has which rows, transfer, checkpoint and loss
environment_actors.py    the actor that runs environments, its pool, and the leases
environment_requests.py  the messages by which an episode in an actor leases environments from the driver
streaming.py             streams the tokens of a running request through the rollout service
"""
