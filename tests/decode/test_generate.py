"""Plain decoding against float64 NumPy and transformers: where it ends, what it draws, whom a row depends on."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

from jaxspec import Finish, Sampling, generate
from tests import reference
from tests.decode.checks import KEY, PAD, check_stopped, log_softmax, run
from tests.decode.conftest import NEW_TOKENS
from tests.reference import assert_same_greedy, jax_model, random_weights, replace_config, tiny_config, torch_model


def hot(temperature, top_p=0.95):
    """A sampling of one form, whatever its values."""
    return Sampling(temperature=np.broadcast_to(np.float32(temperature), 4), top_p=top_p)


@pytest.mark.parametrize("options", [{}, {"eos_ids": (), "logprobs": False}])
def test_greedy_equals_the_float64_reference(tiny, options):
    """With an EOS id and without any."""
    output = run(tiny, **options)
    np.testing.assert_array_equal(output.tokens, tiny.greedy)
    np.testing.assert_array_equal(output.lengths, NEW_TOKENS)
    np.testing.assert_array_equal(output.finish, Finish.LENGTH)
    assert (output.logprobs is None) == (options != {})
    np.testing.assert_array_equal(output.stats.rounds, NEW_TOKENS - 1)
    np.testing.assert_array_equal(output.stats.emitted, NEW_TOKENS - 1)
    assert not np.any(output.stats.drafted)
    assert not np.any(output.stats.accepted)


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_greedy_equals_transformers_generate(family):
    """Token for token in float32: a ragged batch against transformers' row by row and left-padded."""
    torch = pytest.importorskip("torch")
    hf = tiny_config(family, num_hidden_layers=2 if family == "qwen3" else 1)
    weights = random_weights(hf, seed=3)
    model, params = jax_model(hf, weights)
    theirs = torch_model(hf, weights)
    rng = np.random.default_rng(0)
    count, lengths = 20, np.array([7, 1, 20])
    prompts = rng.integers(1, 61, (3, 20)).astype(np.int32)
    output = generate(model, params, prompts, lengths, KEY, max_new_tokens=count)
    options = {"do_sample": False, "max_new_tokens": count, "pad_token_id": 0, "eos_token_id": None}
    options |= {"return_dict_in_generate": True, "output_logits": True}
    left = np.stack([np.roll(row, 20 - n) for row, n in zip(prompts, lengths, strict=True)])
    mask = np.arange(20) >= 20 - lengths[:, None]
    parted = 0
    with torch.inference_mode():
        batch = theirs.generate(torch.tensor(left), attention_mask=torch.tensor(mask.astype(int)), **options)
        for b, n in enumerate(lengths):
            solo = theirs.generate(torch.tensor(prompts[b : b + 1, :n]), **options)
            for result, row, start in ((solo, 0, n), (batch, b, 20)):
                logits = torch.stack(result.logits)[:, row].numpy()
                parted += assert_same_greedy(output.tokens[b], result.sequences[row, start:].numpy(), logits)
    assert parted == 0  # none of these seeds holds a near tie; another version's may


def test_one_row_equals_the_batch(tiny):
    for b in range(4):
        np.testing.assert_array_equal(run(tiny, slice(b, b + 1)).tokens[0], tiny.greedy[b])


@pytest.mark.parametrize("length", [127, 128, 129, 160])
def test_prompts_at_the_edges_of_buckets_and_chunks(tiny, length):
    """Eight rows, so that a chunk holds 64 tokens at most and a prompt takes several."""
    rng = np.random.default_rng(length)
    prompts = rng.integers(0, 61, (8, length)).astype(np.int32)
    lengths = np.array([length, length - 1, 3, 63, 64, 65, 66, length - 2])
    output = generate(tiny.model, tiny.params, prompts, lengths, KEY, max_new_tokens=4, logprobs=True)
    for b, n in enumerate(lengths):
        tokens = np.concatenate([prompts[b, :n], output.tokens[b]])
        logits = reference.decoder(tiny.hf, tiny.weights, tokens).logits[n - 1 : -1]
        assert_same_greedy(output.tokens[b], logits.argmax(-1), logits)
        expected = np.take_along_axis(log_softmax(logits), np.asarray(output.tokens[b])[:, None], 1)[:, 0]
        np.testing.assert_allclose(output.logprobs[b], expected, atol=1e-4)


