"""An application that knows only HTTP: it opens sessions of a run, asks the policy, and rewards the letters in the answers.

    python scripts/checks/online_application.py http://127.0.0.1:8020 KEY_FILE LOG

Of its sessions 10 % each lose the connection in the middle of a request or before they have read its answer, repeat every
request, and are left without an end.  A request that is sent again says so, by its key or as the clients of OpenAI do.  It goes
on until SIGTERM, over any number of runs at this address.  LOG gets a line of JSON for each session that was opened, completed,
left or gone, and for each answer that is not as promised (`problem`).
"""

from __future__ import annotations

import argparse
import http.client
import json
import random
import signal
import string
import sys
import threading
import time
import urllib.parse
import uuid
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import cycle
from pathlib import Path
from types import FrameType
from typing import Any

KINDS = ("plain",) * 7 + ("disconnect", "duplicate", "timeout")
WAIT_S = 0.2  # for a run that does not answer
OK, CREATED, CONFLICT, GONE, TOO_MANY = 200, 201, 409, 410, 429
KEY, ATTEMPT = "Idempotency-Key", "X-Stainless-Retry-Count"


class Away(Exception):  # noqa: N818  a signal, not an error
    """Raised where nobody answers, or the session is gone."""


@dataclass(slots=True, kw_only=True)
class Application:
    """The address of the run, and what all threads share."""

    url: str
    key: str
    log: Path
    seed: int
    shuffled: bool
    left_s: float
    conversations: int = 1
    over: threading.Event = field(default_factory=threading.Event)
    others: deque[float] = field(default_factory=lambda: deque(maxlen=64))
    lock: threading.Lock = field(default_factory=threading.Lock)
    kinds: random.Random = field(init=False)
    deck: list[str] = field(default_factory=list)
    cuts: Iterator[str] = field(default_factory=lambda: cycle(("", ATTEMPT, KEY)))
    lost: dict[str, tuple[dict[str, str], str]] = field(default_factory=dict)
    """Of requests whose answer was lost, by path: the headers of the repetition and the id that its answer must have."""

    def __post_init__(self) -> None:
        self.kinds = random.Random(self.seed)

    def note(self, event: str, **more: Any) -> None:
        """Appends a line to the log."""
        with self.lock, self.log.open("a") as stream:
            stream.write(json.dumps({"event": event, **more}) + "\n")

    def post(self, path: str, body: Any, *, key: str = "", once: str = "", timeout_s: float = 60.0) -> tuple[int, Any]:
        """Returns status and body.  Raises Away where nobody answers."""
        address = urllib.parse.urlsplit(self.url)
        headers = {"Authorization": f"Bearer {key or self.key}", "Content-Type": "application/json"}
        again, known = self.lost.pop(path, ({}, ""))
        connection = http.client.HTTPConnection(address.hostname or "", address.port, timeout=timeout_s)
        try:
            connection.request("POST", path, json.dumps(body), headers | again | ({KEY: once} if once else {}))
            answer = connection.getresponse()
            told = json.loads(answer.read())
            if known and answer.status == OK:
                self.expect(told.get("id") == known, f"{path}: {known} was lost, and its repetition was answered as another")
            return answer.status, told
        except (OSError, http.client.HTTPException) as error:
            raise Away(str(error)) from error
        finally:
            connection.close()

    def work(self) -> None:
        """Runs sessions until the end."""
        while not self.over.is_set():
            with self.lock:
                kind, chance = self.next_kind(), random.Random(self.kinds.random())
            opened = self.open(kind)
            if opened is not None:
                try:
                    self.session(opened, kind, chance)
                except Away as error:
                    self.note("gone", id=opened["id"], why=str(error)[:200])

    def next_kind(self) -> str:
        """Returns the kind of the next session, of ten each kind as often as it must be."""
        if not self.deck:
            self.deck = self.kinds.sample(KINDS, len(KINDS))
        return self.deck.pop()

    def open(self, kind: str) -> Any:
        """Returns a session, or None at the end; waits for a place."""
        once = uuid.uuid4().hex
        while not self.over.is_set():
            try:
                status, made = self.post("/sessions", {}, once=once)
                if status in (OK, CREATED):
                    self.note("open", kind=kind, **{name: made[name] for name in ("id", "prompt", "sample")})
                    if kind == "duplicate":
                        status, again = self.post("/sessions", {}, once=once)
                        self.expect(again.get("id") == made["id"] and status == OK, f"{made['id']} was opened twice")
                    return made
                self.expect(status == TOO_MANY, f"POST /sessions: {status} {made}")
            except Away:
                pass
            self.over.wait(WAIT_S)
        return None

    def session(self, made: Any, kind: str, chance: random.Random) -> None:
        """Asks, rewards and ends, as this kind of session does."""
        path = urllib.parse.urlsplit(made["base_url"]).path + "/chat/completions"
        answers = [self.ask(made, path, kind, f"Write{' again' * number}.") for number in range(self.conversations)]
        if kind == "timeout":
            self.leave(made)
            return
        quality = share_of_letters("".join(choice["message"]["content"] or "" for choice in answers))
        log_probs = [token["logprob"] for choice in answers for token in choice["logprobs"]["content"]]
        self.finish({**made, "log_probs": log_probs}, kind, quality, self.reward(quality, chance))

    def ask(self, made: Any, path: str, kind: str, question: str) -> Any:
        """Returns the answer of a conversation, a choice of the interface.  Raises Away where there is none."""
        body = {"model": made["model"], "messages": [{"role": "user", "content": question}], "max_tokens": 8, "logprobs": True}
        if kind == "disconnect":
            self.hang_up(path, body, made["api_key"])
        status, answer = self.post(path, body, key=made["api_key"])
        if status != OK:
            self.expect(status == GONE, f"chat: {status} {answer}")
            raise Away(f"chat: {status}")
        return answer["choices"][0]

    def reward(self, quality: float, chance: random.Random) -> float:
        """Returns the reward for an answer of this quality; shuffled: another answer's."""
        with self.lock:
            self.others.append(quality)
            return chance.choice(self.others) if self.shuffled else quality

    def finish(self, made: Any, kind: str, quality: float, reward: float) -> None:
        """Gives the reward and ends the session; a duplicate does both twice, and tries another reward."""
        where = f"/sessions/{made['id']}"
        known = {name: made[name] for name in ("id", "prompt", "sample", "log_probs")}
        known |= {"kind": kind, "reward": reward, "quality": quality}
        repeats = 2 if kind == "duplicate" else 1
        for _ in range(repeats):
            status, told = self.post(f"{where}/reward", {"reward": reward})
            if status == GONE:
                raise Away("the reward came too late")
            self.expect(status == OK, f"reward: {status} {told}")
        if kind == "duplicate":
            status, told = self.post(f"{where}/reward", {"reward": reward + 1.0})
            self.expect(status == CONFLICT, f"another reward: {status} {told}")
        try:
            status, told = self.post(f"{where}/end", {})
        except Away:
            self.note("unknown", **known)
            raise
        completed = status == OK and told["status"] == "completed"
        self.expect(completed or status == GONE, f"end: {status} {told}")
        self.note("completed" if completed else "gone", **known)
        if kind == "duplicate" and completed:
            status, told = self.post(f"{where}/end", {"reward": reward})
            self.expect(status == OK and not told["ended"] or status == GONE, f"the end again: {status} {told}")

    def hang_up(self, path: str, body: Any, key: str) -> None:
        """Sends a request and closes the connection before its answer, or loses the answer; the next one repeats it."""
        with self.lock:
            how = next(self.cuts)
        once = uuid.uuid4().hex if how == KEY else ""
        try:
            status, told = self.post(path, body, key=key, once=once, timeout_s=60.0 if how else 0.01)
        except Away:
            status, told = 0, {}
        self.lost[path] = ({KEY: once} if once else {ATTEMPT: "1"}, told["id"] if status == OK else "")

    def leave(self, made: Any) -> None:
        """Leaves a session until it must have failed, and ends it then."""
        if self.over.wait(self.left_s):
            return
        status, told = self.post(f"/sessions/{made['id']}/end", {"reward": 0.0})
        late = status in (GONE, CONFLICT) or told.get("status") == "failed"
        self.expect(late, f"an end after the time limit: {status} {told}")
        self.note("left", id=made["id"])

    def expect(self, holds: bool, problem: str) -> None:
        """Notes an answer that is not as promised."""
        if not holds:
            self.note("problem", problem=problem[:500])


