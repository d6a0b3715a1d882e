import subprocess
import sys

import pytest

from rlhub.rewards.registry import REWARD_MANAGERS, SCORERS, SOURCES, compute_score


def test_the_data_source_chooses_the_scorer() -> None:
    assert compute_score("openai/gsm8k", "#### 5", "5") == 1.0
    assert compute_score("exact", " a  b\n", "a b") == 1.0
    assert compute_score("exact", "a c", "a b") == 0.0
    assert compute_score("lighteval/MATH", "\\boxed{\\frac12}", "0.5") == 1.0


def test_an_unknown_source_names_the_nearest_and_the_remedy() -> None:
    with pytest.raises(LookupError, match=r"'gsm8'.*did you mean 'gsm8k'.*custom_reward_function.path"):
        compute_score("gsm8", "", "")


def test_every_row_of_the_tables_can_be_loaded() -> None:
    assert set(SOURCES.values()) == set(SCORERS.names())
    for registry in (SCORERS, REWARD_MANAGERS):
        for name in registry.names():
            assert callable(registry.get(name))


def test_scoring_gsm8k_loads_neither_torch_nor_sympy() -> None:
    code = (
        "import sys; from rlhub.rewards.registry import compute_score; assert compute_score('gsm8k', '#### 5', '5') == 1; "
        "assert not {'torch', 'sympy', 'ray', 'numpy'} & set(sys.modules), sorted(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=300)
