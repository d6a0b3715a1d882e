"""One GRPO step, four ways, each in a process of its own: a plain PyTorch loop, TRL, rlhub in process and rlhub through Ray.

    python scripts/bench/grpo_step_subjects.py plain|trl|local|ray MODEL_FOLDER RESPONSE_TOKENS

Each line "N" on standard input makes N steps and answers with one JSON object: the CPU seconds (user + system) that one
step took on average, over the driver, its workers and its reward children.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from pathlib import Path

os.environ.update(OMP_NUM_THREADS="1", HF_HUB_OFFLINE="1", TOKENIZERS_PARALLELISM="false", TRANSFORMERS_VERBOSITY="error")

import psutil
import torch

PROMPTS, SAMPLES, PROMPT_TOKENS, LR = 32, 8, 8, 1e-4

StepFunction = Callable[[], None]
Processes = Callable[[], Iterable[int]]


def score(text: str) -> float:
    """The reward of all four: the share of even word numbers, so that it varies within a group."""
    words = text.split()
    return sum(word[-1:] in "02468" for word in words) / max(len(words), 1)


def compute_score(data_source: str, solution_str: str, ground_truth: str, extra_info: object) -> float:
    """`score` with the signature of rlhub's reward functions."""
    return score(solution_str)


def prompt_texts(count: int) -> list[str]:
    """Prompts of PROMPT_TOKENS random words."""
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(2, 512, (count, PROMPT_TOKENS), generator=generator).tolist()
    return [" ".join(f"w{i}" for i in row) for row in ids]


def plain(folder: str, response_tokens: int) -> tuple[StepFunction, Processes]:
    """What one would write by hand: generate, score, group advantages, one clipped update."""
    from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder, padding_side="left")
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, weight_decay=0.01)
    texts = prompt_texts(PROMPTS * 64)
    done = 0

    def step() -> None:
        nonlocal done
        rows = [texts[(done * PROMPTS + i) % len(texts)] for i in range(PROMPTS)]
        done += 1
        encoded = tokenizer(rows, return_tensors="pt", padding=True)
        width = encoded["input_ids"].shape[1]
        model.eval()
        with torch.no_grad():
            sequences = model.generate(
                input_ids=encoded["input_ids"],
                attention_mask=encoded["attention_mask"],
                do_sample=True,
                temperature=1.0,
                top_k=0,
                num_return_sequences=SAMPLES,
                max_new_tokens=response_tokens,
                min_new_tokens=response_tokens,
                pad_token_id=0,
            )
        responses = sequences[:, width:]
        rewards = torch.tensor([score(text) for text in tokenizer.batch_decode(responses)]).view(PROMPTS, SAMPLES)
        advantages = ((rewards - rewards.mean(1, keepdim=True)) / (rewards.std(1, keepdim=True) + 1e-6)).flatten()
        mask = torch.cat([encoded["attention_mask"].repeat_interleave(SAMPLES, 0), torch.ones_like(responses)], 1)
        model.train()
        logits = model(input_ids=sequences, attention_mask=mask).logits[:, width - 1 : -1]
        log_probs = logits.log_softmax(-1).gather(-1, responses[..., None]).squeeze(-1)
        ratio = (log_probs - log_probs.detach()).exp()
        surrogate = torch.minimum(ratio * advantages[:, None], ratio.clamp(0.8, 1.2) * advantages[:, None])
        (-surrogate.mean()).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return step, lambda: [os.getpid()]


def trl(folder: str, response_tokens: int) -> tuple[StepFunction, Processes]:
    """TRL's GRPOTrainer; a step is its own training_step and the optimizer step its loop takes after it."""
    import tempfile

    from datasets import Dataset
    from transformers import PreTrainedTokenizerFast
    from trl import GRPOConfig, GRPOTrainer  # type: ignore[attr-defined]

    config = GRPOConfig(
        output_dir=tempfile.mkdtemp(),
        per_device_train_batch_size=PROMPTS * SAMPLES,
        num_generations=SAMPLES,
        max_completion_length=response_tokens,
        generation_kwargs={"min_new_tokens": response_tokens},
        learning_rate=LR,
        weight_decay=0.01,
        beta=0.0,
        max_steps=1,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        disable_tqdm=True,
        lr_scheduler_type="constant",
    )
    trainer = GRPOTrainer(
        model=folder,
        processing_class=PreTrainedTokenizerFast.from_pretrained(folder, padding_side="left"),
        reward_funcs=lambda completions, **kwargs: [score(text) for text in completions],
        args=config,
        train_dataset=Dataset.from_dict({"prompt": prompt_texts(PROMPTS * 64)}),
    )
    trainer.train()
    batches = iter(trainer.get_train_dataloader())

    def step() -> None:
        nonlocal batches
        try:
            inputs = next(batches)
        except StopIteration:
            batches = iter(trainer.get_train_dataloader())
            inputs = next(batches)
        trainer.training_step(trainer.model, inputs, None)
        torch.nn.utils.clip_grad_norm_(trainer.model.parameters(), 1.0)
        trainer.optimizer.step()
        trainer.model.zero_grad()

    return step, lambda: [os.getpid()]


