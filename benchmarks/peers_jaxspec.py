"""jaxspec's side of peers.py: measures methods, and leaves weights, prompts, logits and tokens for the other side."""

import argparse
import pickle
import platform
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jaxlib
import numpy as np
from decode import time_prefill
from peers_results import failure, share_of_ceiling, sizes, success
from report import reason_of

import jaxspec
from jaxspec.benchmarking.ceiling import copy_ceiling
from jaxspec.benchmarking.runs import Candidate, Runs, measure_interleaved
from jaxspec.benchmarking.shapes import SHAPES, random_params
from jaxspec.benchmarking.texts import stretches, token_ids
from jaxspec.method_specs import build_method, describe, parse_spec
from jaxspec.methods import Models
from jaxspec.models import Decoder, init_cache
from jaxspec.types import Params

COMPARED_TOKENS = 64  # their logits are compared


def run(send: Callable[[dict], None], args: argparse.Namespace) -> None:
    """Sends the head of the record, then one result after the other."""
    on_gpu = jax.default_backend() == "gpu"
    dtype = args.dtype or ("bfloat16" if on_gpu else "float32")
    model, params, tokenizer = load(args.shape or args.checkpoint, dtype)
    draft_model, draft_params, _ = load(args.draft, dtype) if args.draft else (None, None, None)
    models = Models(model, params)
    ceiling = copy_ceiling() if on_gpu else None
    send({
        "device": jax.devices()[0].device_kind,
        "dtype": dtype,
        "ceiling_bytes_per_second": ceiling,
        "versions": {
            "jaxspec": jaxspec.__version__,
            "Python": platform.python_version(),
            "JAX": jax.__version__,
            "jaxlib": jaxlib.__version__,
        },
    })  # fmt: skip
    configs = {"target": model.config}
    save_leaves(args.folder / "target", params)
    if args.draft:
        configs["draft"] = draft_model.config
        save_leaves(args.folder / "draft", draft_params)
    prepared = {"configs": configs, "dtype": dtype, "ceiling": ceiling, "on_gpu": on_gpu}
    (args.folder / "prepared.pickle").write_bytes(pickle.dumps(prepared))
    save_prompts(args, models, tokenizer)
    for case in args.cases:
        if time.time() > args.deadline:
            send({"result": failure("jaxspec", "plain", case, "not started: out of time")})
            continue
        try:
            results = measure(args, case, models, draft_model, draft_params, ceiling)
        except Exception as error:  # a case too large for the device must not take the others along
            results = [failure("jaxspec", "plain", case, reason_of(error))]
        for result in results:
            send({"result": result})


def load(name: str, dtype: str) -> tuple[Decoder, Params, Any]:
    """A model with its parameters and tokenizer; a known size has no tokenizer."""
    if name in SHAPES:
        return Decoder(SHAPES[name]), random_params(SHAPES[name], dtype), None
    return tuple(jaxspec.load(name, dtype=dtype))


def save_leaves(folder: Path, params: Params) -> None:
    """Writes each leaf as integers of its size, since NumPy's files know no bfloat16."""
    folder.mkdir()
    for path, leaf in jax.tree_util.tree_flatten_with_path(params)[0]:
        leaf = np.asarray(leaf)
        np.save(folder / f"{'.'.join(key.key for key in path)}.npy", leaf.view(f"i{leaf.itemsize}"))


def save_prompts(args: argparse.Namespace, models: Models, tokenizer: Any) -> None:
    """Writes the prompts of every case, and the logits of the beginning of one."""
    longest = max(sizes(case)[1] for case in args.cases)
    ids = None if args.shape else token_ids(args.text, tokenizer, longest)
    for case in args.cases:
        batch, context = sizes(case)
        if ids is None:
            prompt = np.random.default_rng(0).integers(0, models.target.config.vocab_size, (batch, context))
        else:
            prompt = np.array(stretches(ids, context, batch))
        np.save(args.folder / f"prompt_{case}.npy", prompt)
    compared = prompt[:1, :COMPARED_TOKENS]
    np.savez(args.folder / "logits.npz", prompt=compared, logits=logits(models.target, models.params, compared))


def logits(model: Decoder, params: Params, prompt: np.ndarray) -> np.ndarray:
    """float32 [T, V] of one prompt [1, T]."""
    cache = init_cache(model.config, 1, prompt.shape[1], params["embedding"].dtype)
    start = np.zeros(1, np.int32)
    run = jax.jit(lambda params, tokens, cache: model.apply({"params": params}, tokens, cache, start).logits[0])
    return np.asarray(run(params, prompt.astype(np.int32), cache), np.float32)


def measure(
    args: argparse.Namespace,
    case: str,
    models: Models,
    draft_model: Decoder | None,
    draft_params: Params | None,
    ceiling: float | None,
) -> list[dict]:
    """A result of every method."""
    batch, context = sizes(case)
    specs = [parse_spec(text) for text in args.methods]
    methods = [build_method(spec, draft_model) for spec in specs]
    prefill_seconds = time_prefill(models, batch, context, args.repeats)["seconds"]
    rows = np.load(args.folder / f"prompt_{case}.npy").tolist()
    runs = Runs(models, rows, args.new_tokens, max(method.max_draft for method in methods))
    candidates = [
        Candidate(describe(spec), method, draft_params if method.needs_draft_params else None)
        for spec, method in zip(specs, methods, strict=True)
    ]
    measure_interleaved(runs, candidates, args.repeats, lambda text: print(f"  {text}", file=sys.stderr, flush=True))
    np.save(args.folder / f"tokens_{case}.npy", candidates[0].median().tokens)
    itemsize = models.params["embedding"].dtype.itemsize
    results = []
    for candidate in candidates:
        seconds = [timed.seconds for timed in candidate.runs]
        # the prefill samples the first token
        result = success("jaxspec", candidate.name, case, seconds, args.new_tokens - 1, prefill_seconds)
        if candidate.name == "plain":
            share = share_of_ceiling(result, models.target.config, itemsize, args.new_tokens, ceiling)
            result["share_of_ceiling"] = share
        result["tokens_per_round"] = candidate.median().metrics.tokens_per_round.token_weighted
        results.append(result)
    return results
