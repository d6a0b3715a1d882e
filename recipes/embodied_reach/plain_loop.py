"""embodied_reach in one plain file: clone weakly from the scripted expert, then PPO, in one process without engines or workers.

    python -m recipes.embodied_reach.plain_loop --seed 1

It is the slow reference of the recipe: the same task, architecture and settings as the runs through engines and workers, in code
that reads from top to bottom.  Success is greedy, over all fixed initial states, with Wilson's 95 % interval.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from dataclasses import dataclass, field, fields

import numpy as np
import torch
from torch import Tensor, nn
from transformers import AutoModelForImageTextToText

from recipes.embodied_reach.demonstrations import FIRST_WORD, STREAMS, VLA, WORDS, episode_seeds, record
from recipes.tiny_smolvlm import build_config, build_tokenizer, initialize
from rlhub.config.sections.env import SRPOConfig
from rlhub.data.episodes import ActionTokenizer, RecordedEpisode
from rlhub.envs.vector.base import Obs
from rlhub.envs.vector.lockstep import LockStep
from rlhub.envs.vector.reach_color import COLORS, SCENES, ReachColor
from rlhub.rewards.srpo import SuccessBank, episode_encoder, srpo_rewards
from rlhub.trainer.ppo.embodied import wilson_interval


@dataclass(slots=True, kw_only=True)
class Settings:
    """A run.  Learning rates are AdamW's; a call is one pass of the policy, which chooses a chunk of actions."""

    seed: int = 1
    iterations: int = 150
    from_scratch: bool = field(default=False, metadata={"help": "skip the cloning"})
    demonstrations: int = 2048
    clone_until: float = field(default=0.30, metadata={"help": "success at which cloning stops; over 1: --clone-updates decide"})
    clone_updates: int = field(default=400, metadata={"help": "most updates of cloning"})
    clone_lr: float = 1e-3
    episodes: int = field(default=128, metadata={"help": "episodes of an iteration, each whole; from scratch 256 learn"})
    lr: float = 6e-4
    warmup: int = field(default=20, metadata={"help": "updates"})
    epochs: int = field(default=4, metadata={"help": "most passes over the rows of an iteration"})
    minibatches: int = field(default=2, metadata={"help": "of an epoch; one for 64 episodes"})
    kl_stop: float = field(default=0.05, metadata={"help": "estimated KL of a minibatch, after which an iteration stops"})
    clip_low: float = 0.2
    clip_high: float = 0.28
    gamma: float = 0.8
    lam: float = 0.8
    value_coef: float = 0.5
    entropy_coef: float = 0.003
    max_norm: float = 0.5
    group: int = field(default=1, metadata={"help": "episodes that share an initial state"})
    grpo: bool = field(default=False, metadata={"help": "returns compared within groups, instead of values"})
    sparse: bool = field(default=False, metadata={"help": "the reward is 1 for success, and a time-out ends an episode"})
    srpo: bool = field(default=False, metadata={"help": "sparse, and failures are compared with successes of their scene"})
    black_pictures: bool = field(default=False, metadata={"help": "control: the policy sees black, in PPO and in its checks"})
    shuffle_rewards: bool = field(default=False, metadata={"help": "control: rewards of an iteration change places"})
    frozen: bool = field(default=False, metadata={"help": "control: no update after cloning"})
    check_every: int = field(default=25, metadata={"help": "iterations between checks of success"})
    checked: int = field(
        default=2 * SCENES, metadata={"help": "fixed initial states of a check; cloning is stopped by half as many"}
    )
    threads: int = 1

    def __post_init__(self) -> None:
        self.sparse |= self.srpo
        if self.episodes % (self.group or 1) or (self.grpo and self.group < 2) or (self.srpo and self.group < 2):
            raise SystemExit(f"--grpo and --srpo need --group of at least 2 that divides --episodes {self.episodes}")


