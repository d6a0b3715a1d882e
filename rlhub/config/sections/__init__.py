"""The sections of a configuration: a dataclass each, whose fields hold the only defaults and whose docstrings are `--help`."""
