"""transformers' side of peers.py, with the weights, prompts and logits that jaxspec's side left."""

import argparse
import gc
import math
import pickle
import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np
import torch
import transformers
from peers_results import failure, share_of_ceiling, sizes, success
from report import reason_of

from convert.reference import model_of
from jaxspec.models import ModelConfig, leaf_sources

ONE_ROW = ("lookup", "assisted")  # generate refuses them a batch
LOOKUP_TOKENS = 10  # the number in transformers' documentation
CHUNK = 4096  # tokens of a prefill in parts
# How many new tokens are left out of the time where it is more than the one that the prefill gives: a draft model's own
# prefill comes with the second token, and a call's new static cache may have CUDA graphs recorded in its first steps.
FIRST_TOKENS = {"assisted": 2, "compiled": 8, "compiled-default": 8}


def run(send: Callable[[dict], None], args: argparse.Namespace, jobs: list[tuple[str, str]], device: str) -> None:
    """Sends the versions and how far the logits agree, then the result of each job in turn."""
    # jaxspec is here for names and shapes only: all of a GPU's memory is for PyTorch
    jax.config.update("jax_platforms", "cpu")
    prepared = pickle.loads((args.folder / "prepared.pickle").read_bytes())
    if prepared["on_gpu"] and not torch.cuda.is_available():
        raise RuntimeError(f"PyTorch {torch.__version__} does not see the {device} that jaxspec ran on")
    on = "cuda" if prepared["on_gpu"] else "cpu"
    dtype = getattr(torch, prepared["dtype"])
    models = {
        name: build(config, partial(read_leaf, args.folder / name, dtype, on))
        for name, config in prepared["configs"].items()
    }
    with np.load(args.folder / "logits.npz") as compared:
        agreement = compare(models["target"], compared["prompt"], compared["logits"])
    versions = {"PyTorch": torch.__version__, "CUDA of PyTorch": torch.version.cuda or "none"}
    send({"versions": versions | {"transformers": transformers.__version__}, "agreement": agreement})
    if agreement["root_mean_square"] > agreement["limit"]:
        raise RuntimeError(f"logits differ from jaxspec's: {agreement}")
    config = prepared["configs"]["target"]
    for name, case in jobs:
        if time.time() > args.deadline:
            send({"result": failure("transformers", name, case, "not started: out of time")})
            continue
        if name in ONE_ROW and sizes(case)[0] > 1:
            send({"result": failure("transformers", name, case, "batch 1 only")})
            continue
        try:
            result = measure(models, name, case, args)
            if name not in ONE_ROW:
                share = share_of_ceiling(result, config, dtype.itemsize, args.new_tokens, prepared["ceiling"])
                result["share_of_ceiling"] = share
        except Exception as error:  # a peer that cannot run must not take the others along
            result = failure("transformers", name, case, reason_of(error))
        send({"result": result})
        forget(models)
        if "CUDA error" in result.get("failure", ""):
            return  # every later call of this process would fail likewise


def read_leaf(folder: Path, dtype: torch.dtype, device: str, path: tuple[str, ...]) -> torch.Tensor:
    """A leaf as jaxspec's side wrote it."""
    return torch.from_numpy(np.load(folder / f"{'.'.join(path)}.npy")).to(device).view(dtype)


def build(config: ModelConfig, leaf: Callable[[tuple[str, ...]], torch.Tensor]) -> Any:
    """transformers' model with jaxspec's parameters; no token ends its texts.

    Args:
        config: jaxspec's.
        leaf: a path in the parameter tree -> what stands there.
    """
    model = model_of(hugging_face_config(config), hugging_face_tensors(config, leaf), config.model_type)
    model.generation_config = transformers.GenerationConfig(pad_token_id=0)
    return model.eval()


