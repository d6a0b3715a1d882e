"""Typed configuration: one file of dataclasses per section, and the loader that fills them from YAML and the command line.

sections/    the settings, their defaults and their documentation
rules/       derived settings, and the rules between settings
schema.py    the types of settings, with their ranges
compose.py   YAML files and overrides, composed with Hydra
load.py      the typed configuration, with all problems at once
aliases/     keys and values of other frameworks' command lines
cli.py       the command line of every main
devices.py   this machine's GPUs
names.py     what users name: registered parts, and classes and functions by file or module, whose source is parsed and not run

Nothing here imports torch or ray, and Hydra is imported only when a configuration is composed: `--help` and the checks before the
start must be quick, and must work where the heavy packages are broken.
"""