class Policy(nn.Module):
    """SmolVLM that reads an instruction, a picture and one place for each action token, all in one pass."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        places = len(VLA.place_ids)
        torch.manual_seed(seed)
        tokenizer = build_tokenizer(WORDS, num_places=places, num_bins=VLA.bins)
        self.model = AutoModelForImageTextToText.from_config(build_config(tokenizer))
        initialize(self.model)
        self.v_head = nn.Linear(self.model.config.text_config.hidden_size, 1)
        nn.init.zeros_(self.v_head.weight)
        nn.init.zeros_(self.v_head.bias)
        touch, *colors = range(FIRST_WORD, FIRST_WORD + len(WORDS))
        image = [VLA.image_token_id] * VLA.tokens_per_image
        self.register_buffer("prompts", torch.tensor([[touch, color, *image, *VLA.place_ids] for color in colors]))

    def forward(self, images: Tensor, color: Tensor) -> tuple[Tensor, Tensor]:
        """Returns logits (rows, tokens, bins) and values (rows,).  images: (rows, 32, 32, 3) uint8; color: (rows,)."""
        pixels = (images.permute(0, 3, 1, 2).float() / 255 - 0.5) / 0.5
        ids = self.get_buffer("prompts")[color]
        outputs = self.model.base_model(
            input_ids=ids, attention_mask=torch.ones_like(ids), pixel_values=pixels[:, None], use_cache=False
        )
        hidden = outputs.last_hidden_state[:, -VLA.num_tokens :]
        bins = self.model.lm_head.weight[VLA.first_bin_id : VLA.first_bin_id + VLA.bins]
        return hidden @ bins.t(), self.v_head(hidden[:, 0]).squeeze(-1) * VLA.value_scale


@dataclass(slots=True)
class Rows:
    """Calls of the policy, one a row.

    images (rows, 32, 32, 3) uint8, color (rows,), tokens (rows, T) bins, mask (rows, T) the tokens of executed actions, log_probs
    (rows,) of the call's executed actions, advantages and returns (rows,).
    """

    images: Tensor
    color: Tensor
    tokens: Tensor
    mask: Tensor
    log_probs: Tensor
    advantages: Tensor
    returns: Tensor

    def __getitem__(self, chosen: Tensor) -> Rows:
        return Rows(*(getattr(self, one.name)[chosen] for one in fields(self)))

    def __len__(self) -> int:
        return len(self.color)


def seen(obs: Obs, black: bool) -> tuple[Tensor, Tensor]:
    """Returns what the policy reads: pictures (N, 32, 32, 3) and the number of the instruction's colour (N,)."""
    images = torch.from_numpy(obs.images[:, 0])
    color = torch.tensor([COLORS.index(text.split()[-1]) for text in obs.instruction])
    return torch.zeros_like(images) if black else images, color


def executable(tokens: Tensor) -> np.ndarray:
    """Returns actions (N, chunk, action_dim) of bins (N, T)."""
    return ActionTokenizer(VLA).decode(tokens.numpy() + VLA.first_bin_id)


def environments(count: int) -> LockStep:
    """Returns reach_color `count` times; an environment whose episode has ended waits for its reset."""
    return LockStep(ReachColor, count, auto_reset=False)


@torch.no_grad()
def success(policy: Policy, env: LockStep, obs: Obs, *, black: bool = False, other_color: bool = False) -> np.ndarray:
    """Plays one greedy episode in each environment from `obs` on; returns (N,) bool, solved.

    black: the policy sees black pictures.  other_color: it is told the colour of the other target.
    """
    solved = np.zeros(env.num_envs, bool)
    for _ in range(0, env.spec.max_steps, VLA.chunk):
        images, color = seen(obs, black)
        logits, _ = policy(images, 1 - color if other_color else color)
        result = env.chunk_step(executable(logits.argmax(-1)))
        obs, solved = result.obs, solved | result.success
    return solved


def fixed_success(policy: Policy, env: LockStep, **changed: bool) -> np.ndarray:
    """Returns `success` over all fixed initial states.  env: as many environments."""
    return success(policy, env, env.reset(seeds=range(env.num_envs), initial=range(env.num_envs)), **changed)