def hugging_face_config(config: ModelConfig) -> dict[str, Any]:
    """The contents of a config.json."""
    c, rope = config, config.rope
    scaling = {
        "linear": ("factor",),
        "dynamic": ("factor",),
        "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
        "yarn": ("factor", "beta_fast", "beta_slow", "attention_factor", "truncate"),
    }.get(rope.rope_type, ())
    parameters = {"rope_type": rope.rope_type, "rope_theta": rope.theta} | {key: getattr(rope, key) for key in scaling}
    if scaling:
        parameters["original_max_position_embeddings"] = rope.original_max_positions
    biases = {"llama": {"attention_bias": c.qkv_bias, "mlp_bias": c.mlp_bias}, "qwen3": {"attention_bias": c.qkv_bias}}
    return {
        "model_type": c.model_type,
        "vocab_size": c.vocab_size,
        "hidden_size": c.hidden_size,
        "intermediate_size": c.intermediate_size,
        "num_hidden_layers": c.num_layers,
        "num_attention_heads": c.num_heads,
        "num_key_value_heads": c.num_kv_heads,
        "head_dim": c.head_dim,
        "max_position_embeddings": c.max_positions,
        "rms_norm_eps": c.rms_norm_eps,
        "tie_word_embeddings": c.tie_word_embeddings,
        "rope_parameters": parameters,
        "sliding_window": None,
        "bos_token_id": None,
        "eos_token_id": None,
        **biases.get(c.model_type, {}),
    }


def hugging_face_tensors(
    config: ModelConfig, leaf: Callable[[tuple[str, ...]], torch.Tensor]
) -> dict[str, torch.Tensor]:
    """The parameters under Hugging Face's names. A leaf is a rearrangement of its tensors, so the places of their
    entries, rearranged likewise, tell where each entry of the leaf belongs.

    Raises:
        ValueError: a leaf is something else than a rearrangement.
    """
    tensors, places = {}, {}
    for path, source in leaf_sources(config).items():
        counts = [math.prod(shape) for shape in source.shapes]
        kind = path[1:] or path, source.shapes  # layers are alike
        if kind not in places:
            parts = np.split(np.arange(sum(counts)), np.cumsum(counts)[:-1])
            at = source.assemble([part.reshape(s) for part, s in zip(parts, source.shapes, strict=True)]).ravel()
            if at.size != sum(counts) or (np.bincount(at, minlength=at.size) != 1).any():
                raise ValueError(f"{'.'.join(path)} is no rearrangement of {', '.join(source.names)}")
            places[kind] = None if (at == np.arange(at.size)).all() else at
        values = leaf(path).flatten()
        if (at := places[kind]) is not None:
            values = torch.empty_like(values).scatter_(0, torch.from_numpy(at).to(values.device), values)
        parts = zip(source.names, values.split(counts), source.shapes, strict=True)
        tensors |= {name: part.view(shape) for name, part, shape in parts}
    return tensors


def compare(model: Any, prompt: np.ndarray, expected: np.ndarray) -> dict[str, float]:
    """How far the logits of a prompt [1, T] are from jaxspec's [T, V]. Root mean square and limit are in units of their
    spread.

    The limit in 16 bits: about eleven roundings a layer on each side, independent and each of up to one roundoff, and
    three times that for what softmax and silu amplify. In float32 sums round as well: a ten-thousandth. Weights in the
    wrong place give more than 1.
    """
    with torch.no_grad():
        logits = model(torch.from_numpy(prompt).to(model.device)).logits[0].float().cpu().numpy()
    difference = logits - expected
    roundings = 2 * 11 * model.config.num_hidden_layers
    return {
        "tokens": prompt.shape[1],
        "max_abs": float(np.abs(difference).max()),
        "largest_logit": float(np.abs(expected).max()),
        "top1": float(np.mean(logits.argmax(-1) == expected.argmax(-1))),
        "root_mean_square": float(np.sqrt(np.mean(difference**2)) / expected.std()),
        "limit": max(3 * math.sqrt(roundings / 3) * torch.finfo(model.dtype).eps / 2, 1e-4),
    }


