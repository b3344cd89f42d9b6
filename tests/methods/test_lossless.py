"""The checks of `jaxspec verify` pass what is lossless and find what is not."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from method_cases import make_case

from jaxspec import KnapSpec, Plan, Sampling
from jaxspec.lossless import _gap, check_enumeration, check_greedy, check_sampling
from jaxspec.methods import Models, Vegas
from jaxspec.types import KVSelection

PROMPT = np.random.default_rng(0).integers(0, 18, 60).tolist()


@dataclasses.dataclass(frozen=True)
class UnfilteredProbs(Vegas):
    """Says that its drafts came from a flatter distribution than they did."""

    def draft(self, models, state, sampling, keys):
        draft, *rest = super().draft(models, state, sampling, keys)
        if draft.probs is None:
            return draft, *rest
        return draft.replace(probs=0.3 * draft.probs + 0.7 / draft.probs.shape[-1]), *rest


@dataclasses.dataclass(frozen=True)
class SparseVerify(Vegas):
    """Verifies with the drafts' selection, as if the rest of the cache did not exist."""

    def verify(self, models, state, draft):
        full = super().verify(models, state, draft)
        tokens = jnp.concatenate([state.last_token[:, None], draft.tokens], axis=1)
        old = state.method_state
        selection = KVSelection(rows=old.rows[:, :, :2], valid=state.length, window=self.num_draft + 1)
        return full._replace(logits=models.forward(tokens, full.cache, state.length, selection=selection).logits)


def broken(kind):
    case = make_case("vegas")
    options = {f.name: getattr(case.method, f.name) for f in dataclasses.fields(case.method)}
    return case.models, kind(**options)


def test_enumeration():
    by_layer = Vegas(layer_shares=(0.4, 1.0, 1.0, 1.6))  # of a model with four layers
    composed = KnapSpec(selection=by_layer, plan=Plan((True,) * 4, (True,) * 4, 2))
    for method in (by_layer, composed):
        assert check_enumeration(method, Sampling(1.0), "").passed
    wrong = check_enumeration(UnfilteredProbs(), Sampling(1.0), "")
    assert not wrong.passed
    assert "total variation" in wrong.detail


@pytest.mark.parametrize(("kind", "passes"), [(Vegas, True), (UnfilteredProbs, False)])
def test_sampled_tokens(kind, passes):
    models, method = broken(kind)
    checks = check_sampling(models, method, PROMPT, Sampling(1.0), 1600, jax.random.key(0))
    assert len(checks) == 2
    assert all(check.passed for check in checks) == passes


@pytest.mark.parametrize(("kind", "passes"), [(Vegas, True), (SparseVerify, False)])
def test_greedy_output(kind, passes):
    models, method = broken(kind)
    check = check_greedy(models, method, [PROMPT, PROMPT[:20]], 20)
    assert check.passed == passes
    assert ("identical" in check.detail) == passes


def test_a_gap_is_measured_in_float32():
    models, _ = broken(Vegas)
    exact, limit = _gap(models, PROMPT, 3, 4)
    assert limit == 1e-4
    assert exact > 1e-3
    half = Models(models.target, jax.tree.map(lambda x: x.astype(jnp.bfloat16), models.params))
    rounded = Models(models.target, jax.tree.map(lambda x: x.astype(jnp.float32), half.params))
    gap, limit = _gap(half, PROMPT, 3, 4)
    assert gap == pytest.approx(_gap(rounded, PROMPT, 3, 4)[0])
    assert 1e-4 < limit < 0.5


@dataclasses.dataclass(frozen=True)
class Nudged(Vegas):
    """Breaks ties in favour of the last id."""

    def verify(self, models, state, draft):
        out = super().verify(models, state, draft)
        return out._replace(logits=out.logits.at[..., -1].add(1e-5))


def test_a_tie_is_reported_and_passes():
    models, method = broken(Nudged)
    plain = make_case("plain").generate([PROMPT], [len(PROMPT)], jax.random.key(0), max_new_tokens=4)
    common = int(plain.tokens[0, 2])
    head = models.params["lm_head"]
    twins = models.replace(params={**models.params, "lm_head": head.at[-1].set(head[common])})
    check = check_greedy(twins, method, [PROMPT], 20)
    assert check.passed
    assert "ties: row 0 parts at token" in check.detail
    assert "logits 0.0e+00 apart" in check.detail
