"""One training step as a graph: what it computes in which order follows from the columns that its nodes read and write.

columns.py     the vocabulary of columns
nodes.py       a node, and the edges that follow from what nodes read, write and train
conditions.py  when a node runs, as text
checks.py      all that can be wrong with nodes, found without importing what they name
graph.py       Pipeline, which declares nodes, and TaskGraph, the checked graph of one: begin here
builtin.py     ppo and its relatives, dapo, sft and dpo
load.py        pipelines by name, and those of the user's own
show.py        a graph as text, mermaid, JSON and SVG
executor.py    runs a graph, independent nodes at the same time
coordinator.py which rows a rank gets, where every rank runs the loop and roles have data-parallel sizes of their own

Declaring, checking and showing load no torch: all that nodes name is text.
"""
