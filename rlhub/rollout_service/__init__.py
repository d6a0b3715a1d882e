"""The rollout service: replicas of the rollout engine that serve requests while training goes on.

service.py            starts, reports on and ends the service
fleet.py router.py    which replicas there are, and which of them gets a request
replica.py server.py  a replica as the router sees it, and the actor that it is
weights_folder.py     new weights by way of files; folder_reader.py: replicas that load them
trajectory_files.py   finished episodes in files, for training elsewhere
executor/             admission of prompts within the bound on staleness, their ledger, groups and delivery
"""
