"""What every method must do, whatever it drafts with. New method files are found and tested without being named."""

import dataclasses
import itertools
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from method_cases import (
    LENGTHS,
    NEVER,
    G,
    assert_same_greedy,
    full_logits,
    make_case,
    plain_case,
    prompts,
)

from jaxspec import Finish, Sampling, stream
from jaxspec import decode as decode_module
from jaxspec.enumeration import plain_distribution, speculative_distribution
from jaxspec.methods import Models, find_methods
from jaxspec.profiling import fused_step
from jaxspec.requests import check_request
from jaxspec.types import LayerCache

NEW = 24  # tokens of the runs that several tests share
NAMES = sorted(find_methods())
LOSSLESS = [name for name in NAMES if find_methods()[name].lossless]
KEYS = jax.vmap(jax.random.fold_in, (None, 0))(jax.random.key(5), jnp.arange(3))

every_method = pytest.mark.parametrize("name", NAMES)
lossless_method = pytest.mark.parametrize("name", LOSSLESS)


@cache
def case_of(name, **changes):
    return make_case(name, **changes)


@cache
def greedy_run(name):
    """The greedy output that most tests look at; `plain` is the reference of all others."""
    prompt, length = prompts()
    return jax.tree.map(
        np.asarray,
        case_of(name).generate(prompt, length, KEYS, max_new_tokens=NEW, eos_ids=(NEVER,), logprobs=True),
    )


@cache
def sampled_run(name):
    """Of one layer, as compiling a sampled round takes long."""
    prompt, length = prompts()
    out = case_of(name, layers=1).generate(prompt, length, KEYS, max_new_tokens=NEW, sampling=Sampling(1.0))
    return jax.tree.map(np.asarray, out)


def run_state(name, change=lambda state: state, case=None, stop_at=(NEW, NEW, NEW)):
    """The state at the end of a greedy run, with `change` applied before every round.

    Row b is stopped after `stop_at[b]` rounds if it runs that long.
    """
    case = case or case_of(name)
    prompt, length = prompts()
    request = check_request(
        case.models.target, prompt, length, KEYS, case.method, Sampling(), NEW, (), 0, case.models.draft_params
    )
    state = jax.jit(decode_module.prefill, static_argnames=("method", "max_new_tokens", "logprobs"))(
        case.models, request, case.method, NEW, logprobs=True
    )
    for round in itertools.count():
        if not np.any(state.finish == Finish.RUNNING):
            return state
        state, _ = fused_step(case.models, change(state), request, np.array(stop_at) <= round, case.method, NEW)


def fill_caches(state, rows, value):
    """The state with `value` in those rows, bool [B, S], of the target's cache and of a draft model's."""

    def fill(node):
        if not isinstance(node, LayerCache):
            return node
        return LayerCache(*(jnp.where(rows[:, :, None, None], value, x) for x in node))

    def is_cache(node):
        return isinstance(node, LayerCache)

    return state.replace(
        cache=jax.tree.map(fill, state.cache, is_leaf=is_cache),
        method_state=jax.tree.map(fill, state.method_state, is_leaf=is_cache),
    )


@cache
def clean_state(name):
    return run_state(name)


@lossless_method
def test_greedy_output_is_that_of_plain_decoding(name):
    prompt, _ = prompts()
    out, plain = greedy_run(name), greedy_run("plain")
    for b in range(3):
        assert_same_greedy(case_of(name).models, prompt[b, : LENGTHS[b]], out.tokens[b], plain.tokens[b])
    assert set(out.finish) == {Finish.LENGTH}
    if case_of(name).method.max_draft:
        # a method that accepts all or nothing here would leave the other tests without a subject
        assert 0 < out.stats.accepted.sum() < out.stats.drafted.sum()


@every_method
def test_logprobs_are_those_of_a_teacher_forced_pass(name):
    if not case_of(name).method.lossless:
        pytest.skip("verifies with another distribution")
    prompt, _ = prompts()
    out = greedy_run(name)
    for b in range(3):
        sequence = [*prompt[b, : LENGTHS[b]], *out.tokens[b]]
        logits = full_logits(case_of(name).models, sequence)[LENGTHS[b] - 1 : -1]
        expected = jax.nn.log_softmax(logits)[np.arange(NEW), out.tokens[b]]
        np.testing.assert_allclose(out.logprobs[b], expected, atol=1e-5)


@every_method
def test_an_equal_method_does_not_recompile(name):
    prompt, length = prompts()
    greedy_run(name)
    compiled = decode_module._generate._cache_size()
    again = dataclasses.replace(case_of(name).method)
    assert again == case_of(name).method
    assert again is not case_of(name).method
    # other prompts, lengths, keys and end ids, and a width that falls into the same bucket
    shorter = prompt[:, :33]
    case_of(name).generate(
        shorter, np.minimum(length, 30), KEYS[::-1], method=again, max_new_tokens=NEW, eos_ids=(1,), logprobs=True
    )
    assert decode_module._generate._cache_size() == compiled


