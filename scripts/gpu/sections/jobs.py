"""Sections I and J: whole jobs.  A GRPO step of main_ppo against a bare loop, and the quickstart."""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import torch
from transformers import PreTrainedTokenizerFast

from recipes.arithmetic.build_model import build_tokenizer
from recipes.arithmetic.generate import write_data
from recipes.stages import CHECKPOINTED_MODEL
from recipes.tiny_qwen2 import write_model
from rlhub.engines.rollout.base import resolve_dtype
from rlhub.engines.rollout.vllm.environment import guarded_process
from scripts.gpu.baselines import BareModel, bare_generate
from scripts.gpu.engines import need_vllm, rollout_setup
from scripts.gpu.measure import Context, PartError, apart, settle
from scripts.gpu.models import model_folder, prompt_ids, shape
from scripts.gpu.reward import score

ROOT = Path(__file__).resolve().parents[3]
MODEL = "0.5B"
OVERHEAD = 1.05
"""The largest duration of a step of main_ppo, as a multiple of the bare loop's."""
STEPS, WARM_UP = 6, 2
"""Steps of each job, and how many of them do not count; nor does the last, which also saves."""
PASS_TOKENS = 16384
"""Tokens of a pass of the update, main_ppo's default on a GPU."""
QUICKSTART_STEPS, LEARNED = 60, 0.8
"""Steps of the quickstart, and the least share of right answers after them; 0.94 on two CPU ranks."""
PREPARED_STEPS = 400
"""The step of the warm start's checkpoint, the recipe's default."""


@dataclass(slots=True, kw_only=True, frozen=True)
class Batch:
    """The sizes of a GRPO step."""

    prompts: int
    samples: int
    prompt: int
    response: int


def batch_of(context: Context) -> Batch:
    """Returns the sizes of section I's step."""
    if context.small:
        return Batch(prompts=4, samples=4, prompt=8, response=16)
    return Batch(prompts=64, samples=8, prompt=128, response=256)


# --- I -----------------------------------------------------------------------------------------------------------------------


def grpo_step(context: Context) -> None:
    """Runs main_ppo in process, and a loop written by hand, and compares the seconds of a step."""
    with context.rows.trying(f"{MODEL}: GRPO step"):
        need_vllm()
        folder, batch = model_folder(context, MODEL), batch_of(context)
        data = write_prompts(context, batch)
        ours = our_steps(context, folder, batch, data)
        theirs = apart(bare_steps, context, folder, batch, limit_s=context.left_s)
        what = f"{MODEL}: GRPO step, {batch.prompts} x {batch.samples} samples of {batch.prompt} + {batch.response} tokens"
        step, bare = _medians(ours), _medians(theirs)
        parts = ", ".join(f"{name} {step[f'timing_s/{call}']:.3g}" for name, call in PARTS.items())
        note = f"{parts}; bare: {', '.join(f'{name} {value:.3g}' for name, value in bare.items() if name != 'step')}"
        context.rows.compare(what, step["timing_s/step"], "s", baseline=bare["step"], at_most=OVERHEAD, note=note)


PARTS = {
    "sync": "sync_weights",
    "generate": "generate_sequences",
    "reward": "take_outcomes",
    "advantages": "compute_advantages",
    "update": "update_actor",
}
"""Word of a note -> call whose seconds a run logs as timing_s/<call>."""


def _medians(steps: list[dict[str, float]]) -> dict[str, float]:
    """Returns the median of each figure over the steps that count."""
    counted = steps[WARM_UP:-1]
    return {name: statistics.median(step[name] for step in counted) for name in counted[0] if name in counted[-1]}