def measure(models: dict[str, Any], name: str, case: str, args: argparse.Namespace) -> dict:
    """The result of a peer. Where the prefill of whole prompts does not fit into memory, it is done in parts."""
    options = options_of(name, models)
    try:
        return timed(models["target"], name, case, options, args)
    except torch.OutOfMemoryError:
        pass  # what follows is outside of the handler, whose traceback keeps tensors
    forget(models)
    return timed(models["target"], name, case, options | {"prefill_chunk_size": CHUNK}, args)


def options_of(name: str, models: dict[str, Any]) -> dict[str, Any]:
    """What `generate` is given for a peer."""
    if name == "lookup":
        return {"prompt_lookup_num_tokens": LOOKUP_TOKENS}
    if name == "assisted":
        return {"assistant_model": models["draft"]}
    if name.startswith("compiled"):
        mode = "default" if name.endswith("default") else "reduce-overhead"
        return {"cache_implementation": "static", "compile_config": transformers.CompileConfig(mode=mode)}
    return {}


def timed(model: Any, name: str, case: str, options: dict[str, Any], args: argparse.Namespace) -> dict:
    """See `measure`."""
    prompt = torch.from_numpy(np.load(args.folder / f"prompt_{case}.npy")).to(model.device)
    mask = torch.ones_like(prompt)

    def seconds(count: int) -> tuple[float, np.ndarray]:
        if prompt.is_cuda:
            torch.cuda.synchronize()
        started = time.perf_counter()
        output = model.generate(
            prompt, attention_mask=mask, max_new_tokens=count, min_new_tokens=count, do_sample=False, **options
        )
        tokens = output[:, prompt.shape[1] :].cpu().numpy()
        return time.perf_counter() - started, tokens

    count = FIRST_TOKENS.get(name, 1)
    # the whole first: its static cache is long enough for both
    pairs = [(seconds(args.new_tokens), seconds(count)) for _ in range(args.repeats + 1)]
    (warm_up, tokens), _ = pairs[0]
    if tokens.shape[1] != args.new_tokens:
        raise RuntimeError(f"{tokens.shape[1]} new tokens instead of {args.new_tokens}")
    firsts = [first for _, (first, _) in pairs[1:]]
    decodes = [whole - first for (whole, _), (first, _) in pairs[1:]]
    compiled = "_compiled_call" in model.__dict__
    if prompt.is_cuda and name.startswith("compiled") and not compiled:
        raise RuntimeError("generate compiled nothing")
    if statistics.median(decodes) <= 0:
        raise RuntimeError(f"the first {count} tokens took as long as all {args.new_tokens}")
    prefill = None if name.startswith("compiled") else statistics.median(firsts)
    expected = args.folder / f"tokens_{case}.npy"
    result = success("transformers", name, case, decodes, args.new_tokens - count, prefill)
    return result | {
        "first_seconds": firsts,
        "warm_up_seconds": warm_up,
        "compiled": compiled,
        "prefill_chunk_size": options.get("prefill_chunk_size"),
        "leading_tokens_of_jaxspec_plain": leading(tokens, np.load(expected)) if expected.exists() else None,
        "peak_memory_bytes": torch.cuda.max_memory_allocated() if prompt.is_cuda else None,
    }


def leading(tokens: np.ndarray, expected: np.ndarray) -> list[int]:
    """How many tokens of each row are the same before the first that is not."""
    return np.cumprod(tokens == expected, axis=1).sum(axis=1).tolist()


def forget(models: dict[str, Any]) -> None:
    """Lets go of caches and compiled programs. A program kept for another batch would be compiled anew for sizes that
    vary, and be slower than one for sizes that are known."""
    for model in models.values():
        for name in ("_compiled_call", "_last_compile_config", "_previous_max_cache_length"):
            model.__dict__.pop(name, None)
    torch.compiler.reset()
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
