"""Exports a checkpoint as a Hugging Face model: finds the checkpoint, verifies its files, and renames the folder when it is done.

A worker in this process reads and writes the weights (`rlhub.workers.export`).
"""

from __future__ import annotations

import dataclasses
import logging
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from rlhub.checkpoint.files import FileEntry, storage_errors
from rlhub.checkpoint.manifest import MANIFEST, Manifest, problems_in, read_manifest
from rlhub.checkpoint.store import CheckpointStore
from rlhub.config.sections.export import ExportConfig
from rlhub.config.sections.training import ModelConfig
from rlhub.errors import CheckpointError, ConfigError
from rlhub.single_controller import ClassWithInitArgs, LaunchOptions, launch
from rlhub.tracking.run_folder import RunFolder
from rlhub.workers.base import ADAPTER_FOLDER, HF_FOLDER
from rlhub.workers.export import ExportJob, ExportWorker, Verification

logger = logging.getLogger(__name__)

GIB = 1 << 30
POLICY_ROLES = ("actor", "model")
MODEL_SECTIONS = {
    "actor": (("actor_rollout_ref", "model"),),
    "critic": (("critic", "model"), ("actor_rollout_ref", "model")),
    "model": (("model",),),
}
"""Keys under which a run's config.yaml names the model of a role; the first that is set counts."""


def export(config: ExportConfig) -> int:
    """Writes the model, verifies it if config.verify, renames the folder to config.output, and returns the exit status.

    Where the verification fails, the folder keeps its temporary name next to config.output, for people to look at.
    """
    assert config.checkpoint is not None and config.output is not None, "checked when the configuration is loaded"
    checkpoint = find_checkpoint(config, Path(config.checkpoint))
    folder = _role_folder(config, checkpoint)
    _check_whole(checkpoint, folder)
    output = Path(config.output).absolute()
    aside = output.with_name(f".exporting_{output.name}")
    with storage_errors(f"making {aside}"):
        shutil.rmtree(aside, ignore_errors=True)
        aside.mkdir(parents=True)
    job = ExportJob(
        folder=folder,
        output=aside,
        model=_model(config, checkpoint, folder),
        dtype=config.dtype,
        max_shard_bytes=int(config.max_shard_gb * GIB),
    )
    logger.info("exporting %s", folder)
    with launch({"export": ClassWithInitArgs(ExportWorker, job)}, LaunchOptions(backend="local")) as launched:
        worker = launched.groups["export"]
        (written,) = worker.write()
        if config.verify and not _passed(worker.verify()[0]):
            logger.error("the export does not agree with the checkpoint; what was written is in %s", aside)
            return 1
    with storage_errors(f"naming {output}"):
        os.rename(aside, output)
    logger.info("%d weights, %.2f GiB of %s: %s", written.num_tensors, written.num_bytes / GIB, written.dtype, output)
    return 0


def _passed(verification: Verification) -> bool:
    """Logs the result of a verification, and returns True when export and checkpoint agree."""
    logger.info(
        "largest difference of %s over %d tokens: %.3g (allowed: %.3g)",
        verification.compared,
        verification.num_tokens,
        verification.difference,
        verification.allowed,
    )
    if verification.first_difference is not None:
        logger.error("first differing weight: %s", verification.first_difference)
        return False
    logger.info("all %d weights are the checkpoint's", verification.num_weights)
    return verification.difference <= verification.allowed


def find_checkpoint(config: ExportConfig, path: Path) -> Path:
    """Returns the checkpoint's folder, which has the manifest.

    Raises CheckpointError where `path` has no checkpoint, and ConfigError, which names the steps there are, for a wrong step.
    """
    if (path / MANIFEST).exists():
        if config.step != "latest":
            raise ConfigError(f"step: {path} is one checkpoint; leave step out, or name the run folder above it")
        return path
    store = CheckpointStore(path)
    steps = store.steps()
    if not steps:
        raise CheckpointError(f"{path}: no checkpoint with a {MANIFEST} here; name a run folder or one of its checkpoints")
    if config.step == "latest":
        return store.folders()[0]
    step = _best(config, store, steps) if config.step == "best" else config.step
    if step not in steps:
        raise ConfigError(f"step: {path} has no checkpoint of step {step}; it has {', '.join(map(str, steps))}")
    return store.folder(step)


