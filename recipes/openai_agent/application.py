"""An application of its own that knows only HTTP: it takes sessions of a run, solves the row's problem with the policy, and says
how well that went.

    python recipes/openai_agent/application.py http://127.0.0.1:8020 KEY_FILE

It goes on while there are sessions, over restarts of the run, until it is stopped.
"""

from __future__ import annotations

import json
import re
import sys
import threading
import time
import urllib.error
import urllib.request
import uuid
from pathlib import Path
from typing import Any

NUMBER = re.compile(r"\d+")
WAIT_S = 0.2
BUSY = (429, 503)
GONE = 410  # the run has ended, or needs this session no more
NUM_THREADS = 32


def post(url: str, key: str, body: Any, once: str = "") -> Any:
    """Returns the JSON of the answer.  once: makes a repeated request count as the first."""
    headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json", "Idempotency-Key": once}
    request = urllib.request.Request(url, json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=300) as answer:
        return json.load(answer)


def solve(session: Any) -> float:
    """1.0 if the policy's answer to the session's problem is right, else 0.0."""
    question = {"model": session["model"], "messages": [{"role": "user", "content": session["row"]["raw_prompt"]}]}
    answer = post(f"{session['base_url']}/chat/completions", session["api_key"], question)
    numbers = NUMBER.findall(answer["choices"][0]["message"]["content"] or "")
    return float(bool(numbers) and numbers[-1].lstrip("0") == session["row"]["ground_truth"])


def work(url: str, key: str) -> None:
    """Takes one session after the other."""
    while True:
        try:
            session = post(f"{url}/sessions", key, {}, once=uuid.uuid4().hex)
            post(f"{url}/sessions/{session['id']}/end", key, {"reward": solve(session)})
        except urllib.error.HTTPError as error:
            if error.code not in (*BUSY, GONE):
                print(f"{error.url}: {error.code} {error.read().decode()[:200]}", file=sys.stderr)
            time.sleep(WAIT_S)
        except OSError:  # no run at this address now; its sessions are given again
            time.sleep(WAIT_S)


def main(url: str, key_file: str) -> None:
    """Works in many threads."""
    key = Path(key_file).read_text().strip()
    threads = [threading.Thread(target=work, args=(url, key), daemon=True) for _ in range(NUM_THREADS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


if __name__ == "__main__":
    main(*sys.argv[1:])
