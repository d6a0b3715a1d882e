"""Episodes and environments in actors of their own, so that their CPU work does not hold up the driver.

actor_pool.py           the actors of one kind, kept alive
episode_actor.py        runs the episodes' own code      episode_actors.py      its pool
environment_actor.py    runs environments                environment_actors.py  its pool, and the leases
workflow.py             an episode whose code runs in an episode actor, as the driver sees it
environment_requests.py     what such an episode says to get its environments
streaming.py            the tokens of a running request on their way through the service
"""
