"""The weights that a loaded model must have: every engine checks them here, before it reads a weight and after.

transformers fills weights that a folder lacks with random numbers and skips those it does not know, with a report in the log.
Here both are errors.  A folder may lack tied weights, which are stored once, and the scalar head of a value or reward model
that begins as a language model.  It may also have the head of another kind of model, and the tensors that the architecture
itself declares unused.
"""

from __future__ import annotations

import logging
import pickle
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.utils.logging import disable_progress_bar

from rlhub.errors import ConfigError
from rlhub.models.experts import DOWN, GATE_UP, unfused_tensors
from rlhub.models.shape import CLASSIFIER, POLICIES, SCALAR_HEAD, ModelKind
from rlhub.models.weight_files import StoredTensor, stored_tensors
from rlhub.protocol.weights.fingerprint import nonfinite_names

HEADS = ("lm_head.", f"{SCALAR_HEAD}.", "v_head.")
"""The prefixes of the names of heads; a model of one kind ignores the heads of the others."""
MAX_LISTED = 6
"""The most tensors that an error lists for each fault."""
REMEDY = "name the folder of a whole model, or copy it again"


def load_checked(loader: Any, path: str, config: PreTrainedConfig, kind: ModelKind, **options: Any) -> PreTrainedModel:
    """Returns `loader.from_pretrained(...)`.  Raises ConfigError unless the model has all its weights, in their shapes and
    finite."""
    trusted = {"trust_remote_code": options.get("trust_remote_code", False)}
    check_files(loader, path, config, kind, **trusted)
    with _without_report():
        model: PreTrainedModel = loader.from_pretrained(path, config=config, **options)
    refuse_nonfinite(path, unfused_tensors(model.named_parameters()))
    return model


def check_files(loader: Any, path: str, config: PreTrainedConfig, kind: ModelKind, **options: Any) -> None:
    """Compares the files' names and shapes with the model's, without reading a weight.

    Models without a transformers class, and quantized ones, whose files have other names, are left to their engines.  Raises
    ConfigError naming tensors and files.
    """
    values = config.to_dict()
    if not (type(config) in loader._model_mapping or values.get("auto_map")) or values.get("quantization_config"):
        return
    stored = stored_tensors(Path(path).expanduser()) if Path(path).expanduser().is_dir() else {}
    try:
        with _without_report():
            _, info = loader.from_pretrained(
                path, config=config, device_map="meta", ignore_mismatched_sizes=True, output_loading_info=True, **options
            )
    except (OSError, ValueError, RuntimeError, SafetensorError, pickle.UnpicklingError, EOFError) as error:
        _refuse(path, _differences(loader, config, stored, kind))
        raise ConfigError(f"the weights of {path!r} cannot be loaded: {error}; {REMEDY}") from error
    mismatched = {name: f"{tuple(found)}, not {tuple(wanted)}" for name, found, wanted in info["mismatched_keys"]}
    faults = _faults(config, kind, info["missing_keys"], info["unexpected_keys"], mismatched, stored)
    if any(name.endswith((GATE_UP, DOWN)) for name in (*info["missing_keys"], *mismatched)):
        faults = _differences(loader, config, stored, kind) or faults
    _refuse(path, faults)


def refuse_nonfinite(path: str, named: Iterable[tuple[str, Tensor]]) -> None:
    """Raises ConfigError for weights of the model that are NaN or infinite, by their names in its files."""
    found = nonfinite_names(named)
    if not found:
        return
    stored = stored_tensors(Path(path).expanduser()) if Path(path).expanduser().is_dir() else {}
    raise ConfigError(f"weights of {path!r} are not finite: {_listed(found, stored)}; take an earlier copy of the model")


def _faults(
    config: PreTrainedConfig,
    kind: ModelKind,
    missing: Iterable[str],
    unexpected: Iterable[str],
    mismatched: Mapping[str, str],
    stored: Mapping[str, StoredTensor],
) -> list[str]:
    """Returns the faults as sentences."""
    new_head = kind not in POLICIES and not any(name.endswith(CLASSIFIER) for name in config.architectures or ())
    lacking = sorted(name for name in missing if not (new_head and name.startswith(f"{SCALAR_HEAD}.")))
    unknown = sorted(name for name in unexpected if not name.startswith(HEADS))
    shapes = [f"{name} is {shape} as config.json says" for name, shape in sorted(mismatched.items())]
    faults = {
        "it lacks": _listed(lacking, {}),
        "it has other shapes:": _listed(shapes, {}),
        f"{config.model_type} has no": _listed(unknown, stored),
    }
    return [f"{what} {names}" for what, names in faults.items() if names]


def _differences(loader: Any, config: PreTrainedConfig, stored: Mapping[str, StoredTensor], kind: ModelKind) -> list[str]:
    """Returns the faults by the names in the files, for models in which transformers fuses the experts of a layer."""
    if not stored:
        return []
    with torch.device("meta"):
        model = loader.from_config(config)
    wanted = {name: tuple(tensor.shape) for name, tensor in unfused_tensors(model.named_parameters())}
    mismatched = {
        name: f"{stored[name].shape}, not {shape}"
        for name, shape in wanted.items()
        if name in stored and stored[name].shape != shape
    }
    ignored = [*(model._keys_to_ignore_on_load_unexpected or ()), "inv_freq"]
    unexpected = [name for name in stored if name not in wanted and name not in model.all_tied_weights_keys]
    unexpected = [name for name in unexpected if not any(re.search(pattern, name) for pattern in ignored)]
    missing = [name for name in wanted if name not in stored]
    return _faults(config, kind, missing, unexpected, mismatched, stored)


def _refuse(path: str, faults: list[str]) -> None:
    if faults:
        raise ConfigError(f"the weights in {path!r} are not those of the model in its config.json: {'; '.join(faults)}; {REMEDY}")


def _listed(names: list[str], stored: Mapping[str, StoredTensor]) -> str:
    """Lists the first few names, with their files if these are known, and the number of the others."""
    shown = [f"{name} ({stored[name].file})" if name in stored else name for name in names[:MAX_LISTED]]
    return ", ".join(shown) + (f" and {len(names) - MAX_LISTED} more" if len(names) > MAX_LISTED else "")


@contextmanager
def _without_report() -> Iterator[None]:
    """Silences transformers' progress bars and its table of the weights that it draws itself, which are errors here."""
    disable_progress_bar()
    logger = logging.getLogger("transformers")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)