@every_method
def test_eos_ends_a_row_at_every_offset_of_a_block(name):
    prompt, length = prompts()
    full = greedy_run(name)
    offsets = set()
    for eos in np.unique(full.tokens):
        out = case_of(name).generate(prompt, length, KEYS, max_new_tokens=NEW, eos_ids=(int(eos),), logprobs=True)
        for b in range(3):
            places = np.flatnonzero(full.tokens[b] == eos)
            n = places[0] + 1 if places.size else NEW
            assert out.lengths[b] == n
            assert out.finish[b] == (Finish.EOS if places.size else Finish.LENGTH)
            np.testing.assert_array_equal(out.tokens[b, :n], full.tokens[b, :n])
            assert np.all(out.tokens[b, n:] == 0)
            assert out.stats.emitted[b] == n - 1
            if n > 1:
                # the first token is the prefill's; each round of the full run starts a block
                starts = 1 + np.cumsum([0, *(full.stats.accepted[b, : full.stats.rounds[b]] + 1)])
                offsets.add(int(n - 1 - starts[starts <= n - 1].max()))
    assert offsets == set(range(case_of(name).method.max_draft + 1))


@lossless_method
def test_max_new_tokens_under_a_callers_jit(name):
    """Every limit up to two past a block, one program for all, prompts and lengths traced."""
    case, plain = case_of(name, layers=1), plain_case(layers=1)
    prompt, length = prompts()
    limits = range(1, case.method.max_draft + 3)

    @jax.jit
    def run(prompt, length):
        return [case.generate(prompt, length, KEYS, max_new_tokens=n) for n in limits]

    expected = plain.generate(prompt, length, KEYS, max_new_tokens=G + 2).tokens
    for n, out in zip(limits, run(prompt, length), strict=True):
        assert out.tokens.shape == (3, n)
        np.testing.assert_array_equal(out.tokens, expected[:, :n])
        assert np.all(out.lengths == n)
        assert np.all(out.stats.emitted == n - 1)


@every_method
def test_a_row_of_a_batch_equals_its_solo_run(name):
    """Sampled, so that keys count as well; the solo rows have keys of their own and no neighbours."""
    prompt, length = prompts()
    batch = sampled_run(name)
    for b in range(3):
        solo = case_of(name, layers=1).generate(
            prompt[b : b + 1], length[b : b + 1], KEYS[b : b + 1], max_new_tokens=NEW, sampling=Sampling(1.0)
        )
        np.testing.assert_array_equal(solo.tokens[0], batch.tokens[b])
        assert solo.stats.rounds[0] == batch.stats.rounds[b]


@every_method
def test_a_rows_neighbours_do_not_matter(name):
    prompt, length = prompts()
    batch = sampled_run(name)
    prompt, length = prompt.copy(), length.copy()
    prompt[0], length[0] = prompt[0, ::-1], 13
    out = case_of(name, layers=1).generate(
        prompt, length, KEYS.at[0].set(jax.random.key(99)), max_new_tokens=NEW, sampling=Sampling(1.0)
    )
    np.testing.assert_array_equal(out.tokens[1:], batch.tokens[1:])
    assert not np.array_equal(out.tokens[0], batch.tokens[0])


@every_method
def test_stream_yields_what_generate_returns(name):
    case, expected = case_of(name), greedy_run(name)
    prompt, length = prompts()
    chunks = list(
        stream(
            case.models.target,
            case.models.params,
            prompt,
            length,
            KEYS,
            method=case.method,
            max_new_tokens=NEW,
            draft_params=case.models.draft_params,
        )
    )
    tokens = [[token for chunk in chunks for token in chunk.tokens[b]] for b in range(3)]
    np.testing.assert_array_equal(tokens, expected.tokens)
    assert all(len(ids) <= case.method.max_draft + 1 for chunk in chunks for ids in chunk.tokens)
    np.testing.assert_array_equal(chunks[-1].stats.accepted, expected.stats.accepted)
    assert [chunk.stats is None for chunk in chunks] == [True] * (len(chunks) - 1) + [False]


@every_method
@pytest.mark.parametrize("poison", [np.nan, 1e4])
def test_scratch_rows_may_hold_anything(name, poison):
    def poisoned(state):
        return fill_caches(state, jnp.arange(state.cache[0].k.shape[1]) >= state.length[:, None], poison)

    clean, dirty = clean_state(name), run_state(name, poisoned)
    np.testing.assert_array_equal(dirty.tokens[:, :NEW], clean.tokens[:, :NEW])
    np.testing.assert_array_equal(dirty.stats.accepted, clean.stats.accepted)
    for b in range(3):
        rows = slice(0, int(clean.length[b]))
        for kept, other in zip(jax.tree.leaves(clean.cache), jax.tree.leaves(dirty.cache), strict=True):
            np.testing.assert_array_equal(kept[b, rows], other[b, rows])