def test_eos_at_every_offset(tiny):
    """The id itself is the row's last token; pads follow."""
    for offset in range(NEW_TOKENS):
        eos = int(tiny.greedy[0, offset])
        output = run(tiny, eos_ids=(eos,))
        for b in range(4):
            check_stopped(tiny.greedy[b], output, b, {eos})


def test_every_id_of_an_eos_list_ends_a_row(tiny):
    eos, (a, b, *_) = int(tiny.greedy[1, 4]), tiny.unused
    for ids in ((eos, a, b), (a, eos, b), (a, b, eos)):
        output = run(tiny, eos_ids=ids)
        for row in range(4):
            check_stopped(tiny.greedy[row], output, row, set(ids))


def test_token_0_is_no_padding():
    """A model whose greedy token is always 0: as a token, as an EOS, and as the pad id it equals."""
    hf = tiny_config(num_hidden_layers=1)
    weights = random_weights(hf)
    weights["model.norm.weight"][:] = 0  # all logits are equal, and the first index wins
    model, params = jax_model(hf, weights)
    prompt = np.array([[5, 6]])
    output = generate(model, params, prompt, [2], KEY, max_new_tokens=5, eos_ids=(1,), pad_id=0)
    assert (output.tokens.tolist(), output.lengths.tolist()) == ([[0] * 5], [5])
    output = generate(model, params, prompt, [2], KEY, max_new_tokens=5, eos_ids=(0,), pad_id=7)
    assert (output.tokens.tolist(), output.lengths.tolist()) == ([[0, 7, 7, 7, 7]], [1])
    assert output.finish.tolist() == [Finish.EOS]


@pytest.mark.parametrize("count", [1, 5])
def test_max_new_tokens(tiny, count):
    output = run(tiny, max_new_tokens=count)
    np.testing.assert_array_equal(output.tokens, tiny.greedy[:, :count])
    np.testing.assert_array_equal(output.lengths, count)
    np.testing.assert_array_equal(output.stats.rounds, count - 1)


def test_eos_as_the_last_token_allowed_is_an_eos(tiny):
    last = tiny.greedy[:, 4]
    row = next(b for b in range(4) if last[b] not in tiny.greedy[b, :4])
    output = run(tiny, max_new_tokens=5, eos_ids=(int(last[row]),))
    assert output.finish[row] == Finish.EOS
    assert output.lengths[row] == 5


def test_logprobs_equal_a_teacher_forced_pass(tiny):
    """Of the raw logits, whatever the filters; 0 behind the end."""
    eos = int(tiny.greedy[0, 5])
    output = run(tiny, sampling=hot([0, 1.5, 0.7, 3]), eos_ids=(eos,))
    assert len(set(output.lengths.tolist())) > 1
    for b in range(4):
        end = int(output.lengths[b])
        tokens = np.concatenate([tiny.prompts[b, : tiny.lengths[b]], output.tokens[b, :end]])
        logits = reference.decoder(tiny.hf, tiny.weights, tokens).logits[tiny.lengths[b] - 1 : -1]
        expected = np.take_along_axis(log_softmax(logits), np.asarray(output.tokens[b, :end])[:, None], 1)[:, 0]
        np.testing.assert_allclose(output.logprobs[b, :end], expected, atol=1e-4)
        np.testing.assert_array_equal(output.logprobs[b, end:], 0)


