"""Windows of stochastic transitions: their place in each training step, and wrong settings."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from unified_trainer.methods.rl.sde_windows import WindowConfig


def firsts(config: WindowConfig, steps: range, transitions: int) -> list[int]:
    """Return the first transition of the window in each training step; every window has the configured size."""
    windows = [config.at(step, transitions, np.random.default_rng(step)) for step in steps]
    assert {len(window) for window in windows} == {config.size}
    return [window.start for window in windows]


def test_without_a_size_all_transitions_are_in_the_window():
    assert WindowConfig().at(123, 7, np.random.default_rng(0)) == range(7)


def test_progressive_moves_and_starts_over():
    assert firsts(WindowConfig(size=3, every=2), range(9), 6) == [0, 0, 1, 1, 2, 2, 3, 3, 0]


def test_a_stride_ends_at_the_last_place_also_where_it_does_not_divide():
    """Otherwise the last transitions would never be trained."""
    assert firsts(WindowConfig(size=2, every=1, stride=2), range(5), 7) == [0, 2, 4, 5, 0]


def test_random_covers_all_places_and_depends_on_the_step():
    config = WindowConfig(size=2, schedule="random", every=10)
    places = firsts(config, range(60), 5)
    assert set(places) == {0, 1, 2, 3}
    assert places == firsts(config, range(60), 5)


@given(
    size=st.integers(1, 9),
    every=st.integers(1, 5),
    stride=st.integers(1, 4),
    schedule=st.sampled_from(["progressive", "random"]),
    step=st.integers(0, 500),
)
def test_a_window_never_leaves_the_table(size, every, stride, schedule, step):
    window = WindowConfig(size, schedule, every, stride).at(step, 9, np.random.default_rng(step))
    assert len(window) == size and window.start >= 0 and window.stop <= 9


def test_a_window_of_more_transitions_than_there_are_names_its_key():
    said = r"algorithm\.window\.size must be at most 5, .* with this sampler\.num_steps and .*, not 6"
    with pytest.raises(ValueError, match=said):
        WindowConfig(size=6).check(5)
