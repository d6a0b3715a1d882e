"""This job's copy of the weights that the server is to run, and the folder through which it gets them.

<folder>/<name>-<version>/   a Hugging Face folder, as any server loads it; made under another name and renamed

Engines at one server share the name, and write one after the other (`weights_lock`).
"""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path

from torch import Tensor

from rlhub.checkpoint.hf import write_hf_weights
from rlhub.engines.rollout.base import WeightBucket, apply_buckets
from rlhub.models.shape import read_model_shape
from rlhub.protocol.weights.fingerprint import combine, fingerprint
from rlhub.protocol.weights.pieces import Piece, whole_piece
from rlhub.utils.atomic import TEMPORARY_SUFFIX

KEPT_VERSIONS = 2  # the server may still be reading the one before
HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"


class Staging:
    """The copy of one engine.  name: of the server's folders among those of others.  model: the folder whose configuration goes
    with the weights."""

    def __init__(self, folder: Path, name: str, model: str | None) -> None:
        self._folder, self._name = folder, name
        self._model = Path(model) if model is not None and Path(model).is_dir() else None
        self.weights: dict[str, Tensor] = {}

    def take(self, buckets: Iterable[WeightBucket]) -> None:
        """Keeps a whole stream; the first says which weights the model has."""
        if self.weights:
            apply_buckets(buckets, self.weights, self._copy)
            return
        for bucket in buckets:
            self.weights.update({name: tensor.detach().cpu().clone() for name, tensor in bucket})

    def _copy(self, bucket: WeightBucket) -> None:
        for name, tensor in bucket:
            self.weights[name].copy_(tensor)

    def fingerprint(self) -> str:
        """Returns the fingerprint of the weights as they are now."""
        return combine((name, fingerprint(tensor)) for name, tensor in self.weights.items())

    def pieces(self) -> Iterator[Piece]:
        for name, tensor in self.weights.items():
            yield whole_piece(name, tensor)

    def write(self, version: int) -> Path:
        """Writes a folder with the weights as they are now; older ones are removed, and later ones, from before a run was
        resumed."""
        final = self._folder / f"{self._name}-{version}"
        aside = self._folder / f"{self._name}-{version}{TEMPORARY_SUFFIX}"
        shutil.rmtree(aside, ignore_errors=True)
        aside.mkdir(parents=True)
        if self._model is not None and (self._model / "config.json").is_file():
            shutil.copyfile(self._model / "config.json", aside / "config.json")
        write_hf_weights(aside, [list(self._named().items())])
        shutil.rmtree(final, ignore_errors=True)
        aside.rename(final)
        versions = self._versions()
        kept = [number for number in versions if number <= version][-KEPT_VERSIONS:]
        for other in set(versions) - set(kept):
            shutil.rmtree(self._folder / f"{self._name}-{other}", ignore_errors=True)
        return final

    def _named(self) -> dict[str, Tensor]:
        """Returns the weights, a tied head too: vLLM on CPU packs it apart from the embedding, and keeps the old one if it is
        not named."""
        tied = HEAD not in self.weights and EMBEDDING in self.weights and self._is_tied()
        return {**self.weights, HEAD: self.weights[EMBEDDING]} if tied else self.weights

    def _is_tied(self) -> bool:
        return self._model is not None and read_model_shape(self._model).tied

    def _versions(self) -> list[int]:
        numbers = (path.name.removeprefix(f"{self._name}-") for path in self._folder.glob(f"{self._name}-*"))
        return sorted(int(number) for number in numbers if number.isdigit())