@pytest.mark.parametrize(("name", "backend"), [*((name, None) for name in NAMES), ("vegas", "interpret")])
def test_a_row_that_has_ended_is_not_read_and_keeps_its_state(name, backend):
    """Rows that end at different times, with their whole caches, committed or not, NaN from then on."""
    case = case_of(name)
    if backend is not None:
        target = dataclasses.replace(case.models.target, backend=backend)
        case = dataclasses.replace(case, models=case.models.replace(target=target))

    def poisoned(state):
        ended = (state.finish != Finish.RUNNING) | (np.array(stop_at) <= int(state.round) - 1)
        return fill_caches(state, jnp.broadcast_to(ended[:, None], (3, state.cache[0].k.shape[1])), jnp.nan)

    stop_at = (2, NEW, 4)
    full, clean = clean_state(name), run_state(name, case=case, stop_at=stop_at)
    dirty = run_state(name, poisoned, case=case, stop_at=stop_at)
    assert clean.finish.tolist() == [Finish.STOP, Finish.LENGTH, Finish.STOP]
    for mine in (clean, dirty):
        # scratch columns included: the rounds after a row's end wrote them
        assert np.all(np.isfinite(mine.logprobs))
        np.testing.assert_array_equal(mine.length, LENGTHS + mine.num_tokens - 1)
        np.testing.assert_array_equal(mine.stats.emitted, mine.num_tokens - 1)
        np.testing.assert_array_equal(mine.stats.rounds, np.minimum(stop_at, full.stats.rounds))
        for b, (count, rounds) in enumerate(zip(mine.num_tokens, mine.stats.rounds, strict=True)):
            np.testing.assert_array_equal(mine.tokens[b, :count], full.tokens[b, :count])
            np.testing.assert_array_equal(mine.stats.accepted[b, :rounds], full.stats.accepted[b, :rounds])
    assert np.all(clean.num_tokens[::2] < NEW)
    for mine, b in [(clean, 0), (clean, 1), (clean, 2), (dirty, 1)]:
        rows = slice(0, int(clean.length[b]))
        for kept, other in zip(jax.tree.leaves(mine.cache), jax.tree.leaves(full.cache), strict=True):
            np.testing.assert_allclose(kept[b, rows], other[b, rows], atol=0 if backend is None else 1e-5)


@lossless_method
def test_the_committed_cache_is_that_of_plain_decoding(name):
    state, plain = clean_state(name), clean_state("plain")
    np.testing.assert_array_equal(state.tokens[:, :NEW], plain.tokens[:, :NEW])
    np.testing.assert_array_equal(state.length, plain.length)
    np.testing.assert_array_equal(state.length, LENGTHS + NEW - 1)
    for b in range(3):
        rows = slice(0, int(plain.length[b]))
        for mine, other in zip(jax.tree.leaves(state.cache), jax.tree.leaves(plain.cache), strict=True):
            assert mine.shape[2:] == other.shape[2:]
            np.testing.assert_allclose(mine[b, rows], other[b, rows], atol=1e-5)


@every_method
@pytest.mark.parametrize("run", [greedy_run, sampled_run])
def test_the_trace_adds_up(name, run):
    out = run(name)
    stats, g = out.stats, case_of(name).method.max_draft
    np.testing.assert_array_equal(stats.emitted, out.lengths - 1)
    for b in range(3):
        rounds = stats.rounds[b]
        drafted, accepted = stats.drafted[b, :rounds], stats.accepted[b, :rounds]
        assert np.all((accepted >= 0) & (accepted <= drafted) & (drafted <= g))
        assert not stats.drafted[b, rounds:].any()
        assert not stats.accepted[b, rounds:].any()
        # every round but the last emits all it accepted and one token more; the last may be cut by the limit
        last = stats.emitted[b] - np.sum(accepted[:-1] + 1)
        assert 1 <= last <= accepted[-1] + 1


@every_method
def test_a_row_with_nan_logits_is_flagged_and_the_others_stay(name):
    prompt, length = prompts()
    case, expected = case_of(name), greedy_run(name)
    prompt = prompt.copy()
    prompt[1, 3] = NEVER
    params = {**case.models.params, "embedding": case.models.params["embedding"].at[NEVER].set(jnp.nan)}
    out = case.generate(prompt, length, KEYS, params=params, max_new_tokens=NEW, eos_ids=(NEVER,), logprobs=True)
    assert out.finish.tolist() == [Finish.LENGTH, Finish.NAN, Finish.LENGTH]
    assert out.lengths[1] == 0
    np.testing.assert_array_equal(out.tokens[::2], expected.tokens[::2])


@lossless_method
def test_every_path_enumerated(name):
    """Two rounds, three ids: the output's joint distribution is the target's."""
    case = make_case(name, layers=1, vocab=3)
    if not case.method.max_draft:
        pytest.skip("nothing is drafted")
    prompt = [int(t) for t in np.random.default_rng(2).integers(0, 3, 20)]
    mine, accepted = speculative_distribution(case.models, case.method, prompt, 1, Sampling(1.0), 2)
    plain = plain_distribution(Models(case.models.target, case.models.params), prompt, 1, Sampling(1.0), mine.ndim)
    assert 0.5 * np.abs(mine - plain).sum() < 1e-6
    assert 0.1 < accepted < G - 0.01
    assert plain.max() < 0.9


def test_all_methods_are_found():
    assert {"draft-model", "plain", "quest", "streaming", "vegas"} <= set(NAMES)
