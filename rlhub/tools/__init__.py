"""Tools: what a model may call in an episode.

base: the interfaces Tool and ToolSource.  registry: names of tools and call formats.  load: from settings to tools; a typed
function is one.  schemas: a function as a schema, and arguments checked against a schema.  toolbox: a run's tools, and one
episode's use of them.  calculator, python, mcp: the tools that come with rlhub; python_child is the program in which a model's
Python code runs. formats: tool calls read from a reply.  call_streams: the same while the reply is being written.
"""