def demonstration_rows(episodes: list[RecordedEpisode]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Returns images, colours, bins (rows, T) and mask (rows, T), a row for each frame: the answer is the actions from it on, and
    behind the episode's end nothing is learned."""
    encode, columns = ActionTokenizer(VLA).encode, []
    for episode in episodes:
        frames, bins = np.arange(len(episode.actions)), encode(episode.actions) - VLA.first_bin_id
        places = frames[:, None] + np.arange(VLA.chunk)
        color = np.full(len(frames), COLORS.index(episode.instruction.split()[-1]))
        tokens = bins[places.clip(max=len(frames) - 1)].reshape(len(frames), -1)
        mask = np.repeat(places < len(frames), VLA.action_dim, axis=1)
        columns.append((next(iter(episode.images.values())), color, tokens, mask))
    pictures, colors, answers, learned = (torch.from_numpy(np.concatenate(column)) for column in zip(*columns, strict=True))
    return pictures, colors, answers, learned


def clone(policy: Policy, settings: Settings) -> None:
    """Clones from demonstrations until a check over other states, every 10 updates, is good enough."""
    rows = demonstration_rows(list(record(settings.demonstrations, settings.seed)))
    optimizer = torch.optim.AdamW(policy.parameters(), settings.clone_lr)
    generator = torch.Generator().manual_seed(settings.seed)
    env = environments(max(settings.checked // 2, 1))
    batches: Iterator[Tensor] = iter(())
    for update in range(1, settings.clone_updates + 1):
        if (chosen := next(batches, None)) is None:
            batches = iter(torch.randperm(len(rows[0]), generator=generator).split(128))
            chosen = next(batches)
        images, color, bins, mask = (column[chosen] for column in rows)
        logits, _ = policy(images, color)
        loss = nn.functional.cross_entropy(logits[mask], bins[mask])
        step(policy, optimizer, loss, max_norm=1.0)
        if update % 10 == 0 and (settings.clone_until <= 1 or update % 100 == 0):
            solved = success(policy, env, env.reset(seeds=episode_seeds("checks", settings.seed, env.num_envs)))
            report("clone", update, solved, loss=loss.item())
            if solved.mean() >= settings.clone_until:
                return


def step(policy: Policy, optimizer: torch.optim.Optimizer, loss: Tensor, max_norm: float) -> float:
    """Takes an optimizer step; returns the gradient norm."""
    optimizer.zero_grad()
    loss.backward()
    norm = nn.utils.clip_grad_norm_(policy.parameters(), max_norm)
    optimizer.step()
    return float(norm)


class Collector:
    """The environments of PPO: every iteration has a new episode in each, and episodes of a group begin alike."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.env = environments(settings.episodes)
        self.generator = torch.Generator().manual_seed(settings.seed)
        self.scenes = np.random.default_rng([STREAMS.index("rollouts"), settings.seed])
        self.encoder, self.bank = episode_encoder(SRPOConfig()), SuccessBank()
        self.obs = self.reset()

    def reset(self) -> Obs:
        """Begins the episodes."""
        size = self.settings.group
        self.seeds = np.repeat(self.scenes.integers(2**62, size=self.env.num_envs // size), size)
        return self.env.reset(seeds=self.seeds.tolist())

    @torch.no_grad()
    def collect(self, policy: Policy) -> tuple[Rows, dict[str, float]]:
        """Returns the rows of an iteration, and numbers about them."""
        settings = self.settings
        self.obs = self.reset()
        calls = [self._call(policy) for _ in range(0, self.env.spec.max_steps, VLA.chunk)]
        images, color, tokens, mask, log_probs, values, rewards, terminated, ended, final_values, solved = (
            torch.stack(column) for column in zip(*calls, strict=True)
        )
        valid = mask.any(-1)
        if settings.sparse:
            rewards, terminated = solved.float(), terminated | ended
        if settings.srpo:
            rewards = rewards + torch.where(ended & ~solved, self._self_referential(images, valid, solved.any(0)).float(), 0.0)
        if settings.shuffle_rewards:
            rewards[valid] = rewards[valid][torch.randperm(int(valid.sum()), generator=self.generator)]
        if settings.grpo:
            advantages, returns = grouped(rewards, settings.group), rewards
        else:
            following = torch.where(ended, final_values, values.roll(-1, 0))
            following = torch.where(terminated, 0.0, following)
            advantages = estimated(rewards, values, following, ended, settings)
            returns = advantages + values
            advantages = (advantages - advantages[valid].mean()) / (advantages[valid].std() + 1e-8)
        rows = Rows(*(column[valid] for column in (images, color, tokens, mask, log_probs, advantages, returns)))
        numbers = {"reward": rewards.sum() / ended.sum(), "solved": solved.sum() / ended.sum()}
        return rows, {name: float(number) for name, number in numbers.items()}

    def _self_referential(self, images: Tensor, valid: Tensor, solved: Tensor) -> Tensor:
        """Returns the reward of each episode, (episodes,), from the pictures (calls, episodes, 32, 32, 3) and the last ones."""
        last = torch.from_numpy(self.obs.images[:, 0])
        films = [torch.cat([images[valid[:, row], row], last[row][None]]) for row in range(len(last))]
        embeddings = self.encoder([film.permute(0, 3, 1, 2)[:, None] for film in films])
        rewards, self.bank = srpo_rewards(embeddings, solved, torch.from_numpy(self.seeds), self.bank, SRPOConfig())
        return rewards

    def _call(self, policy: Policy) -> tuple[Tensor, ...]:
        """Acts once in every environment; returns one column of each kind, (environments, ...)."""
        black = self.settings.black_pictures
        images, color = seen(self.obs, black)
        logits, values = policy(images, color)
        tokens = torch.multinomial(logits.softmax(-1).flatten(0, 1), 1, generator=self.generator).view(logits.shape[:2])
        result = self.env.chunk_step(executable(tokens))
        self.obs, ended = result.obs, torch.from_numpy(result.ended)
        mask = torch.from_numpy(result.valid).repeat_interleave(VLA.action_dim, 1)
        final_values = torch.zeros_like(values)
        if len(result.final_obs):
            final_values[ended] = policy(*seen(result.final_obs, black))[1]
        reward = torch.from_numpy(result.reward).sum(1)
        terminated, solved = torch.from_numpy(result.terminated).any(1), torch.from_numpy(result.success)
        log_probs = chunk_log_probs(logits, tokens, mask)
        return images, color, tokens, mask, log_probs, values, reward, terminated, ended, final_values, solved


def chunk_log_probs(logits: Tensor, tokens: Tensor, mask: Tensor) -> Tensor:
    """Returns the log-probability of the executed actions of each call together, (rows,)."""
    chosen = logits.log_softmax(-1).gather(-1, tokens[..., None]).squeeze(-1)
    return (chosen * mask).sum(-1)


def estimated(rewards: Tensor, values: Tensor, following: Tensor, ended: Tensor, settings: Settings) -> Tensor:
    """Returns generalized advantages over calls (calls, environments); `following` are the values of what comes after each."""
    advantages, later = torch.zeros_like(values), torch.zeros_like(values[0])
    for t in reversed(range(len(values))):
        delta = rewards[t] + settings.gamma * following[t] - values[t]
        later = advantages[t] = delta + settings.gamma * settings.lam * later * ~ended[t]
    return advantages


def grouped(rewards: Tensor, size: int) -> Tensor:
    """Returns (R - mean) / std within groups of `size` neighbouring episodes, the same for all calls of an episode."""
    total = rewards.sum(0).view(-1, size)
    advantages = (total - total.mean(1, keepdim=True)) / (total.std(1, keepdim=True) + 1e-6)
    return advantages.flatten().expand_as(rewards)


class Learner:
    """PPO's updates: clipped ratios of whole calls, with a stop by KL and a linear warm-up of the learning rate."""

    def __init__(self, policy: Policy, settings: Settings) -> None:
        self.policy, self.settings, self.taken = policy, settings, 0
        self.optimizer = torch.optim.AdamW(policy.parameters(), settings.lr, betas=(0.9, 0.95))
        self.generator = torch.Generator().manual_seed(settings.seed)

    def update(self, rows: Rows) -> dict[str, float]:
        """Updates until the epochs are over or the policy has moved far enough; returns numbers."""
        before, norms, clipped, kl = self.taken, [0.0], [0.0], 0.0
        for _ in range(self.settings.epochs):
            for chosen in torch.randperm(len(rows), generator=self.generator).chunk(self.settings.minibatches):
                loss, kl, share = self._loss(rows[chosen])
                self.taken += 1
                self.optimizer.param_groups[0]["lr"] = self.settings.lr * min(1.0, self.taken / self.settings.warmup)
                norms.append(step(self.policy, self.optimizer, loss, self.settings.max_norm))
                clipped.append(share)
                if kl > self.settings.kl_stop:
                    return self._numbers(before, norms, clipped, kl)
        return self._numbers(before, norms, clipped, kl)

    def _numbers(self, before: int, norms: list[float], clipped: list[float], kl: float) -> dict[str, float]:
        return {"updates": self.taken - before, "norm": max(norms), "clipped": max(clipped), "kl": kl}

    def _loss(self, rows: Rows) -> tuple[Tensor, float, float]:
        """Returns the loss, the estimated KL from the policy that acted, and the share of clipped ratios."""
        settings = self.settings
        logits, values = self.policy(rows.images, rows.color)
        log_ratio = chunk_log_probs(logits, rows.tokens, rows.mask) - rows.log_probs
        ratio = log_ratio.exp()
        bounded = ratio.clamp(1 - settings.clip_low, 1 + settings.clip_high)
        loss = -torch.minimum(ratio * rows.advantages, bounded * rows.advantages).mean()
        if not settings.grpo:
            loss = loss + settings.value_coef * (values - rows.returns).square().mean()
        log_probs = logits.log_softmax(-1)
        entropy = (-(log_probs.exp() * log_probs).sum(-1) * rows.mask).sum(-1).mean()
        kl, clipped = -log_ratio.mean().item(), (ratio != bounded).float().mean().item()
        return loss - settings.entropy_coef * entropy, kl, clipped


def report(stage: str, count: int, episodes: np.ndarray, **numbers: float) -> None:
    """Prints success with its interval, the CPU seconds so far, and other numbers."""
    low, high = wilson_interval(int(episodes.sum()), len(episodes))
    more = "  ".join(f"{name} {number:.3f}" for name, number in numbers.items())
    seconds = time.process_time()
    print(
        f"{stage:<12} {count:4d}  success {episodes.mean():.3f} [{low:.3f}, {high:.3f}]  cpu {seconds:.0f} s  {more}", flush=True
    )


@dataclass(slots=True, kw_only=True)
class Curve:
    """Success over the fixed initial states: after these iterations, and at the end told the other colour, and blindfolded."""

    success: dict[int, float]
    other_color: float
    blindfolded: float


def run(settings: Settings, policy: Policy | None = None) -> Curve:
    """Clones and improves a policy.  policy: one that is cloned already."""
    torch.set_num_threads(settings.threads)
    if policy is None:
        policy = Policy(settings.seed)
        if not settings.from_scratch:
            clone(policy, settings)
    env, black = environments(settings.checked), settings.black_pictures
    start = fixed_success(policy, env, black=black)
    curve = {0: float(start.mean())}
    report("start", 0, start)
    collector, learner = Collector(settings), Learner(policy, settings)
    for iteration in range(1, settings.iterations + 1):
        rows, numbers = collector.collect(policy)
        if not settings.frozen:
            numbers |= learner.update(rows)
        if iteration % settings.check_every == 0 or iteration == settings.iterations:
            solved = fixed_success(policy, env, black=black)
            curve[iteration] = float(solved.mean())
            report("iteration", iteration, solved, **numbers)
    other, blind = fixed_success(policy, env, other_color=True), fixed_success(policy, env, black=True)
    report("other colour", settings.iterations, other)
    report("blindfolded", settings.iterations, blind)
    return Curve(success=curve, other_color=float(other.mean()), blindfolded=float(blind.mean()))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for one in fields(Settings):
        name, text = f"--{one.name.replace('_', '-')}", one.metadata.get("help", "")
        if isinstance(one.default, bool):
            parser.add_argument(name, action="store_true", help=text)
        else:
            parser.add_argument(name, type=type(one.default), default=one.default, help=f"{text} (default {one.default})")
    settings = Settings(**vars(parser.parse_args()))
    print(settings)
    run(settings)


if __name__ == "__main__":
    main()
