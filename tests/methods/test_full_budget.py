"""Drafts that may read every row are the target's own, whatever selects the rows."""

import numpy as np
import pytest
from method_cases import make_case, rounds_of

from jaxspec import Finish, Sampling
from jaxspec.sampling import to_probs


@pytest.mark.parametrize("name", ["quest", "streaming", "vegas"])
def test_a_full_budget_drafts_with_the_targets_own_distribution(name):
    equal = {"layer_shares": ""} if name == "vegas" else {}
    case, sampling = make_case(name, layers=1, rho=1.0, **equal), Sampling(1.0)
    for before, _, draft, out, verdict, _ in rounds_of(case, sampling):
        active = np.asarray(before.finish == Finish.RUNNING)
        np.testing.assert_array_equal(verdict.num_accepted[active], draft.count[active])
        target = to_probs(out.logits, sampling)[:, : case.method.num_draft]
        np.testing.assert_allclose(draft.probs[active], target[active], atol=1e-6)