def write_prompts(context: Context, batch: Batch) -> Path:
    """Writes prompts of numbered words, each of exactly `batch.prompt` tokens."""
    vocabulary = int(shape(MODEL, small=context.small)["vocab_size"])  # type: ignore[call-overload]
    texts = [" ".join(f"w{number}" for number in ids) for ids in prompt_ids(batch.prompts * STEPS, batch.prompt, vocabulary)]
    rows = [
        {
            "prompt": text,
            "data_source": "acceptance",
            "reward_model": {"style": "rule", "ground_truth": ""},
            "extra_info": {"i": i},
        }
        for i, text in enumerate(texts)
    ]
    file = context.work / f"prompts{'-small' * context.small}.parquet"
    pq.write_table(pa.Table.from_pylist(rows), file)
    return file


def our_steps(context: Context, folder: Path, batch: Batch, data: Path) -> list[dict[str, float]]:
    """Runs main_ppo in a process of its own and returns its metrics, one mapping a step."""
    run = context.work / "grpo-step"
    model, rollout = "actor_rollout_ref.model", "actor_rollout_ref.rollout"
    settings = [
        f"data.train_files={data}",
        f"data.train_batch_size={batch.prompts}",
        f"data.max_prompt_length={batch.prompt}",
        f"data.max_response_length={batch.response}",
        "algorithm.adv_estimator=grpo",
        f"{model}.path={folder}",
        f"actor_rollout_ref.actor.ppo_mini_batch_size={batch.prompts}",
        f"{rollout}.name=vllm",
        f"{rollout}.n={batch.samples}",
        f"{rollout}.ignore_eos=True",
        f"custom_reward_function.path={ROOT / 'scripts/gpu/reward.py'}",
        "reward_model.num_workers=1",
        f"trainer.device={context.device.type}",
        "trainer.backend=local",
        "trainer.n_gpus_per_node=1",
        f"trainer.total_training_steps={STEPS}",
        "trainer.resume_mode=disable",
        f"trainer.default_local_dir={run}",
    ]
    run_command([sys.executable, "-m", "rlhub.trainer.main_ppo", *settings], context)
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def run_command(command: list[str], context: Context) -> None:
    """Runs a command, whose output goes to the section's log.  Raises PartError if it fails or takes too long."""
    try:
        done = subprocess.run(command, cwd=ROOT, timeout=max(context.left_s, 1.0), check=False)
    except subprocess.TimeoutExpired as error:
        raise PartError(f"{' '.join(command[1:3])} was ended after {error.timeout:.0f} s") from None
    if done.returncode:
        raise PartError(f"{' '.join(command[1:3])} ended with exit status {done.returncode}; the log of the section says more")


def bare_steps(context: Context, folder: Path, batch: Batch) -> list[dict[str, float]]:
    """Takes GRPO steps with vLLM and a Hugging Face model alone; returns the seconds of their parts, one mapping a step.

    One process has both, the engine sleeps during the update as main_ppo's does, and there is no pass for old log-probs: the one
    update is on-policy.
    """
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
    model = BareModel(folder, context.device, checkpointing=True)
    llm = _bare_engine(context, folder, batch)
    prompts = prompt_ids(batch.prompts * STEPS, batch.prompt, len(tokenizer))
    found = []
    for number in range(STEPS):
        chosen = prompts[number * batch.prompts : (number + 1) * batch.prompts]
        found.append(_bare_step(context, batch, model, llm, tokenizer, chosen))
    return found


def _bare_engine(context: Context, folder: Path, batch: Batch) -> object:
    """Returns an LLM with the arguments that rlhub gives it."""
    setup = rollout_setup(folder, context.device, prompt=batch.prompt, response=batch.response)
    with guarded_process({}):
        from vllm import LLM

        from rlhub.engines.rollout.vllm.entrypoints import engine_arguments
        from rlhub.engines.rollout.vllm.internals import keep_weights_unpacked

        keep_weights_unpacked()  # on a CPU weights could not be written otherwise
        llm = LLM(**engine_arguments(setup, resolve_dtype("auto", context.device)), enable_sleep_mode=context.on_gpu)
    if context.on_gpu:
        llm.sleep(level=2)
    return llm


