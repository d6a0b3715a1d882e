"""Generation by a server of another job, over HTTP: one file for each kind of server."""
