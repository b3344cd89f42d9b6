"""What `jaxspec bench` and `jaxspec tune` share before anything is measured: flags, checks, models and prompts."""

import argparse
import importlib.util
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from jaxspec.cli.device import default_dtype

DTYPES = ("float32", "bfloat16", "float16")
# what the library calls otherwise
WORDS = {"prompt_length": "--context", "max_new_tokens": "--new-tokens"}


class Sources(NamedTuple):
    """The loaded models; None with random weights, or where there is no draft model."""

    target: Any = None
    draft: Any = None


def add_measuring_flags(parser: argparse.ArgumentParser) -> None:
    """Adds the flags that both commands have."""
    add = parser.add_argument
    add(
        "--draft",
        metavar="MODEL",
        help="the draft model of methods that have one: a model, or in bench with --shape a known name",
    )
    add("--config", type=Path, metavar="FILE", help="what jaxspec calibrate dustin wrote")
    add("--text", type=Path, nargs="+", default=[], metavar="FILE", help="texts that prompts are cut from; default: "
        "the sources of Python's standard library")  # fmt: skip
    add("--new-tokens", type=int, default=128, help="tokens generated per row; default: 128")
    add("--dtype", choices=DTYPES, help="default: as stored; float32 on a CPU")
    add("--json", type=Path, metavar="FILE", help="write everything that was measured")


def files_read(args: argparse.Namespace) -> tuple[str | Path | None, ...]:
    """What the flags of both commands name that no output may replace."""
    return (args.model, args.draft, args.config, *args.text)


def check_tables() -> None:
    """Raises ValueError where no table could be printed in the end."""
    if importlib.util.find_spec("rich") is None:
        raise ValueError("this command needs rich: pip install rich")


def check_values(
    args: argparse.Namespace, specs: list[dict[str, Any]], batches: list[int], contexts: list[int]
) -> None:
    """Raises ValueError, before any model is loaded, for sizes and for options of methods that are out of range."""
    from jaxspec.method_specs import ANY_DRAFT_MODEL, build_method

    for flag, values, least in (
        ("--batch", batches, 1),
        ("--context", contexts, 2),
        ("--new-tokens", [args.new_tokens], 2),
    ):
        if min(values) < least:
            raise ValueError(f"{flag} must be at least {least}, got {min(values)}")
    for spec in specs:
        build_method(spec, ANY_DRAFT_MODEL, args.config)


def environment(args: argparse.Namespace) -> dict[str, Any]:
    """What a record says about where it was made."""
    import jax
    import jaxlib

    import jaxspec
    from jaxspec.benchmarking.ceiling import copy_ceiling

    on_gpu = jax.default_backend() == "gpu"
    return {
        "command": " ".join(["jaxspec", *sys.argv[1:]]),
        "device": jax.devices()[0].device_kind,
        "versions": {"jaxspec": jaxspec.__version__, "jax": jax.__version__, "jaxlib": jaxlib.__version__},
        "model": getattr(args, "model", None),
        "shape": getattr(args, "shape", None),
        "synthetic": getattr(args, "shape", None) is not None,
        # a CPU's caches hold small copies; its rate is no ceiling for anything then
        "ceiling_bytes_per_second": copy_ceiling() if on_gpu else None,
    }


def load_drafts(args: argparse.Namespace, specs: list[dict[str, Any]]) -> Sources:
    """Loads --model and --draft; with --shape nothing is loaded.

    Raises:
        ValueError: a method lacks its draft model, or the vocabularies differ.
    """
    from jaxspec.checkpoint import load
    from jaxspec.cli.methods import check_vocabularies
    from jaxspec.methods import find_methods

    methods = find_methods()
    drafted = [spec["method"] for spec in specs if methods[spec["method"]].needs_draft_params]
    if drafted and args.draft is None:
        raise ValueError(f"{drafted[0]} needs --draft MODEL")
    if getattr(args, "shape", None):
        from jaxspec.benchmarking.shapes import OFFERED, SHAPES

        if args.draft is not None and args.draft not in SHAPES:
            raise ValueError(f"--draft must be one of {', '.join(OFFERED)} with --shape, got {args.draft!r}")
        return Sources()
    dtype = default_dtype(args.dtype)
    target = load(args.model, dtype=dtype)
    if target.tokenizer is None:
        raise ValueError(f"{args.model} has no tokenizer, which the prompts need")
    draft = None
    if args.draft is not None:
        draft = load(args.draft, dtype=dtype)
        check_vocabularies(target, draft)
    return Sources(target, draft)


def open_runs(
    args: argparse.Namespace,
    specs: list[dict[str, Any]],
    sources: Sources,
    batch: int,
    context: int,
    layers: int | None = None,
) -> tuple[Any, list[Any]]:
    """The prefilled prompts of one batch and context, and the candidates.

    Args:
        args: the command's.
        specs: the methods, see `method_specs`.
        sources: what `load_drafts` returned.
        batch: rows.
        context: tokens of each prompt.
        layers: depth of a model with random weights.
    """
    import jax.numpy as jnp
    import numpy as np

    from jaxspec.benchmarking.runs import Candidate, Runs
    from jaxspec.benchmarking.shapes import SHAPES, check_memory, random_cache, random_params
    from jaxspec.benchmarking.texts import stretches, token_ids
    from jaxspec.method_specs import build_method, describe
    from jaxspec.methods import Models
    from jaxspec.models import Decoder

    if sources.target is None:
        dtype = jnp.dtype(args.dtype or "bfloat16")
        config = replace(SHAPES[args.shape], num_layers=layers or SHAPES[args.shape].num_layers)
        draft_config = SHAPES[args.draft] if args.draft else None
        check_memory(args.shape, config, batch, context + args.new_tokens + 64, dtype.itemsize)
        models = Models(Decoder(config), random_params(config, dtype))
        draft_model = Decoder(draft_config) if draft_config else None
        draft_params = random_params(draft_config, dtype) if draft_config else None
        rows = np.random.default_rng(0).integers(0, config.vocab_size, (batch, context)).tolist()
        cache = partial(random_cache, config, batch, dtype=dtype)
    else:
        models, cache = Models(sources.target.model, sources.target.params), None
        itemsize = models.params["embedding"].dtype.itemsize
        check_memory(args.model, models.target.config, batch, context + args.new_tokens + 64, itemsize)
        draft_model = sources.draft.model if sources.draft else None
        draft_params = sources.draft.params if sources.draft else None
        rows = stretches(token_ids(args.text, sources.target.tokenizer, context), context, batch)
    methods = [build_method(spec, draft_model, args.config) for spec in specs]
    for method in methods:
        method.check_model(models.target)
        method.check_batch(batch)
    if sources.target is None:
        # random weights say nothing about which sublayers can be spared
        methods = [m.fixed(config.num_layers) if m.segment_rounds else m for m in methods]
    runs = Runs(models, rows, args.new_tokens, max(method.max_draft for method in methods), cache)
    tell(f"{batch} x {context} tokens of context ready in {runs.prefill_seconds:.0f} s, compilation included")
    candidates = [
        Candidate(describe(spec), method, draft_params if method.needs_draft_params else None)
        for spec, method in zip(specs, methods, strict=True)
    ]
    return runs, candidates


def tell(line: str) -> None:
    """Says on standard error what was done, or begins; runs take minutes."""
    print(f"  {line}", file=sys.stderr, flush=True)
