from hypothesis import given
from hypothesis import strategies as st

from generators.seeds import sampling_seed


@given(st.integers(0, 2**31), st.integers(1, 5))
def test_neighbouring_prompts_and_attempts_get_seeds_far_apart(seed: int, attempt: int) -> None:
    here = sampling_seed(seed, attempt)
    for other in (sampling_seed(seed + 1, attempt), sampling_seed(seed, attempt + 1)):
        assert abs(here - other) > 1000  # engines add the index of a completion
    assert 0 <= here < 2**62


def test_a_seed_does_not_change_from_run_to_run() -> None:
    assert sampling_seed(0, 1) == 853735418271388390