def rlhub(folder: str, response_tokens: int, backend: str) -> tuple[StepFunction, Processes]:
    """rlhub's own trainer with its default checks, step by step."""
    import tempfile

    import pyarrow as pa
    import pyarrow.parquet as pq

    from rlhub.config.cli import prepare
    from rlhub.config.schema import to_dict
    from rlhub.config.sections.ppo import PPOConfig
    from rlhub.trainer.ppo.trainer import build_data, build_trainer
    from rlhub.trainer.run import Run

    scratch = Path(tempfile.mkdtemp())
    rows = [
        {"prompt": text, "data_source": "bench", "reward_model": {"style": "rule", "ground_truth": ""}, "extra_info": {"i": i}}
        for i, text in enumerate(prompt_texts(PROMPTS * 64))
    ]
    pq.write_table(pa.Table.from_pylist(rows), scratch / "train.parquet")
    config = prepare(
        PPOConfig,
        "ppo",
        [
            f"data.train_files={scratch}/train.parquet",
            f"data.train_batch_size={PROMPTS}",
            f"data.max_prompt_length={PROMPT_TOKENS}",
            f"data.max_response_length={response_tokens}",
            "algorithm.adv_estimator=grpo",
            f"actor_rollout_ref.model.path={folder}",
            "actor_rollout_ref.model.enable_gradient_checkpointing=False",
            f"actor_rollout_ref.actor.ppo_mini_batch_size={PROMPTS}",
            f"actor_rollout_ref.actor.optim.lr={LR}",
            "actor_rollout_ref.rollout.name=hf",
            f"actor_rollout_ref.rollout.n={SAMPLES}",
            "actor_rollout_ref.rollout.ignore_eos=True",
            f"custom_reward_function.path={__file__}",
            "reward_model.num_workers=1",
            "trainer.logger=[]",
            "trainer.device=cpu",
            "trainer.n_gpus_per_node=1",
            f"trainer.backend={backend}",
            "trainer.total_training_steps=100000",
            f"trainer.default_local_dir={scratch}/run",
        ],
    )
    data = build_data(config)
    stack = ExitStack()
    run = stack.enter_context(Run(config.trainer, to_dict(config), data.total_steps))
    trainer = build_trainer(config, data, run, stack)
    run.start()
    batches, done = data.loader.endless(), 0

    def step() -> None:
        nonlocal done
        done += 1
        run.begin_step(done)
        metrics = trainer.train_step(done, batches)
        trainer.source.trained(done)
        run.end_step(done, metrics, save=trainer.save, state=trainer.state, last=False)

    def processes() -> set[int]:
        children = {
            child.pid
            for child in psutil.Process().children(recursive=True)
            if not any(name in " ".join(child.cmdline()) for name in ("raylet", "gcs_server", "/ray/"))
        }
        return {os.getpid(), *children, *(worker.pid for worker in trainer.groups.actor.workers)}

    return step, processes


def cpu_seconds(pids: Iterable[int]) -> float:
    """user + system time of the processes so far."""
    total = 0.0
    for pid in pids:
        times = psutil.Process(pid).cpu_times()
        total += times.user + times.system
    return total


def serve(step: StepFunction, processes: Processes) -> None:
    """Answer each line of standard input with a measurement."""
    for line in sys.stdin:
        count = int(line)
        pids = list(processes())
        before = cpu_seconds(pids)
        for _ in range(count):
            step()
        sys.stdout.write(json.dumps({"cpu_s": (cpu_seconds(pids) - before) / count}) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    torch.set_num_threads(1)
    name, folder, tokens = sys.argv[1], sys.argv[2], int(sys.argv[3])
    # progress bars and warnings of libraries must not mix with the answers
    answers, sys.stdout = sys.stdout, sys.stderr
    parts = {"plain": plain, "trl": trl}
    made = parts[name](folder, tokens) if name in parts else rlhub(folder, tokens, name)
    sys.stdout = answers
    serve(*made)
