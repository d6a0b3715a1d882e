import gc
import subprocess
import sys

from rlhub.utils.collector import without_collector

SET_ASIDE = """
import gc

from rlhub.utils.collector import heap_set_aside


class Knot:
    def __init__(self):
        self.itself = self


def alive():
    return sum(isinstance(thing, Knot) for thing in gc.get_objects())


Knot()
kept = Knot()
with heap_set_aside():
    assert gc.get_freeze_count() > 0
    assert alive() == 0, "what was set aside is in no generation, and the garbage is gone"
    Knot()
    gc.collect()
    assert alive() == 0, "what is made later is collected"
assert gc.get_freeze_count() == 0
assert alive() == 1, "the garbage was not kept"
"""


def test_what_lives_is_set_aside_and_garbage_is_not_kept() -> None:
    """In a process of its own: this one's heap is large, and set aside already."""
    subprocess.run([sys.executable, "-c", SET_ASIDE], check=True, timeout=300)


def test_the_collector_is_off_for_the_block_and_as_it_was_afterwards() -> None:
    with without_collector():
        with without_collector():
            pass
        assert not gc.isenabled()
    assert gc.isenabled()
