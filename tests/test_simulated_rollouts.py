# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""Random rollouts on simulated devices: layers read the right KV, episodes end, no page is lost."""

import pytest

from tests.support.random_rollouts import RandomRollout


@pytest.mark.parametrize("seed", range(36))
def test_rounds_read_the_right_kv(seed):
    RandomRollout(seed).play()


@pytest.mark.parametrize("seed", [0, 1, 88, 124])
def test_pages_suffice_for_samples_read_again_while_environments_work(seed):
    # In 88 and 124 no page is left for the token that waits behind such a sample, if the block
    # manager does not count it.
    RandomRollout(seed, rereads=True).play()


@pytest.mark.slow
@pytest.mark.parametrize("rereads", [False, True])
@pytest.mark.parametrize("first", range(1000, 1200, 50))
def test_many_rounds_read_the_right_kv(first, rereads):
    for seed in range(first, first + 50):
        try:
            RandomRollout(seed, rereads=rereads).play()
        except Exception as error:
            error.add_note(f"RandomRollout({seed}, rereads={rereads})")
            raise
