"""Where the YAML files are: beside the package in a source tree, inside it in a wheel."""

from __future__ import annotations

from pathlib import Path

from rlhub.errors import ConfigError


def config_dir() -> Path:
    """The folder `trainer_configs`."""
    package = Path(__file__).resolve().parents[1]
    for place in (package / "trainer_configs", package.parent / "trainer_configs"):
        if (place / "ppo.yaml").is_file():
            return place
    raise ConfigError(f"no trainer_configs folder in {package} or beside it; the installation is incomplete, install rlhub again")


def example_names() -> list[str]:
    """Returns the names of the starting points for real machines, as --config-name takes them."""
    folder = config_dir()
    return sorted(path.relative_to(folder).with_suffix("").as_posix() for path in folder.glob("examples/*.yaml"))


def is_ours(config_name: str) -> bool:
    """Whether `trainer_configs` has a file of that name, with or without .yaml."""
    return (config_dir() / f"{config_name.removesuffix('.yaml')}.yaml").is_file()
