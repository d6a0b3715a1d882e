"""Tools: functions that a model may call in an episode.

base.py          the interfaces Tool and ToolSource
registry.py      the names of tools and of call formats
toolbox.py       the tools of a run, built from settings, and their use by one episode
schemas.py       the schema of a typed function, and arguments checked against a schema
formats.py       tool calls parsed from a reply
call_streams.py  tool calls parsed from a reply while it is generated
calculator.py python.py mcp.py   the tools that come with rlhub
python_program.py python_child.py   the program in which a model's Python code runs, and its forks in a child
"""
