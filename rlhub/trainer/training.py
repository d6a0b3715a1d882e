"""A training job from its data to its exit status, the same for every trainer.

Before any worker starts, `check_resume` compares the configuration with the checkpoint from which the run would resume.  Training
engines load the tensors that were saved, and those fit no other adapters, sizes or dtypes.  The settings on which the tensors
depend are in the checkpoint's own state, so that the comparison also works for a checkpoint of another run folder.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Protocol, TypeVar

from rlhub.checkpoint.store import Checkpoint, CheckpointStore
from rlhub.config.rules.asynchronous import is_async
from rlhub.config.rules.engines import ONLY_ROLE, Engine, engines
from rlhub.config.schema import to_dict
from rlhub.config.sections.ppo import PPOConfig
from rlhub.config.sections.preference import DPOConfig, RMConfig
from rlhub.config.sections.sft import SFTConfig
from rlhub.config.sections.training import FSDPConfig, MegatronConfig, Section
from rlhub.data.order import ResumableLoader
from rlhub.errors import ClusterLostError, ConfigError
from rlhub.models.shape import ModelShape, read_model_shape
from rlhub.single_controller.world import World, current_world
from rlhub.tracking.recorder import Recorder
from rlhub.tracking.tracker import GenerationRow, Metrics, Status
from rlhub.trainer.ppo.requirements import requirements
from rlhub.trainer.ppo.sync_source import PROMPTS_IN_WORK, STREAMED
from rlhub.trainer.ppo.worker_groups import ACTOR_ROLE, CRITIC_ROLE
from rlhub.trainer.preflight.weights import check_model_weights
from rlhub.trainer.run import Run
from rlhub.utils import faults
from rlhub.workers.base import HF_FOLDER

logger = logging.getLogger(__name__)


TrainingConfig = PPOConfig | SFTConfig | DPOConfig | RMConfig

RESUME_RECORD = "made_with"
"""Key of a checkpoint's state with the `resume_record` of the run that saved it.  A checkpoint without it is not compared."""
EXTRAS = "data_extras"
"""Key of a checkpoint's state with the loader's extras_fingerprint."""
FILES = "files"
"""Key of a `resume_record` with the hashes of the user's own files, by the setting that names each."""
REMEDY = (
    "To go on with that run set it back; for a new run set trainer.experiment_name or trainer.default_local_dir to another name, "
    "or trainer.resume_mode=disable (the old run is moved aside)"
)
NOT_COMPARED = {"mlp_columns", "max_positions", "tied"}
"""Fields of a model's shape that follow from others, change no tensor, or are in a copy's config.json only where unusual."""


class Trainer(Protocol):
    """A trainer with its workers started."""

    def fit(self) -> int:
        """Trains to the end, or to a stop signal, and returns the last step taken."""
        ...


class TrainingData(Protocol):
    """The driver's data.  total_steps: training steps of the whole run, which follow from the data and the configuration."""

    @property
    def loader(self) -> ResumableLoader: ...

    @property
    def total_steps(self) -> int: ...


C = TypeVar("C", bound="TrainingConfig")
D = TypeVar("D", bound=TrainingData)


def train(config: C, data: D, build: Callable[[C, D, Run, ExitStack], Trainer]) -> int:
    """Opens the run, builds the trainer, trains, and returns the exit status (128 + signal when stopped by one).

    A run that is finished already starts no process and logs what the user can do.  Raises ConfigError, before any process
    starts, for a run that cannot resume from its checkpoint.
    """

    def check(checkpoint: Checkpoint) -> None:
        check_resume(config, checkpoint)
        if checkpoint.step < data.total_steps:
            for text in changed_inputs(config, checkpoint, data.loader.extras_fingerprint):
                logger.warning(text)
            data.loader.load_state(checkpoint.state["loader"])  # raises where the position is one in other data

    run_class = Run if current_world() is None else SharedRun
    resolved: dict[str, Any] = to_dict(config)
    record = {RESUME_RECORD: resume_record(config), EXTRAS: data.loader.extras_fingerprint}
    with ExitStack() as stack:
        run = stack.enter_context(run_class(config.trainer, resolved, data.total_steps, record=record, check=check))
        if run.already_finished:
            logger.warning(run.already_finished)
            return 0
        check_model_weights(config)
        trainer = build(config, data, run, stack)
        run.start()
        try:
            last = trainer.fit()
        except ClusterLostError as error:
            run.finish("failed", str(error))  # at once: Ray ends this process a minute after its cluster was lost
            raise
        logger.info("step %d of %d done; run folder %s, report %s", last, data.total_steps, run.folder.path, run.folder.report)
        return run.signals.exit_code


