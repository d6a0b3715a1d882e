"""The mathematics of policy optimisation as pure functions of tensors: one file an algorithm, its knobs and its paper.

Importing this package loads no torch; `registry` lists what there is, the other modules hold the formulas.
"""
