"""Episodes in environments of the library verifiers, which runs in a Python of its own: its requirements disagree with rlhub's.

workflow.py    the episode: a session at the endpoint, and the environment's rewards
process.py     the process with the environments as rlhub sees it
child.py       the program in that process; it imports verifiers, and of rlhub only what needs nothing but the standard library
rlhub_chat.py  the harness of roles that name none: a conversation with tools, without a program of its own
export.py      the tasks of an environment as rows of a parquet file
"""
