"""The command line of every main: `run(ConfigClass, "yaml_name", main, description=...)`.

Help must be instant and errors must be readable, so the parser is our own, and Hydra only composes the configuration.
`--cfg job` prints the configuration of a run as YAML, without secrets; `--help` lists all settings with default, meaning and
type.
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
import textwrap
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

from rlhub.config import load
from rlhub.config.compose import example_names, is_ours
from rlhub.config.rules import checks, effects
from rlhub.config.rules.derive import derive
from rlhub.config.schema import describe, leaves, scalar, sections, to_dict
from rlhub.errors import ConfigError, DataError, NonFiniteError, ResourceError, RlhubError, WorkerError
from rlhub.utils.redact import redact

_WIDTH = 130


def to_yaml(config: Any) -> str:
    """Returns the whole configuration as YAML; values that look like secrets (in `ray_init`, ...) are blanked."""
    import yaml  # takes an eighth of the time that --help may take

    return str(yaml.safe_dump(redact(to_dict(config)), sort_keys=False, allow_unicode=True, width=_WIDTH))


def settings(cls: type) -> str:
    """Returns the list of all settings of a config class, grouped by section: name, default, meaning, type."""
    lines: list[str] = []
    group = None
    for leaf in leaves(cls):
        section, _, name = leaf.key.rpartition(".")
        if section != group:
            lines += ["", f"{section}." if section else "(top level)"]
            group = section
        text = f"{leaf.doc} [{describe(leaf.annotation)}]"
        left = f"  {name} = {scalar(leaf.default)}"
        lines += textwrap.wrap(text, _WIDTH, initial_indent=left.ljust(43) + " ", subsequent_indent=" " * 44)
    return "\n".join(lines)


C = TypeVar("C")

TEXT_WIDTH = 120
EXIT_FAILURE = 1
EXIT_USAGE = 2  # as argparse and most shells' tools: the command, not the program, is at fault
EXIT_INTERRUPTED = 130  # 128 + SIGINT, as a shell says it

Preflight = Callable[[C, frozenset[str]], list[str]]
"""(derived configuration, keys that the user set) -> problems.  It must neither load torch nor start a process."""
Ready = Callable[[C], list[str]]
"""(checked configuration) -> problems of this machine's accounts, such as a missing login.  It runs after all other checks."""

_USAGE = """\
Settings are given as key=value{example}
(+key=value and ++key=value mean the same).  A YAML file of your own: --config-dir DIR --config-name NAME; to build on ours
start it with `defaults: [{name}, _self_]`.  --config-path means the same as --config-dir, but where the file is ours it may
name a folder that is not here.  Without data or model of your own: bash scripts/quickstart.sh{machines}"""
_EXAMPLE = ", for example\n  data.train_files=train.parquet data.val_files=[a.parquet,b.jsonl] trainer.total_epochs=3"
"""The example in the usage of mains that train; a main without data has one in its description."""
_MACHINES = "Starting points for real machines, with the reason for every line: --config-name=NAME, of "


def run(
    config_class: type[C],
    config_name: str,
    main: Callable[[C], int | None],
    *,
    description: str,
    preflight: Preflight[C] | None = None,
    ready: Ready[C] | None = None,
    required: Sequence[str] | None = None,
    plan: Callable[[C], str] | None = None,
    argv: Sequence[str] | None = None,
) -> int:
    """Parses `argv` (None: the process's own), builds and checks the configuration, and calls `main(config)`.

    required: settings that must be given; None: those that training needs.  plan: describes what a configuration would run, for
    `--dry-run`; None: there is no such option.
    Returns the exit status: main's (None is 0), or after printing the error 2 for a problem of configuration, data or resources,
    also where a worker found it, 1 for any other error of rlhub (a worker's has its remote traceback), and 130 for a Ctrl-C that
    stops at once.
    """
    given = sys.argv[1:] if argv is None else argv
    arguments = _parse(config_name, description, given, config_class, has_plan=plan is not None)
    if isinstance(arguments, int):
        return arguments
    _configure_logging()
    try:
        config = prepare(
            config_class,
            arguments.config_name,
            arguments.overrides,
            config_dir=arguments.config_dir or _folder_here(arguments.config_path, arguments.config_name),
            preflight=preflight,
            required=required,
            only_show=arguments.cfg is not None,
        )
        if arguments.cfg is not None:
            _write(to_yaml(config))
            return 0
        if plan is not None and arguments.dry_run:
            _write(plan(config))
            return 0
        if ready is not None and (lacking := ready(config)):
            raise ConfigError(lacking)
        if arguments.check:
            _write("ok: every check before the start passes\n")
            return 0
        return main(config) or 0
    except RlhubError as error:
        logging.getLogger(__name__).debug("stopped", exc_info=True)
        fault = _at_fault(error)
        sys.stderr.write(f"error: {fault}\n")
        return EXIT_USAGE if isinstance(fault, ConfigError | DataError | ResourceError) else EXIT_FAILURE
    except KeyboardInterrupt:  # a request of the user's, for which a traceback is no help
        sys.stderr.write("interrupted\n")
        return EXIT_INTERRUPTED


