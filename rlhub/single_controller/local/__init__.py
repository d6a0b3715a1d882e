"""The in-process backend: world size 1, no Ray, a breakpoint in a worker is a breakpoint in the terminal."""

from rlhub.single_controller.local.group import LocalWorkerGroup, launch_local

__all__ = ["LocalWorkerGroup", "launch_local"]
