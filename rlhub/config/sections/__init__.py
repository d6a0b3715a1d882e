"""The sections of a configuration.  Each is a dataclass whose fields hold the only defaults and whose docstrings are `--help`."""
