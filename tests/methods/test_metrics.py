"""Figures from traces, and what a stop string or a profile does to a run."""

import jax
import numpy as np
import pytest
from method_cases import make_case, prompts
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from jaxspec import Finish, Sampling, stream
from jaxspec.metrics import Mean, measure
from jaxspec.types import Stats


def stats(rows):
    """Stats from, per row, its rounds as (drafted, accepted) and the tokens it emitted."""
    width = 8
    drafted, accepted = np.zeros((len(rows), width), np.int16), np.zeros((len(rows), width), np.int16)
    for b, (rounds, _) in enumerate(rows):
        for r, (d, a) in enumerate(rounds):
            drafted[b, r], accepted[b, r] = d, a
    return Stats(
        np.array([len(rounds) for rounds, _ in rows], np.int32),
        np.array([n for _, n in rows], np.int32),
        drafted,
        accepted,
    )


def test_figures_by_hand():
    """A long row that accepts much, a short one that accepts nothing, one that the prefill ended, one of one round."""
    figures = measure(
        stats(
            [
                ([(3, 3), (3, 2), (3, 3), (2, 2), (3, 3)], 4 + 3 + 4 + 3 + 1),  # the last round was cut to one token
                ([(3, 0), (3, 0)], 1 + 1),
                ([], 0),
                ([(3, 3)], 2),
            ]
        )
    )
    assert figures.rounds == 8
    assert figures.emitted == 15 + 2 + 2
    assert figures.tokens_per_round == Mean(pytest.approx((3 + 1 + 2) / 3), pytest.approx(19 / 8))
    # whole rounds: 3, 2, 3, 2 of 11 in the first row, 0 of 3 in the second
    assert figures.acceptance == Mean(pytest.approx((10 / 11 + 0) / 2), pytest.approx(10 / 14))
    assert figures.offered_by_position == (5, 4, 3)
    assert figures.acceptance_by_position == pytest.approx((4 / 5, 1, 2 / 3))


def test_nothing_was_drafted():
    figures = measure(stats([([(0, 0), (0, 0)], 2)]))
    assert figures.tokens_per_round == Mean(1, 1)
    assert figures.acceptance == Mean(None, None)
    assert figures.acceptance_by_position == ()


def test_a_position_that_was_never_reached():
    figures = measure(stats([([(2, 0), (2, 0), (2, 2)], 5)]))
    assert figures.acceptance_by_position == (0, None)
    assert figures.offered_by_position == (2, 0)


def test_a_run_adds_up():
    prompt, length = prompts()
    out = make_case("vegas", layers=1).generate(prompt, length, jax.random.key(1), max_new_tokens=24)
    figures = measure(out.stats)
    assert figures.emitted == np.sum(out.lengths - 1)
    # the product of conditional acceptances is the share of whole rounds that accepted everything
    whole = np.arange(24) < out.stats.rounds[:, None] - 1
    share = np.sum(whole & (out.stats.accepted == 2)) / whole.sum()
    assert np.prod(figures.acceptance_by_position) == pytest.approx(share)
    assert 0 < share < 1


def streamed(case, **options):
    prompt, length = prompts()
    return list(
        stream(
            case.models.target,
            case.models.params,
            prompt,
            length,
            jax.random.key(1),
            method=case.method,
            max_new_tokens=24,
            **options,
        )
    )


def test_rounds_under_way_when_a_stop_string_is_found_are_not_counted():
    case = make_case("vegas", layers=1)
    full = streamed(case, sampling=Sampling(1.0))
    tokenizer = Tokenizer(WordLevel({f"<{i}>": i for i in range(19)}, unk_token="<0>"))
    tokens = [[t for chunk in full for t in chunk.tokens[b]] for b in range(3)]
    # the rows shall end in different rounds: the first of them inside a block, while the others go on for a while
    places = {t: [row.index(t) if t in row else 99 for row in tokens] for t in range(19)}
    block_ends = [set(np.cumsum(full[-1].stats.accepted[b] + 1)) for b in range(3)]
    stop = next(
        t
        for t, at in places.items()
        if 2 <= min(at) <= 14 and sorted(at)[1] > min(at) + 5 and min(at) not in block_ends[int(np.argmin(at))]
    )
    chunks = streamed(case, sampling=Sampling(1.0), tokenizer=tokenizer, stop=(f"<{stop}>",))
    counted, before = chunks[-1].stats, full[-1].stats
    for b in range(3):
        emitted = tokens[b].index(stop) + 1 if stop in tokens[b] else 24
        rounds = np.searchsorted(1 + np.cumsum(before.accepted[b] + 1), min(emitted, 24)) + 1
        assert sum(len(chunk.tokens[b]) for chunk in chunks) == emitted
        assert counted.emitted[b] == emitted - 1
        assert counted.rounds[b] == rounds
        np.testing.assert_array_equal(counted.accepted[b, :rounds], before.accepted[b, :rounds])
        assert not counted.accepted[b, rounds:].any()
    assert chunks[-1].finish[int(np.argmin(places[stop]))] == Finish.STOP
    assert len(set(counted.rounds.tolist())) > 1


def test_a_profile_changes_nothing_but_the_time():
    case = make_case("vegas", layers=1)
    plain, profiled = streamed(case), streamed(case, profile=True)
    assert [chunk.tokens for chunk in profiled] == [chunk.tokens for chunk in plain]
    assert all(chunk.profile is None for chunk in [*plain, *profiled[:-1]])
    profile = profiled[-1].profile
    assert profile.num_rounds >= 2
    for seconds in profile[:5]:
        assert 0 < seconds < 5
