"""Typed configuration: one dataclass file per section, and the loader that fills them from YAML and the command line.

Nothing here imports torch or ray, and Hydra only when a configuration is composed: `--help` and the checks before start
must be quick, and must work where the heavy packages are broken.
"""