def share_of_letters(text: str) -> float:
    """Returns the share of a text's characters that are letters of English."""
    return sum(letter in string.ascii_letters for letter in text) / max(len(text), 1)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("url")
    parser.add_argument("key_file", type=Path)
    parser.add_argument("log", type=Path)
    parser.add_argument("--seed", type=int, default=1, help="of the kinds of sessions (default: %(default)s)")
    parser.add_argument("--rewards", choices=("own", "shuffled"), default="own")
    parser.add_argument("--left-s", type=float, default=8.0, help="silence of sessions that are left (default: %(default)s)")
    parser.add_argument("--threads", type=int, default=12, help="sessions at once (default: %(default)s)")
    parser.add_argument("--conversations", type=int, default=1, help="of a session (default: %(default)s)")
    given = parser.parse_args()
    application = Application(
        url=given.url,
        key=given.key_file.read_text().strip(),
        log=given.log,
        seed=given.seed,
        shuffled=given.rewards == "shuffled",
        left_s=given.left_s,
        conversations=given.conversations,
    )

    def end(number: int, frame: FrameType | None) -> None:
        application.over.set()

    signal.signal(signal.SIGTERM, end)
    threads = [threading.Thread(target=application.work, daemon=True) for _ in range(given.threads)]
    for thread in threads:
        thread.start()
    while not application.over.wait(1.0):
        pass
    time.sleep(WAIT_S)
    return 0


if __name__ == "__main__":
    sys.exit(main())
