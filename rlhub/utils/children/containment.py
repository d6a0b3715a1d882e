"""What this machine allows for the containment of children: asked once, by trying it."""

from __future__ import annotations

import functools
import logging
import subprocess
import sys

logger = logging.getLogger(__name__)

PROBE = (
    "import os,sys; sys.path[:]=sys.argv[1:]; from rlhub.utils.children.supervisor import become_child; "
    "become_child(os.pipe()[0], (), namespace=True); os._exit(0)"
)
PROBE_S = 60.0


@functools.cache
def namespaces_allowed() -> bool:
    """Whether children can live in PID namespaces of their own.  Says in the log what it means if not."""
    allowed, why = sys.platform == "linux", "only Linux has them"
    if allowed:
        try:
            done = subprocess.run([sys.executable, "-c", PROBE, *sys.path], capture_output=True, timeout=PROBE_S, check=False)
            allowed, why = done.returncode == 0, done.stderr.decode(errors="replace").strip().rpartition("\n")[2]
        except subprocess.TimeoutExpired:
            allowed, why = False, f"not done after {PROBE_S:g} s"
    if not allowed:
        logger.warning(
            "processes that reward functions, tools and environments start are ended with them, but not contained: PID "
            "namespaces are not allowed here (%s), so code that means to can escape, and can look at this user's processes. "
            "Run where unprivileged user namespaces or CAP_SYS_ADMIN are allowed, or only code that you trust.",
            why or "the attempt failed",
        )
    return allowed
