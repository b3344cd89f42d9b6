"""One tiny model, four ragged prompts and their greedy continuations, shared so that programs are compiled once."""

import contextlib
from typing import Any, NamedTuple

import jax
import numpy as np
import pytest

from jaxspec import Decoder
from tests import reference
from tests.reference import jax_model, random_weights, tiny_config

NEW_TOKENS = 16


class Tiny(NamedTuple):
    hf: dict[str, Any]
    weights: dict[str, np.ndarray]
    model: Decoder
    params: Any
    prompts: np.ndarray  # int32 [4, 12]
    lengths: np.ndarray  # int32 [4]
    greedy: np.ndarray  # int32 [4, NEW_TOKENS], by the float64 reference
    logits: np.ndarray  # [4, NEW_TOKENS, V]: what each of them was chosen from
    unused: tuple[int, ...]  # ids that are in neither


@pytest.fixture(scope="session")
def tiny():
    hf = tiny_config("qwen3", num_hidden_layers=1)
    weights = random_weights(hf, seed=193)
    model, params = jax_model(hf, weights)
    rng = np.random.default_rng(1)
    prompts = rng.integers(1, 61, (4, 12)).astype(np.int32)
    lengths = np.array([5, 1, 12, 9], np.int32)
    rows = [greedy_continuation(hf, weights, p[:n], NEW_TOKENS) for p, n in zip(prompts, lengths, strict=True)]
    greedy, logits = (np.stack(parts) for parts in zip(*rows, strict=True))
    top = np.sort(logits, axis=-1)
    # with this seed no choice is close, so that every comparison in these tests may be exact
    assert np.min(top[..., -1] - top[..., -2]) > 100 * reference.NEAR_TIE
    # and no continuation falls into a loop, in which a wrong token would soon look right again
    assert all(len(set(row)) > 12 for row in greedy.tolist())
    unused = sorted(set(range(61)) - set(greedy.ravel().tolist()) - set(prompts.ravel().tolist()))
    return Tiny(hf, weights, model, params, prompts, lengths, greedy, logits, tuple(unused))


def greedy_continuation(hf, weights, prompt, count):
    """Tokens [count] and the logits [count, V] they were chosen from, by the float64 reference."""
    tokens, logits = list(prompt), []
    for _ in range(count):
        logits.append(reference.decoder(hf, weights, np.array(tokens)).logits[-1])
        tokens.append(int(np.argmax(logits[-1])))
    return np.array(tokens[len(prompt) :], np.int32), np.stack(logits)


@pytest.fixture
def compiles():
    """`with compiles() as names:` lists one entry per program that XLA compiled meanwhile."""

    @contextlib.contextmanager
    def count():
        names = []

        def listen(event, seconds, **details):
            if event == "/jax/core/compile/backend_compile_duration":
                names.append(details.get("fun_name", event))

        jax.monitoring.register_event_duration_secs_listener(listen)
        try:
            yield names
        finally:
            jax.monitoring.unregister_event_duration_listener(listen)

    return count
