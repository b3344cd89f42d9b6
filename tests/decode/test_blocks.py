"""The loop's block logic, with scripted drafts: whatever is accepted, the output is that of plain decoding."""

import numpy as np
import pytest

from jaxspec import Finish, generate
from tests import reference
from tests.decode.checks import KEY, check_stopped, log_softmax, run
from tests.decode.conftest import NEW_TOKENS
from tests.decode.scripted import Scripted, script

G = 3


def scripted(tiny, wrong, count=G, rows=slice(None), num_draft=G, **options):
    tokens = np.pad(tiny.greedy, ((0, 0), (0, num_draft + 1)))[rows]
    params = script(tokens, np.broadcast_to(wrong, 4)[rows], np.broadcast_to(count, 4)[rows])
    return run(tiny, rows, method=Scripted(num_draft), draft_params=params, **options)


def expected_trace(new_tokens, wrong, count):
    """Rounds until `new_tokens` are emitted, one of them by the prefill; and what each emits and accepts."""
    rounds, emitted, accepted = 0, 0, []
    while emitted < new_tokens - 1:
        accepted.append(min(wrong, count))
        emitted += accepted[-1] + 1
        rounds += 1
    return rounds, new_tokens - 1, accepted


@pytest.mark.parametrize(
    ("wrong", "count"),
    [(G, G), (0, G), (1, G), (2, G), (G, 0), (G, 1), ([0, 2, G, 1], G), ([0, 1, G, 2], [G, 0, 2, 1])],
)
def test_blocks_emit_what_plain_decoding_does(tiny, wrong, count):
    """Acceptances and rejections forced at every position, also different ones in each row. The trace is exact."""
    output = scripted(tiny, wrong, count)
    np.testing.assert_array_equal(output.tokens, tiny.greedy)
    np.testing.assert_array_equal(output.finish, Finish.LENGTH)
    expected = np.take_along_axis(log_softmax(tiny.logits), tiny.greedy[..., None], -1)[..., 0]
    np.testing.assert_allclose(output.logprobs, expected, atol=1e-4)
    for b, (w, c) in enumerate(zip(np.broadcast_to(wrong, 4), np.broadcast_to(count, 4), strict=True)):
        rounds, emitted, accepted = expected_trace(NEW_TOKENS, w, c)
        assert output.stats.rounds[b] == rounds
        assert output.stats.emitted[b] == emitted
        np.testing.assert_array_equal(output.stats.accepted[b], np.pad(accepted, (0, NEW_TOKENS - rounds)))
        np.testing.assert_array_equal(output.stats.drafted[b], [c] * rounds + [0] * (NEW_TOKENS - rounds))


@pytest.mark.parametrize("new_tokens", [1, 2, 3])
def test_blocks_never_exceed_max_new_tokens(tiny, new_tokens):
    """Up to g + 2 with g = 1: before the first block, inside it, at its end."""
    output = scripted(tiny, 1, num_draft=1, count=1, max_new_tokens=new_tokens)
    np.testing.assert_array_equal(output.tokens, tiny.greedy[:, :new_tokens])
    np.testing.assert_array_equal(output.lengths, new_tokens)


@pytest.mark.parametrize("wrong", [0, 1, 2, G])
def test_eos_at_every_offset_of_a_block(tiny, wrong):
    """Accepted, as the correction after a rejection, as the bonus token; what the block holds behind it is dropped."""
    for offset in range(2 * G + 3):
        eos = int(tiny.greedy[0, offset])
        output = scripted(tiny, wrong, eos_ids=(eos,))
        for b in range(4):
            check_stopped(tiny.greedy[b], output, b, {eos})
            assert output.stats.emitted[b] == output.lengths[b] - 1


def test_an_eos_that_is_drafted_and_refused_ends_nothing(tiny):
    wrong_tokens = set(((tiny.greedy[:, 1:] + 1) % 61).ravel().tolist())
    eos = next(iter(wrong_tokens & set(tiny.unused)))
    output = scripted(tiny, 0, eos_ids=(eos,))
    np.testing.assert_array_equal(output.tokens, tiny.greedy)


def test_blocks_at_the_end_of_the_cache(tiny):
    """A prompt, new tokens and drafts that fill the cache to its last row: nothing is clamped onto older rows."""
    g, new_tokens = 5, 128 - 6
    prompt = np.random.default_rng(0).integers(0, 61, (2, 128)).astype(np.int32)
    plain = generate(tiny.model, tiny.params, prompt, [128, 128], KEY, max_new_tokens=new_tokens)
    script_tokens = np.pad(plain.tokens, ((0, 0), (0, g + 1)))
    for wrong in (g, [2, 0]):
        output = generate(tiny.model, tiny.params, prompt, [128, 128], KEY, max_new_tokens=new_tokens,
                          method=Scripted(g), draft_params=script(script_tokens, wrong, g), logprobs=True)  # fmt: skip
        np.testing.assert_array_equal(output.tokens, plain.tokens)
        tokens = np.concatenate([prompt, output.tokens], axis=1)
        for b in range(2):
            logits = log_softmax(reference.decoder(tiny.hf, tiny.weights, tokens[b]).logits[127:-1])
            expected = np.take_along_axis(logits, np.asarray(output.tokens[b])[:, None], 1)[:, 0]
            np.testing.assert_allclose(output.logprobs[b], expected, atol=1e-4)