def _folder_here(folder: str | None, config_name: str) -> str | None:
    """Returns `--config-path`, or None where that folder does not exist and `trainer_configs` has a file of the name."""
    if folder is None or Path(folder).is_dir() or not is_ours(config_name):
        return folder
    logging.getLogger(__name__).info("--config-path %s: not here, --config-name %s means rlhub's own", folder, config_name)
    return None


def _at_fault(error: RlhubError) -> BaseException:
    """Returns the error that a worker raised about a setting, data or weights, without its traceback; else `error` itself."""
    cause = error.__cause__
    return cause if isinstance(error, WorkerError) and isinstance(cause, ConfigError | DataError | NonFiniteError) else error


def prepare(
    config_class: type[C],
    config_name: str,
    overrides: Sequence[str] = (),
    *,
    config_dir: str | None = None,
    preflight: Preflight[C] | None = None,
    required: Sequence[str] | None = None,
    only_show: bool = False,
) -> C:
    """Returns the loaded, derived and checked configuration, and warns about settings without effect.

    Raises ConfigError with all problems.  only_show: incomplete or inconsistent settings are no error.
    """
    logger = logging.getLogger(__name__)
    loaded = load.collect(config_class, config_name, overrides, config_dir=config_dir)
    derive(loaded.config)
    if only_show:
        if loaded.problems:
            raise ConfigError(loaded.problems)
        return loaded.config
    found = checks.check_required(loaded.config, checks.REQUIRED.get(config_class, ()) if required is None else required)
    found += checks.check(loaded.config)
    if preflight is not None:
        found += preflight(loaded.config, loaded.set_keys)
    problems = loaded.problems + [text for text in found if not any(key in text for key in loaded.faulty)]
    for warning in [*loaded.notes, *effects.without_effect(loaded.config, loaded.set_keys)]:
        logger.warning(warning)
    if problems:
        raise ConfigError(problems)
    return loaded.config


def _parse(
    config_name: str, description: str, argv: Sequence[str], config_class: type, *, has_plan: bool
) -> argparse.Namespace | int:
    parser = argparse.ArgumentParser(
        prog=_program(),
        description=textwrap.fill(description, TEXT_WIDTH),
        add_help=False,
        usage=f"%(prog)s [--help] [--cfg job | --check{' | --dry-run' * has_plan}] [--config-dir DIR] [--config-name NAME] "
        "[key=value ...]",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog=_USAGE.format(
            name=config_name, example=_EXAMPLE if _has_section(config_class, "data") else "", machines=_machines(config_class)
        ),
    )
    parser.add_argument("-h", "--help", action="store_true", help="all settings with their defaults and meaning")
    parser.add_argument("-c", "--cfg", choices=("job",), help="print the configuration this command would run with, and stop")
    parser.add_argument("--check", action="store_true", help="say all that is wrong with this command, or ok; start nothing")
    if has_plan:
        parser.add_argument("--dry-run", action="store_true", help="check, show the step as a graph and its roles; start nothing")
    parser.add_argument("-cd", "--config-dir", metavar="DIR", help="a folder of your own YAML files")
    parser.add_argument("-cp", "--config-path", metavar="DIR", help="the same, but passed over if it is not here and not needed")
    name_help = f"which YAML file to start from (default {config_name})"
    parser.add_argument("-cn", "--config-name", metavar="NAME", default=config_name, help=name_help)
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="settings")
    try:
        arguments = parser.parse_intermixed_args(argv)
    except SystemExit as stop:  # argparse has printed what is wrong
        return stop.code if isinstance(stop.code, int) else EXIT_USAGE
    if arguments.help:
        _write(f"{parser.format_help()}\n\nAll settings (name = default, meaning, [type]):\n{settings(config_class)}\n")
        return 0
    return arguments


def _has_section(config_class: type, name: str) -> bool:
    return any(key == name for key, _ in sections(config_class))


def _machines(config_class: type) -> str:
    """Returns the list of examples in trainer_configs, which are all configurations of a policy and its rollout."""
    if not _has_section(config_class, "actor_rollout_ref"):
        return ""
    names = textwrap.fill(_MACHINES + ", ".join(example_names()), TEXT_WIDTH, break_on_hyphens=False)
    return f"\n{names}"


def _program() -> str | None:
    """Returns `python -m package.module` where the program was called so; None: argparse finds the name."""
    spec = sys.modules["__main__"].__spec__
    return f"python -m {spec.name}" if spec is not None else None


def _write(text: str) -> None:
    """Writes to standard output; a reader that closes the pipe early (`--help | head`) is no error."""
    try:
        sys.stdout.write(text)
        sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or Python complains once more when it exits


def _configure_logging() -> None:
    """Sends warnings and progress to stderr, unless the embedding program has configured logging."""
    if not logging.getLogger().handlers:
        logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s", datefmt="%H:%M:%S")
