"""What the tests of whole runs share."""

import jax
import numpy as np

from jaxspec import Finish, generate
from tests.decode.conftest import NEW_TOKENS

KEY = jax.random.key(0)
PAD = -9


def run(tiny, rows=slice(None), key=KEY, **options):
    """Options that most tests share, so that they share a program too: one EOS id, which nothing emits."""
    options = {"max_new_tokens": NEW_TOKENS, "pad_id": PAD, "eos_ids": tiny.unused[:1], "logprobs": True, **options}
    return generate(tiny.model, tiny.params, tiny.prompts[rows], tiny.lengths[rows], key, **options)


def log_softmax(logits):
    logits = np.asarray(logits, np.float64)
    top = logits.max(-1, keepdims=True)
    return logits - top - np.log(np.exp(logits - top).sum(-1, keepdims=True))


def check_stopped(greedy, output, b, eos_ids):
    hits = np.flatnonzero(np.isin(greedy, list(eos_ids)))
    end = hits[0] + 1 if hits.size else NEW_TOKENS
    np.testing.assert_array_equal(output.tokens[b], [*greedy[:end], *[PAD] * (NEW_TOKENS - end)])
    assert output.lengths[b] == end
    assert output.finish[b] == (Finish.EOS if hits.size else Finish.LENGTH)