def _bare_step(
    context: Context, batch: Batch, model: BareModel, llm: object, tokenizer: PreTrainedTokenizerFast, prompts: list[list[int]]
) -> dict[str, float]:
    """Takes one step; returns the seconds of its parts and of the whole."""
    from vllm import SamplingParams

    marks = [time.perf_counter()]

    def mark() -> None:
        settle(context.device)
        marks.append(time.perf_counter())

    if context.on_gpu:
        llm.wake_up(tags=["weights"])  # type: ignore[attr-defined]
    llm.apply_model(lambda inner: inner.load_weights(model.model.named_parameters()))  # type: ignore[attr-defined]
    if context.on_gpu:
        llm.wake_up(tags=["kv_cache"])  # type: ignore[attr-defined]
    llm.reset_prefix_cache()  # type: ignore[attr-defined]
    mark()
    params = SamplingParams(temperature=1.0, max_tokens=batch.response, ignore_eos=True, logprobs=0, detokenize=False)
    rows = [prompt for prompt in prompts for _ in range(batch.samples)]
    responses, _ = bare_generate(llm, rows, params)
    if context.on_gpu:
        llm.sleep(level=2)  # type: ignore[attr-defined]
    mark()
    rewards = torch.tensor([score(text) for text in tokenizer.batch_decode(responses)]).view(-1, batch.samples)
    advantages = ((rewards - rewards.mean(1, keepdim=True)) / (rewards.std(1, keepdim=True) + 1e-6)).view(-1, 1)
    mark()
    ids = torch.cat([torch.tensor(rows), torch.tensor(responses)], 1)
    rows_per_pass = max(PASS_TOKENS // ids.shape[1], 1)
    model.step(ids, advantages.expand(-1, batch.response), batch.response, rows_per_pass=rows_per_pass)
    mark()
    names = ("sync", "generate", "reward", "update")
    parts = {name: end - start for name, start, end in zip(names, marks, marks[1:], strict=False)}
    return parts | {"step": marks[-1] - marks[0]}


# --- J -----------------------------------------------------------------------------------------------------------------------


def quickstart(context: Context) -> None:
    """Runs the quickstart's recipe as a user would; at a small size three steps of it, from a warm start that is not one."""
    with context.rows.trying("quickstart"):
        out, steps = context.work / "quickstart", 3 if context.small else QUICKSTART_STEPS
        if context.small:
            prepare(out)
        settings = [f"trainer.device={context.device.type}"]
        if find_spec("ray") is None:
            settings.append("trainer.backend=local")
            context.rows.add("quickstart through Ray", status="not there", note="ray is not installed: in process")
        recipe = str(ROOT / "recipes/arithmetic/run.py")
        command = [sys.executable, recipe, f"--out={out}", f"--steps={steps}", "--ranks=1", *settings]
        started = time.monotonic()
        run_command(command, context)
        seconds = time.monotonic() - started
        metrics = [json.loads(line) for line in (out / "grpo/metrics.jsonl").read_text().splitlines()]
        right = [row["val/pass@1"] for row in metrics if "val/pass@1" in row]
        context.rows.measured(f"quickstart, {steps} steps", seconds, "s")
        context.rows.measured("a step of it", statistics.median(row["timing_s/step"] for row in metrics[1:]), "s")
        least = 0.0 if context.small else LEARNED
        context.rows.check(
            "right answers at its end", right[-1], at_least=least, baseline=right[0], note="baseline: at its start"
        )


def prepare(out: Path) -> None:
    """Writes the data, the model, and the same model where the recipe looks for its warm start, which then is skipped."""
    if (out / "model").is_dir():
        return
    write_data(out / "data", 1)
    for folder in (out / "model", out / "sft" / f"global_step_{PREPARED_STEPS}" / CHECKPOINTED_MODEL):
        folder.parent.mkdir(parents=True, exist_ok=True)
        write_model(folder, 1, build_tokenizer())
