"""The rule by which replicas follow the queue: over scripted loads, and in a simulation of a service."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

from rlhub.rollout_service.elastic import RETRY_S, Decision, QueueRule, ReplicaBounds, ReplicaLoad

PLACES = 4
BOUNDS = ReplicaBounds(least=1, most=3, by_queue=True)


def rule(least: int = 1, most: int | None = 3, *, start_s: float = 4.0) -> QueueRule:
    return QueueRule(bounds=ReplicaBounds(least=least, most=most, by_queue=True), places=PLACES, start_s=start_s)


@dataclass
class Script:
    """Loads, one a second."""

    rule: QueueRule
    replicas: int = 1
    at: float = 0.0
    completed: int = 0
    decisions: list[tuple[float, Decision]] = field(default_factory=list)

    def play(self, seconds: int, *, requests: int, each: int = 0, publication: int | None = None, busy: bool = False) -> None:
        """requests: waiting and running; each: completed a second."""
        for _ in range(seconds):
            self.at += 1.0
            self.completed += each
            running = min(requests, self.replicas * PLACES)
            load = ReplicaLoad(
                at=self.at,
                replicas=self.replicas,
                waiting=requests - running,
                running=running,
                completed=self.completed,
                publication=publication,
            )
            if (found := self.rule.decide(load, busy=busy)) is not None:
                self.decisions.append((self.at, found))

    @property
    def actions(self) -> list[str]:
        return [decision.action for _, decision in self.decisions]


def test_a_queue_that_takes_longer_than_a_start_adds_a_replica_with_the_reason() -> None:
    script = Script(rule())
    script.play(30, requests=44, each=1)  # 40 wait, served one a second: 40 s, and a start takes 4 s
    (at, found), *_ = script.decisions
    assert found.action == "add" and 5 <= at <= 12
    assert found.reason.startswith("40 requests wait for a place, the last for ") and found.reason.endswith("starts in 4.0 s")


def test_a_queue_that_is_served_before_a_replica_could_start_adds_none() -> None:
    script = Script(rule(start_s=60.0))
    script.play(300, requests=44, each=1)
    assert script.actions == []
    slower = Script(rule(start_s=20.0))
    slower.play(300, requests=44, each=1)
    assert slower.actions[0] == "add", "the same queue, and a faster start"


def test_the_estimated_wait_is_that_of_a_queue_with_known_service_times() -> None:
    one = rule(start_s=1e9)
    script = Script(one)
    script.play(200, requests=44, each=2)
    load = ReplicaLoad(at=201.0, replicas=1, waiting=40, running=4, completed=script.completed)
    assert abs(one.queue_s(load) - 20.0) < 1.5, "40 requests at 2 a second"


def test_a_short_burst_adds_none() -> None:
    script = Script(rule())
    for _ in range(20):
        script.play(4, requests=44, each=1)  # below hold_s
        script.play(4, requests=4, each=1)
    assert script.actions == []


def test_requests_that_all_have_places_add_none() -> None:
    script = Script(rule())
    script.play(500, requests=PLACES, each=0)
    assert script.actions == []


def test_never_above_the_largest_nor_below_the_smallest_number() -> None:
    full = Script(rule(), replicas=3)
    full.play(300, requests=100, each=1)
    assert full.actions == []
    idle = Script(rule(least=2), replicas=2)
    idle.play(600, requests=0)
    assert idle.actions == []
    endless = Script(rule(most=None), replicas=50)
    endless.play(60, requests=1000, each=1)
    assert "add" in endless.actions


def test_below_the_smallest_number_one_is_added_at_once() -> None:
    script = Script(rule(least=2), replicas=1)
    script.play(1, requests=0)
    assert script.actions == ["add"] and "min_replicas=2" in script.decisions[0][1].reason


def test_idle_replicas_are_removed_after_a_while_and_a_peak_begins_it_anew() -> None:
    script = Script(rule(), replicas=3)
    script.play(50, requests=2, each=1)
    script.play(1, requests=12, each=1)  # a peak
    script.play(55, requests=2, each=1)
    assert script.actions == []
    script.play(20, requests=2, each=1)
    at, found = script.decisions[0]
    assert found.action == "remove" and 110 <= at <= 115
    assert found.reason.startswith("at most 2 requests at once in 6") and found.reason.endswith("2 replicas have 8 places")


def test_what_is_left_must_have_places_to_spare() -> None:
    tight = Script(rule(), replicas=3)
    tight.play(300, requests=7, each=1)  # of 8 places of the two that would be left
    assert tight.actions == []
    loose = Script(rule(), replicas=3)
    loose.play(300, requests=6, each=1)
    assert loose.actions[0] == "remove"


def test_a_slow_start_makes_removals_rare() -> None:
    script = Script(rule(start_s=30.0), replicas=3)
    script.play(299, requests=0)
    assert script.actions == []
    script.play(5, requests=0)
    assert script.actions[:1] == ["remove"]


def test_the_pause_in_which_the_policy_trains_is_not_idleness() -> None:
    """Steps of 400 s, of which generation takes 100 s with all replicas busy; a window of 60 s alone would remove one."""
    script = Script(rule(), replicas=3)
    for publication in range(5):
        script.play(100, requests=12, each=1, publication=publication)
        script.play(300, requests=0, publication=publication)
    assert script.actions == []
    for publication in range(5, 9):  # now generation needs one replica only
        script.play(100, requests=3, each=1, publication=publication)
        script.play(300, requests=0, publication=publication)
    assert script.actions[0] == "remove"


def test_a_change_begins_observation_anew() -> None:
    script = Script(rule(), replicas=3)
    script.play(59, requests=0)
    script.rule.changed()
    script.play(59, requests=0)
    assert script.actions == []
    script.play(5, requests=0)
    assert script.actions[0] == "remove"


def test_nothing_is_decided_while_a_change_runs() -> None:
    script = Script(rule())
    script.play(60, requests=44, each=1, busy=True)
    assert script.actions == []
    script.play(10, requests=44, each=1)
    assert "add" in script.actions


def test_a_replica_that_cannot_be_added_is_tried_again_after_a_time_that_doubles() -> None:
    one = rule()
    tries: list[float] = []
    script = Script(one)
    for _ in range(400):
        before = len(script.decisions)
        script.play(1, requests=44, each=1)
        if len(script.decisions) > before:
            tries.append(script.at)
            one.failed(script.at)
    gaps = [later - earlier for earlier, later in zip(tries, tries[1:], strict=False)]
    assert gaps[:4] == [RETRY_S, 2 * RETRY_S, 4 * RETRY_S, 8 * RETRY_S]
    one.changed(3.0)  # it works again
    script.play(200, requests=44, each=1)
    tries.clear()
    one.failed(script.at)
    begun = script.at
    script.play(30, requests=44, each=1)
    assert script.decisions[-1][0] > begun and one.start_s == 3.0


def flaps(waves: int, *, broken: bool = False) -> tuple[int, int, int]:
    """A service under waves of requests; returns its changes, and its smallest and largest number of replicas.

    broken: without hysteresis, every look decides by the moment.
    """
    one = rule(start_s=5.0)
    if broken:
        one.hold_s = one.idle_s = one.start_s = 0.0
    rng = random.Random(waves)
    replicas, pending, changes, starting, seen, completed = 1, 0, 0, 0, [1], 0
    for second in range(waves * 60):
        if second % 60 == 0:
            pending += rng.randrange(20, 40)
        served = min(pending, replicas * PLACES)
        done = served // 4  # each takes four seconds
        pending, completed = pending - done, completed + done
        running = min(pending, replicas * PLACES)
        load = ReplicaLoad(
            at=float(second),
            replicas=replicas,
            waiting=pending - running,
            running=running,
            completed=completed,
            publication=None if broken else second // 60,
        )
        found = one.decide(load, busy=starting > 0)
        if starting:
            starting -= 1
            if not starting:
                replicas += 1
                one.changed(0.0 if broken else 5.0)
        elif found is not None:
            changes += 1
            one.changed()
            starting, replicas = (5, replicas) if found.action == "add" else (0, replicas - 1)
        seen.append(replicas)
    return changes, min(seen), max(seen)


def test_waves_do_not_make_replicas_come_and_go() -> None:
    changes, least, most = flaps(60)
    assert (least, most) == (1, 3) and changes <= 4
    assert flaps(60, broken=True)[0] > 20, "the control: without hysteresis they do"
