"""The ledger: legal moves only, and a state from which nothing is lost and nothing repeated."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlhub.rollout_service.executor.ledger import Phase, PromptLedger


def moved(ledger: PromptLedger, ordinal: int, to: Phase) -> None:
    """Issue the prompt and bring it there."""
    ledger.issue(ordinal)
    if to is not Phase.ISSUED:
        ledger.run(ordinal)
    if to is Phase.REJECTED:
        ledger.reject(ordinal, "no")
    elif to in (Phase.FINISHED, Phase.TRAINED, Phase.DROPPED):
        ledger.finish(ordinal)
        if to is Phase.TRAINED:
            ledger.train(ordinal)
        elif to is Phase.DROPPED:
            ledger.drop(ordinal, "old")


def test_what_has_ended_leaves_and_is_told() -> None:
    told = []
    ledger = PromptLedger(on_end=lambda *end: told.append(end))
    for ordinal, phase in enumerate((Phase.TRAINED, Phase.RUNNING, Phase.REJECTED, Phase.DROPPED, Phase.FINISHED)):
        moved(ledger, ordinal, phase)
    assert told == [((0,), Phase.TRAINED, ""), ((2,), Phase.REJECTED, "no"), ((3,), Phase.DROPPED, "old")]
    assert ledger.counts == {Phase.TRAINED: 1, Phase.REJECTED: 1, Phase.DROPPED: 1}
    assert (ledger.frontier, ledger.next_ordinal) == (1, 5)
    assert ledger.in_phase(Phase.RUNNING, Phase.FINISHED) == [1, 4]
    assert ledger.phase(0) is None and ledger.phase(4) is Phase.FINISHED


def test_moves_that_would_lose_or_repeat_a_prompt() -> None:
    ledger = PromptLedger(first=7)
    with pytest.raises(ValueError, match="expected ordinal 7, got 8"):
        ledger.issue(8)
    moved(ledger, 7, Phase.RUNNING)
    with pytest.raises(ValueError, match="prompt 7 cannot become trained: it is running"):
        ledger.train(7)
    ledger.finish(7)
    ledger.train(7)
    with pytest.raises(ValueError, match="prompt 7 cannot become trained: it has ended"):
        ledger.train(7)
    with pytest.raises(ValueError, match="prompt 8 cannot become running: it was never issued"):
        ledger.run(8)


@settings(max_examples=30, deadline=None)
@given(st.lists(st.sampled_from(list(Phase)), max_size=40), st.data())
def test_every_prompt_that_has_not_ended_is_issued_again(phases: list[Phase], data: st.DataObject) -> None:
    ledger = PromptLedger()
    for ordinal, phase in enumerate(phases):
        moved(ledger, ordinal, phase)
    finished = [o for o, phase in enumerate(phases) if phase is Phase.FINISHED]
    kept = data.draw(st.sets(st.sampled_from(finished))) if finished else set()
    resumed = PromptLedger()
    resumed.load_state(json.loads(json.dumps(ledger.state())), kept)
    unended = [o for o, phase in enumerate(phases) if phase in (Phase.ISSUED, Phase.RUNNING, Phase.FINISHED)]
    assert resumed.in_phase(Phase.ISSUED) == [o for o in unended if o not in kept]
    assert resumed.in_phase(Phase.FINISHED) == sorted(kept)
    assert resumed.next_ordinal == len(phases) and resumed.counts == ledger.counts
    assert resumed.frontier == min(unended, default=len(phases))


def test_samples_of_prompts_that_have_ended_are_refused() -> None:
    ledger = PromptLedger()
    moved(ledger, 0, Phase.TRAINED)
    with pytest.raises(ValueError, match="such as 0"):
        PromptLedger().load_state(ledger.state(), finished=[0])
