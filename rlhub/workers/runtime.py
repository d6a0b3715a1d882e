"""What workers need to know of the run besides their own section of the configuration."""

from __future__ import annotations

from dataclasses import dataclass

import psutil
import torch

GIB = float(1 << 30)


@dataclass(slots=True, kw_only=True, frozen=True)
class WorkerRuntime:
    """device: "cuda" or "cpu".  seed: of the run.  The lengths are limits in tokens; deadline_s bounds collectives."""

    device: str
    seed: int
    max_prompt_length: int
    max_response_length: int
    deadline_s: float = 1800.0

    def torch_device(self, local_rank: int) -> torch.device:
        """This rank's device."""
        return torch.device("cuda", local_rank) if self.device == "cuda" else torch.device("cpu")


def memory_metrics(prefix: str, device: torch.device) -> dict[str, float]:
    """Resident memory of this process and, on CUDA, the peak allocated since the last call, in GiB."""
    metrics = {f"memory/{prefix}_rss_gb": psutil.Process().memory_info().rss / GIB}
    if device.type == "cuda":
        metrics[f"memory/{prefix}_max_allocated_gb"] = torch.cuda.max_memory_allocated(device) / GIB
        torch.cuda.reset_peak_memory_stats(device)
    return metrics
