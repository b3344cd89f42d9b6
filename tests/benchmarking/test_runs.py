"""`Runs`: the two timed parts of a run are one run of the loop."""

import jax
import numpy as np
import pytest

import jaxspec
from jaxspec.benchmarking.runs import Candidate, Runs
from jaxspec.methods import Models
from jaxspec.models import Decoder, ModelConfig, RopeConfig, init_params
from jaxspec.planning import LatencyProfile, Line

NEW = 24


def test_a_run_in_two_parts():
    config = ModelConfig("llama", 19, 16, 32, 2, 4, 2, 8, 4096, RopeConfig())
    models = Models(Decoder(config), init_params(config, jax.random.key(0)))
    prompt = np.random.default_rng(1).integers(0, 19, (4, 40)).astype(np.int32)
    method = jaxspec.Vegas(num_draft=2, rho=0.1, min_keep=4)
    runs, candidate = Runs(models, prompt.tolist(), NEW, 2), Candidate("vegas", method)
    expected = jaxspec.generate(
        models.target, models.params, prompt, np.full(4, 40), jax.random.key(0), method=method, max_new_tokens=NEW
    )
    for _ in range(2):
        timed = runs.run(candidate)
        np.testing.assert_array_equal(timed.tokens, expected.tokens)
        jax.tree.map(np.testing.assert_array_equal, timed.stats, expected.stats)
        rounds, part = timed.stats.rounds, timed.all_running
        # a case in which the rows end together would show nothing
        assert rounds.min() < rounds.max() == timed.rounds
        assert part.rounds == rounds.min()
        emitted = np.sum(timed.stats.accepted[:, : part.rounds] + 1, axis=1)
        assert part.tokens == np.sum(np.minimum(emitted, NEW - 1))
        assert 0 < part.seconds < timed.seconds
    assert runs.program_bytes(candidate) > sum(x.nbytes for x in jax.tree.leaves((models.params, runs.cache)))


@pytest.mark.parametrize("execution", ["static", "traced"])
def test_a_search_leaves_the_runs_their_cache(execution):
    config = ModelConfig("llama", 19, 16, 32, 3, 4, 2, 8, 4096, RopeConfig())
    models = Models(Decoder(config), init_params(config, jax.random.key(0)))
    prompt = np.random.default_rng(1).integers(0, 19, (2, 40)).tolist()
    line = Line(0.0, 1.0)
    profile = LatencyProfile(3, 2, 3, line, 1.0, 1.0, line, 1.0, 1.0, 1.0, selected=line, scoring=line)
    selection = jaxspec.Vegas(rho=0.5, layer_shares=(0.5, 1.0, 1.5))
    method = jaxspec.KnapSpec(max_draft=2, profile=profile, selection=selection, execution=execution)
    runs, plain = Runs(models, prompt, NEW, 2), Candidate("plain", jaxspec.Plain())
    expected = runs.run(plain).tokens
    found = runs.plan(method, reference_tokens=12)
    assert found.frontier[0].weight == 0
    assert len(found.frontier) > 1
    np.testing.assert_array_equal(runs.run(plain).tokens, expected)
