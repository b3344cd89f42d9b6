"""`generate_many`: what comes of each prompt is what `generate` makes of it, whichever rows it passes through."""

import threading

import jax
import numpy as np
import pytest
from method_cases import NEVER, make_case

from jaxspec import Finish, Sampling, generate_many

KEY, NEW = jax.random.key(3), 14
LENGTHS = np.array([40, 7, 1, 23, 12, 31, 5], np.int32)
PROMPTS = [np.random.default_rng(i).integers(0, NEVER, n).tolist() for i, n in enumerate(LENGTHS)]


def many(case, prompts=PROMPTS, key=KEY, **options):
    options = {"method": case.method, "draft_params": case.models.draft_params, "max_new_tokens": NEW, **options}
    return generate_many(case.models.target, case.models.params, prompts, key, **options)


def expected(case, **options):
    padded = np.zeros((len(PROMPTS), max(LENGTHS)), np.int32)
    for row, ids in zip(padded, PROMPTS, strict=True):
        row[: len(ids)] = ids
    return jax.tree.map(np.asarray, case.generate(padded, LENGTHS, KEY, max_new_tokens=NEW, **options))


def check(completions, output):
    """Every prompt once, as in one large batch."""
    completions = list(completions)
    assert sorted(completion.index for completion in completions) == list(range(len(PROMPTS)))
    for index, tokens, finish, stats, logprobs in completions:
        count = output.lengths[index]
        np.testing.assert_array_equal(tokens, output.tokens[index, :count])
        assert finish == output.finish[index]
        rounds = output.stats.rounds[index]
        assert (stats.rounds, stats.emitted) == (rounds, output.stats.emitted[index])
        np.testing.assert_array_equal(stats.drafted, output.stats.drafted[index, :rounds])
        np.testing.assert_array_equal(stats.accepted, output.stats.accepted[index, :rounds])
        if logprobs is not None:
            np.testing.assert_allclose(logprobs, output.logprobs[index, :count], atol=1e-5)
    return [completion.index for completion in completions]


@pytest.mark.parametrize("name", ["plain", "vegas", "draft-model", "dustin"])
def test_greedy_equals_generate(name):
    """Rows end at different times, by an end id of every other continuation."""
    case = make_case(name, layers=1)
    ends = tuple({int(row[2 + i]) for i, row in enumerate(expected(case).tokens[::2])})
    options = {"eos_ids": ends, "logprobs": True}
    output = expected(case, **options)
    assert len(set(output.lengths.tolist())) > 2
    order = check(many(case, batch=3, **options), output)
    assert order != sorted(order)


@pytest.mark.parametrize("batch", [1, 50])
def test_any_batch(batch):
    case = make_case("vegas", layers=1)
    check(many(case, batch=batch), expected(case))


def test_sampled_equals_generate():
    """A prompt draws with its own key, by its own rounds, and with its own temperature."""
    case = make_case("vegas", layers=1)
    sampling = Sampling(temperature=np.linspace(0.5, 1.5, len(PROMPTS)).astype(np.float32), top_p=0.9)
    check(many(case, batch=2, sampling=sampling), expected(case, sampling=sampling))


def test_a_prompt_that_ends_with_its_prefill_gives_way_at_once():
    case = make_case("plain", layers=1)
    first = tuple({int(token) for token in expected(case).tokens[:, 0]})
    output = expected(case, eos_ids=first)
    np.testing.assert_array_equal(output.lengths, 1)
    check(many(case, batch=2, eos_ids=first), output)


def test_prompts_come_as_they_end():
    """The next prompt begins once there is room for it, not when a batch is through."""
    case = make_case("plain", layers=1)
    first, *_ = many(case, batch=2)
    assert first.index in (0, 1)
    assert first.finish == Finish.LENGTH


def test_a_second_call_compiles_nothing():
    case = make_case("plain", layers=1)
    list(many(case, batch=2))
    # which is a compilation as well, the first time in a process
    key = jax.random.key(9)
    names, here = [], threading.get_ident()

    def listen(event, seconds, **details):
        # a plan that another test gave up may still be compiled in the background
        if threading.get_ident() == here:
            names.append(event)

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        list(many(case, prompts=PROMPTS[::-1], batch=2, key=key))
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)
    assert "/jax/core/compile/backend_compile_duration" not in names


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"prompts": []}, "at least one prompt"),
        ({"prompts": [[1], []]}, "number 1 is"),
        ({"prompts": [[1], [NEVER + 1]]}, "prompt ids must lie in"),
        ({"batch": 0}, "batch must be an integer of at least 1"),
        ({"batch": True}, "batch must be an integer"),
        ({"max_new_tokens": 0}, "max_new_tokens"),
        ({"key": 3}, "PRNG key"),
    ],
)
def test_rejects_before_anything_runs(change, message):
    with pytest.raises(ValueError, match=message):
        many(make_case("plain", layers=1), **{"batch": 2} | change)


def test_not_under_jit():
    case = make_case("plain", layers=1)
    with pytest.raises(ValueError, match="cannot be traced"):
        jax.jit(lambda params: many(make_case("plain", layers=1), batch=2) and params)(case.models.params)