def test_samples_have_the_models_distribution(tiny):
    """The first two tokens of 12,000 rows: chi-square against the float64 reference, filters included."""
    rows, repeats = 4000, 3
    temperature, top_k = 1.3, 5
    prompt, sampling = np.array([17]), Sampling(temperature=temperature, top_k=top_k)
    prompts, lengths = np.tile(prompt, (rows, 1)), np.ones(rows, int)
    drawn = np.concatenate(
        [
            generate(tiny.model, tiny.params, prompts, lengths, key, sampling=sampling, max_new_tokens=2).tokens
            for key in jax.random.split(KEY, repeats)
        ]
    )

    def distribution(tokens):
        logits = reference.decoder(tiny.hf, tiny.weights, tokens).logits[-1] / temperature
        logits[logits < np.sort(logits)[-top_k]] = -np.inf
        return np.exp(logits - logits.max()) / np.exp(logits - logits.max()).sum()

    first = distribution(prompt)
    joint = np.stack([first[t] * distribution(np.array([17, t])) if first[t] else np.zeros(61) for t in range(61)])
    counts = np.zeros((61, 61))
    np.add.at(counts, tuple(drawn.T), 1)
    possible = joint > 0
    assert counts[~possible].sum() == 0
    assert rows * repeats * joint[possible].min() > 5
    assert stats.chisquare(counts[possible], rows * repeats * joint[possible]).pvalue > 1e-3


def test_rows_depend_on_their_own_prompt_and_key_only(tiny):
    """Other neighbours, another place in the batch, alone, other padding: the same tokens."""
    keys = jax.random.split(jax.random.key(5), 4)
    sampling = hot(1.0)
    expected = run(tiny, key=keys, sampling=sampling).tokens
    order = np.array([2, 0, 3, 1])
    np.testing.assert_array_equal(run(tiny, order, key=keys[order], sampling=sampling).tokens, expected[order])
    for b in range(4):
        rows = np.full(4, b)
        same = run(tiny, rows, key=keys[rows], sampling=sampling).tokens
        np.testing.assert_array_equal(same, np.tile(expected[b], (4, 1)))
    solo = run(tiny, slice(2, 3), key=keys[2:3], sampling=Sampling(temperature=1.0, top_p=0.95))
    np.testing.assert_array_equal(solo.tokens[0], expected[2])
    poisoned = np.where(np.arange(12) < tiny.lengths[:, None], tiny.prompts, 60)
    again = run(tiny._replace(prompts=poisoned), key=keys, sampling=sampling)
    np.testing.assert_array_equal(again.tokens, expected)
    other = run(tiny, key=keys.at[1].set(jax.random.key(99)), sampling=sampling).tokens
    np.testing.assert_array_equal(np.delete(other, 1, 0), np.delete(expected, 1, 0))
    assert np.any(other[1] != expected[1])


def test_one_key_gives_each_row_its_own(tiny):
    sampling, rows = hot(2.0), np.zeros(4, int)
    output = run(tiny, rows, sampling=sampling)
    assert len({tuple(row) for row in output.tokens.tolist()}) == 4
    keys = jax.vmap(jax.random.fold_in, (None, 0))(KEY, jnp.arange(4))
    np.testing.assert_array_equal(run(tiny, rows, key=keys, sampling=sampling).tokens, output.tokens)
    old_style = run(tiny, rows, key=jax.random.PRNGKey(0), sampling=sampling)
    np.testing.assert_array_equal(old_style.tokens, output.tokens)


@pytest.mark.parametrize("temperature", [0, 1e-8, 1e-6, 1e-5])
def test_tiny_temperatures_are_greedy(tiny, temperature):
    """Concrete, and traced beside a row that samples."""
    np.testing.assert_array_equal(run(tiny, sampling=Sampling(temperature=temperature)).tokens, tiny.greedy)
    output = run(tiny, sampling=hot([temperature, 1.0, temperature, temperature]))
    np.testing.assert_array_equal(np.delete(output.tokens, 1, 0), np.delete(tiny.greedy, 1, 0))


def test_a_row_with_nan_logits_is_flagged_and_the_others_stay(tiny):
    """NaN weights of one token: the row that emits it ends before the token that would follow, at any place."""
    for place in (0, 3):
        token = next(t for t in tiny.greedy[1, place:] if not np.any(tiny.prompts == t))
        hits = [np.flatnonzero(row == token) for row in tiny.greedy]
        params = {**tiny.params, "embedding": tiny.params["embedding"].at[token].set(jnp.nan)}
        output = run(tiny._replace(params=params))
        assert hits[1].size
        for b in range(4):
            end = hits[b][0] + 1 if hits[b].size else NEW_TOKENS
            np.testing.assert_array_equal(output.tokens[b, :end], tiny.greedy[b, :end])
            np.testing.assert_array_equal(output.tokens[b, end:], PAD)
            # a row whose last allowed token it is never runs it
            assert output.finish[b] == (Finish.NAN if end < NEW_TOKENS else Finish.LENGTH)
            assert output.lengths[b] == end
        assert not np.any(np.isnan(output.logprobs))