class SharedRun(Run):
    """The run on one of the ranks that all run the loop: rank 0 reads and writes the run folder, and the others follow it."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        world = current_world()
        assert world is not None, "it is made inside `joined`"
        self.world = world
        self.store = SharedStore(self.folder.path, world)

    def __enter__(self) -> Run:
        self.checkpoint = self.world.first(lambda: super(SharedRun, self).__enter__().checkpoint, "run.open")
        if self.world.rank > 0:
            self._plan_faults()
            faults.install(faults.installed(), rank=self.world.rank)
            self.signals.__enter__()
            if self.checkpoint is not None and self._check is not None:
                self._check(self.checkpoint)
        return self

    def start(self) -> None:
        if self.world.rank == 0:
            super().start()
        else:
            self.recorder = SilentRecorder(self.folder, self._info(), [])

    def write_graph(self, picture: str) -> None:
        if self.world.rank == 0:
            super().write_graph(picture)

    @property
    def stop_requested(self) -> bool:
        """True when a signal has asked any rank to stop; every rank asks at the same point."""
        received = [signal for signal in self.world.gather(self.signals.received, "run.stop") if signal is not None]
        self.signals.received = received[0] if received else None
        return bool(received)


class SharedStore(CheckpointStore):
    """The checkpoints as every rank uses them: rank 0 makes the folder, into which all write, and commits it."""

    def __init__(self, root: Path, world: World) -> None:
        super().__init__(root)
        self.world = world

    def begin(self, step: int) -> Path:
        return self.world.first(lambda: super(SharedStore, self).begin(step), "checkpoint.begin")

    def commit(self, *arguments: Any, **options: Any) -> Path:
        """Commits on rank 0; the others go on meanwhile."""
        return super().commit(*arguments, **options) if self.world.rank == 0 else self.folder(arguments[0])

    def retain(self, *arguments: Any, **options: Any) -> list[int]:
        return super().retain(*arguments, **options) if self.world.rank == 0 else []


class SilentRecorder(Recorder):
    """Records nothing: rank 0 does."""

    def log(self, step: int, metrics: Metrics) -> None:
        return

    def log_generations(self, step: int, split: str, rows: Sequence[GenerationRow]) -> None:
        return

    def phase(self, name: str) -> None:
        return

    def finish(self, status: Status, message: str = "", *, report: bool = True) -> None:
        return


def resume_record(config: TrainingConfig) -> dict[str, Any]:
    """Returns what a resumed run is compared with, for a checkpoint's state; JSON-able."""
    return {
        "trainer": _trainer(config),
        "models": {name: _as_dict(_model_record(engine)) for name, engine in _trained(config).items()},
        FILES: {key: _hash(path) for key, path in _own_files(config).items()},
    }


def check_resume(config: TrainingConfig, checkpoint: Checkpoint) -> None:
    """Raises ConfigError where settings do not fit the checkpoint; it names both values and the remedy."""
    found = list(_problems(config, checkpoint))
    if found:
        raise ConfigError([f"cannot go on from {checkpoint.path}: {'; '.join(found)}. {REMEDY}"])


def changed_inputs(config: TrainingConfig, checkpoint: Checkpoint, extras: str | None) -> list[str]:
    """Returns warnings about inputs that changed under the same name: the user's own files, and columns of the data that only
    rewards and workflows read.  extras: the loader's fingerprint of those columns."""
    before, now = checkpoint.state.get(RESUME_RECORD, {}).get(FILES, {}), _own_files(config)
    other = [
        f"{key}={path} is another file, or was edited" for key, path in now.items() if before.get(key, _hash(path)) != _hash(path)
    ]
    if extras is not None and checkpoint.state.get(EXTRAS, extras) != extras:
        other.append("extra_info or agent_name of rows in data.train_files changed")
    return [f"{text} since {checkpoint.path} was saved: the run goes on with what is there now" for text in other]


def _own_files(config: TrainingConfig) -> dict[str, Path]:
    """Returns the user's own files that decide what is learned, by the setting that names each."""
    if not isinstance(config, PPOConfig):
        return {}
    rollout, where = config.actor_rollout_ref.rollout, "actor_rollout_ref.rollout"
    named = {
        "custom_reward_function.path": config.custom_reward_function.path,
        "reward_model.judge.prompt_template": config.reward_model.judge.prompt_template,
        f"{where}.agent.default_agent_loop": (rollout.agent.default_agent_loop or "").rpartition(":")[0],
        f"{where}.multi_turn.tool_config_path": rollout.multi_turn.tool_config_path,
    }
    return {key: Path(text).expanduser() for key, text in named.items() if text and "\n" not in text and _is_file(text)}


def _is_file(text: str) -> bool:
    try:
        return Path(text).expanduser().is_file()
    except (OSError, ValueError, RuntimeError):  # a prompt's own text may be no path at all
        return False


def _hash(path: Path) -> str:
    return hashlib.blake2b(path.read_bytes(), digest_size=16).hexdigest()


