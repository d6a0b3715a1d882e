"""Generation by a server that another job runs, over HTTP.

engine    RolloutEngine: requests, pauses, and updates of the server's weights
dialects  the calls that each kind of server understands, and how its answers are read
server    the HTTP connection, the checks of the settings, and the delivery of weights through a shared folder
"""