def _best(config: ExportConfig, store: CheckpointStore, steps: list[int]) -> int:
    """Returns the step whose checkpoint has the best value of config.best_metric, or else of the run's trainer.keep_best."""
    metric = config.best_metric or (_run_config(store.root).get("trainer") or {}).get("keep_best")
    known = sorted(
        {name for step in steps for name in read_manifest(store.folder(step)).metrics if name.startswith(("val/", "val-core/"))}
    )
    has = f"its checkpoints have {', '.join(known) or 'no validation metrics'}"
    if metric is None:
        raise ConfigError(f"best_metric: {store.root} names no trainer.keep_best, so say which metric; {has}")
    step = store.best(metric)
    if step is None:
        raise ConfigError(f"best_metric: no checkpoint of {store.root} has {metric!r}; {has}")
    return step


def _role_folder(config: ExportConfig, checkpoint: Path) -> Path:
    """Returns the checkpoint's folder of the role to export."""
    there = sorted(path.name for path in checkpoint.iterdir() if path.is_dir())
    wanted = (config.role,) if config.role else POLICY_ROLES
    for role in wanted:
        if role in there:
            return checkpoint / role
    raise ConfigError(f"role: {checkpoint} has {', '.join(there) or 'no folders'}, not {' or '.join(wanted)}")


def _check_whole(checkpoint: Path, folder: Path) -> None:
    """Compares the checksums of the shards, and raises CheckpointError where they differ.

    The checkpoint's copy of the weights in Hugging Face's form is not read, and may be damaged or missing.
    """
    manifest = read_manifest(checkpoint)
    needed = [entry for entry in manifest.files if _is_state(entry, folder.name)]
    logger.info("checking %.2f GiB of shards against their checksums", sum(entry.size for entry in needed) / GIB)
    if found := problems_in(checkpoint, dataclasses.replace(manifest, files=needed), verify=True):
        others = [path.name for path in CheckpointStore(checkpoint.parent).folders() if path.name != checkpoint.name]
        instead = f"export another: {', '.join(others)}" if others else "there is no other checkpoint beside it"
        raise CheckpointError(f"{checkpoint} is damaged: {'; '.join(found)}; {instead}")


def _is_state(entry: FileEntry, role: str) -> bool:
    """Returns True for a shard of the role's model or of its adapters."""
    parts = Path(entry.path).parts
    return parts[0] == role and (len(parts) == 2 or parts[1] == ADAPTER_FOLDER)


def _model(config: ExportConfig, checkpoint: Path, folder: Path) -> ModelConfig:
    """Returns the model whose configuration and tokenizer are exported.

    It is the one that the user names, else the checkpoint's own copy where it is whole, else the model of the run.
    """
    trusted, copy = config.trust_remote_code, folder / HF_FOLDER
    if config.model_path is not None:
        return ModelConfig(path=config.model_path, trust_remote_code=trusted)
    if (copy / "config.json").is_file() and not problems_in(checkpoint, _sidecars(checkpoint, folder.name), verify=True):
        return ModelConfig(path=str(copy), trust_remote_code=trusted)
    run = _run_config(checkpoint.parent)
    for keys in MODEL_SECTIONS[folder.name]:
        section: Any = run
        for key in keys:
            section = (section or {}).get(key)
        if section and section.get("path"):
            overrides = dict(section.get("override_config") or {})
            return ModelConfig(path=str(section["path"]), override_config=overrides, trust_remote_code=trusted)
    raise ConfigError(
        f"model_path is not set, and neither {copy} has a whole configuration and tokenizer nor {checkpoint.parent}/config.yaml "
        "names the model; name the model the run started from"
    )


def _sidecars(checkpoint: Path, role: str) -> Manifest:
    """Returns the manifest of the small files that are next to the Hugging Face weights."""
    manifest = read_manifest(checkpoint)
    return dataclasses.replace(manifest, files=list(_small_files(manifest, f"{role}/{HF_FOLDER}/")))


def _small_files(manifest: Manifest, prefix: str) -> Iterator[FileEntry]:
    for entry in manifest.files:
        if entry.path.startswith(prefix) and not entry.path.endswith((".safetensors", ".safetensors.index.json")):
            yield entry


def _run_config(run: Path) -> dict[str, Any]:
    """Returns the run's settings from its config.yaml; {} where there is none."""
    path = RunFolder(run).config
    if not path.is_file():
        return {}
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise CheckpointError(f"{path} cannot be read ({error}); set model_path or move the file away") from error
    return content if isinstance(content, dict) else {}