def _problems(config: TrainingConfig, checkpoint: Checkpoint) -> Iterator[str]:
    """Yields the reasons why the run cannot resume from the checkpoint."""
    before = checkpoint.state.get(RESUME_RECORD, {})
    trainer, now = before.get("trainer"), _trainer(config)
    if trainer not in (None, now):
        yield f"it was saved by {trainer}, and this is {now}"
        return
    for folder, engine in _trained(config).items():
        place, recorded = checkpoint.path / folder, before.get("models", {}).get(folder)
        if not place.is_dir():
            yield _absent(folder, config)
        elif recorded is not None:
            yield from _differences(recorded, engine)
            yield from _other_shape(recorded, engine, place / HF_FOLDER)
    if isinstance(config, PPOConfig) and not (is_async(config) or config.trainer.replay_from) and STREAMED in checkpoint.state:
        yield PROMPTS_IN_WORK


def _trainer(config: TrainingConfig) -> str:
    """Returns the name of the job's command, for example "main_ppo"."""
    return f"main_{type(config).__name__.removesuffix('Config').lower()}"


def _trained(config: TrainingConfig) -> dict[str, Engine]:
    """Returns the engines that the job trains, by the folder of a checkpoint that has their state."""
    found = engines(config)
    if not isinstance(config, PPOConfig):
        return {ONLY_ROLE: found[0]}
    by_role = {engine.role: engine for engine in found}
    names = [ACTOR_ROLE, *([CRITIC_ROLE] if requirements(config).values else [])]
    return {name: by_role[name] for name in names}


@dataclass(slots=True, kw_only=True, frozen=True)
class ModelRecord:
    """The settings on which a model's tensors in a checkpoint depend.

    dtype: of the weights that the optimizer steps; None for an engine whose section does not name it.
    """

    path: str | None
    override_config: dict[str, Any]
    lora_rank: int
    lora_alpha: float
    target_modules: list[str]
    dtype: str | None


def _model_record(engine: Engine) -> ModelRecord:
    model = engine.role_model.model
    targets = [model.target_modules] if isinstance(model.target_modules, str) else sorted(model.target_modules)
    return ModelRecord(
        path=model.path,
        override_config=model.override_config,
        lora_rank=model.lora_rank,
        lora_alpha=float(model.lora_alpha),
        target_modules=targets,
        dtype=_stepped_dtype(engine.section),
    )


def _stepped_dtype(section: Section) -> str | None:
    """Returns the dtype of the weights that the optimizer steps: float32 with Megatron, whatever the model computes in."""
    if isinstance(section, MegatronConfig):
        return "fp32"
    return section.model_dtype if isinstance(section, FSDPConfig) else None


def _as_dict(made: ModelRecord) -> dict[str, Any]:
    return {item.name: getattr(made, item.name) for item in fields(made)}


def _absent(folder: str, config: TrainingConfig) -> str:
    """Returns the message for a checkpoint without the folder of a model that the job trains."""
    if isinstance(config, PPOConfig) and folder == CRITIC_ROLE:
        return f"it holds no critic, which algorithm.adv_estimator={config.algorithm.adv_estimator} trains"
    return f"it holds no {folder}, which {_trainer(config)} trains"


def _differences(before: Mapping[str, Any], engine: Engine) -> Iterator[str]:
    """Yields the adapters' settings and dtypes that differ; the adapters' settings count only where lora_rank is not 0."""
    now, key = _as_dict(_model_record(engine)), engine.role_model.model_key
    names = ["lora_rank"]
    if before.get("lora_rank") == now["lora_rank"] != 0:
        names += ["lora_alpha", "target_modules"]
    for name in names:
        if name in before and before[name] != now[name]:
            yield f"{key}.{name} was {_shown(before[name])} and is {_shown(now[name])} now"
    dtypes = (before.get("dtype"), now["dtype"])
    if None not in dtypes and dtypes[0] != dtypes[1]:
        yield f"{engine.key} keeps its weights in {dtypes[1]} now (model_dtype), and they were saved in {dtypes[0]}"


def _shown(value: Any) -> str:
    if isinstance(value, list):
        return value[0] if len(value) == 1 else f"[{','.join(map(str, value))}]"
    return f"{value:g}" if isinstance(value, float) else str(value)


def _other_shape(before: Mapping[str, Any], engine: Engine, saved: Path) -> Iterator[str]:
    """Yields the sizes that differ, where the model has another path or other entries of its configuration."""
    model = engine.role_model.model
    if (before.get("path"), before.get("override_config")) == (model.path, model.override_config):
        return
    try:
        old, new = read_model_shape(saved), read_model_shape(Path(model.path or "").expanduser(), model.override_config)
    except ConfigError:
        return  # a hub name, or a checkpoint of weights alone: the workers will compare them
    sizes = [item.name for item in fields(ModelShape) if item.name not in NOT_COMPARED]
    other = [f"{name} {getattr(old, name)} -> {getattr(new, name)}" for name in sizes if getattr(old, name) != getattr(new, name)]
    if other:
        was, now = before.get("path"), model.path
        yield f"{engine.role_model.model_key} is of another shape ({', '.join(other)}; path was {was} and is {now} now)"