@pytest.mark.parametrize("sampling", [Sampling(), hot(1.0)])
def test_infinite_logits_are_flagged_and_impossible_tokens_are_not(tiny, sampling):
    """One weight of the head is infinite: a token's logit is +inf or -inf by the sign of what it is multiplied with."""
    token = tiny.unused[1]
    params = {**tiny.params, "lm_head": tiny.params["lm_head"].at[token, 0].set(jnp.inf)}
    output = run(tiny._replace(params=params), sampling=sampling)
    flagged = 0
    for b in range(4):
        end, start = int(output.lengths[b]), tiny.lengths[b]
        tokens = np.concatenate([tiny.prompts[b, :start], output.tokens[b, :end]])
        plus = reference.decoder(tiny.hf, tiny.weights, tokens).hidden[-1, start - 1 :, 0] > 0
        # the last of these belongs to the token behind the row's end
        assert not np.any(plus[:end])
        assert not np.any(output.tokens[b, :end] == token)
        if output.finish[b] == Finish.NAN:
            assert plus[end]
            flagged += 1
    assert flagged
    assert np.all(np.isfinite(output.logprobs))


def test_nan_in_the_prompt(tiny):
    params = {**tiny.params, "embedding": tiny.params["embedding"].at[tiny.prompts[0, 0]].set(jnp.nan)}
    clean = ~np.any((tiny.prompts == tiny.prompts[0, 0]) & (np.arange(12) < tiny.lengths[:, None]), axis=1)
    output = run(tiny._replace(params=params), max_new_tokens=1)
    assert not clean[0]
    assert clean.any()
    np.testing.assert_array_equal(output.finish, np.where(clean, Finish.LENGTH, Finish.NAN))
    np.testing.assert_array_equal(output.lengths, clean)


def test_inside_a_callers_jit(tiny):
    """Prompt, lengths, key and temperature traced: the same result, in one program with what surrounds it."""
    expected = run(tiny, sampling=hot(0.8))

    @jax.jit
    def pipeline(prompts, lengths, key, temperature):
        sampling = Sampling(temperature=temperature, top_p=0.95)
        output = run(tiny._replace(prompts=prompts, lengths=lengths), key=key, sampling=sampling)
        return output, jnp.sum(output.logprobs, axis=1)

    output, score = pipeline(tiny.prompts, tiny.lengths, KEY, np.float32(0.8))
    np.testing.assert_array_equal(output.tokens, expected.tokens)
    np.testing.assert_allclose(output.logprobs, expected.logprobs, atol=1e-4)
    np.testing.assert_allclose(score, np.sum(expected.logprobs, axis=1), atol=1e-3)


def test_bfloat16(tiny):
    """Runs in the parameters' dtype; greedy tokens are near the top of the float64 logits."""
    params = jax.tree.map(lambda x: x.astype(jnp.bfloat16), tiny.params)
    output = run(tiny._replace(params=params))
    for b in range(4):
        tokens = np.concatenate([tiny.prompts[b, : tiny.lengths[b]], output.tokens[b]])
        logits = reference.decoder(tiny.hf, tiny.weights, tokens).logits[tiny.lengths[b] - 1 : -1]
        chosen = np.take_along_axis(logits, np.asarray(output.tokens[b])[:, None], 1)[:, 0]
        # twice the bound of tests/models: the chosen and the best logit may both be off
        assert np.all(logits.max(-1) - chosen < 2 * 33 * 2**-8 * logits.std())


def test_new_tokens_up_to_the_last_position(tiny):
    model = replace_config(tiny.model, max_positions=12 + NEW_TOKENS)
    np.testing.assert_array_equal(run(tiny._replace(model=model)).tokens, tiny.greedy)
