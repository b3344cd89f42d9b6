"""The independent side of the check: the same checkpoint, run by transformers in PyTorch."""

import inspect
from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np

from convert.errors import ConversionError
from convert.hf_directory import HFDirectory
from convert.source import Source


class ReferenceRun(NamedTuple):
    """What transformers computes for one text of T tokens, all float32.

    Attributes:
        logits: [T, V] of one forward over the whole text.
        cached_logits: [C, V] of the last C tokens, fed one at a time after a prefill of the others.
        inv_freq: [H / 2] rotary frequencies.
        cos: [P, H / 2] rotary table at the requested positions.
        sin: likewise.
        eos_ids: the ids at which transformers' generate stops.
    """

    logits: np.ndarray
    cached_logits: np.ndarray
    inv_freq: np.ndarray
    cos: np.ndarray
    sin: np.ndarray
    eos_ids: frozenset[int]


def require_torch() -> None:
    """Raises ConversionError where PyTorch is not installed."""
    try:
        import torch  # noqa: F401
    except ImportError as error:
        raise ConversionError("the check compares with PyTorch: pip install torch") from error


def run_reference(
    source: Source, dtype: np.dtype, tokens: list[int], num_cached: int, positions: list[int]
) -> ReferenceRun:
    """Runs the source's weights, rounded to `dtype`, in float32.

    A Hugging Face directory is read by transformers itself; a GGUF file's tensors come from `source`, so that both
    sides have the same dequantised weights.
    """
    import torch
    from transformers import DynamicCache

    model = _hugging_face_model(source, dtype) if isinstance(source, HFDirectory) else _rebuilt_model(source, dtype)
    model.eval()
    with torch.inference_mode():
        ids = torch.tensor([tokens])
        logits = model(ids, use_cache=False).logits[0].numpy()
        # transformers renames the argument
        argument = "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"
        cache = {argument: DynamicCache(config=model.config), "use_cache": True}
        model(ids[:, :-num_cached], logits_to_keep=1, **cache)
        last = range(len(tokens) - num_cached, len(tokens))
        steps = [model(ids[:, i : i + 1], **cache).logits[0, -1].numpy() for i in last]
        rotary = model.model.rotary_emb
        cos, sin = rotary(torch.zeros(1), torch.tensor([positions]))
        half = cos.shape[-1] // 2
        return ReferenceRun(
            logits=logits,
            cached_logits=np.stack(steps),
            inv_freq=rotary.inv_freq.numpy().copy(),
            cos=cos[0, :, :half].numpy().copy(),
            sin=sin[0, :, :half].numpy().copy(),
            eos_ids=frozenset(_ids(model.generation_config.eos_token_id) | _ids(model.config.eos_token_id)),
        )


def _hugging_face_model(source: HFDirectory, dtype: np.dtype) -> Any:
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(source.directory, dtype=torch.float32, local_files_only=True)
    if dtype != np.float32:
        for parameter in model.parameters():
            parameter.data = parameter.data.to(getattr(torch, dtype.name)).float()
    return model


def _rebuilt_model(source: Source, dtype: np.dtype) -> Any:
    import torch
    from transformers import GenerationConfig

    state = {n: torch.from_numpy(source.read(n, dtype).astype(np.float32)) for n in source.tensors}
    model = model_of(source.config, state, source.origin)
    model.generation_config = GenerationConfig(**(source.generation_config or {}))
    return model


def model_of(config: dict[str, Any], state: dict[str, Any], origin: str) -> Any:
    """transformers' model of a config.json around tensors under Hugging Face's names, in their dtype, on their device.

    Args:
        config: the contents of the config.json.
        state: PyTorch tensors; they become the model's own.
        origin: names the model in errors.

    Raises:
        ConversionError: transformers expects other tensors.
    """
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    values = {k: v for k, v in config.items() if k != "model_type"}
    hf_config = AutoConfig.for_model(config["model_type"], **values)
    first = next(iter(state.values()))
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(hf_config, dtype=first.dtype)
    missing, unexpected = model.load_state_dict(state, strict=False, assign=True)
    model.tie_weights()
    if unexpected or set(missing) - {"lm_head.weight"} or any(p.is_meta for p in model.parameters()):
        raise ConversionError(f"{origin}: transformers expects other tensors: {missing + unexpected}")
    # its frequency buffer is not part of the state and is still on the meta device
    model.model.rotary_emb = type(model.model.rotary_emb)(hf_config)
    return model.to(first.device)


def _ids(value: int | Iterable[int] | None) -> set[int]:
    if value is None:
        return set()
    return {value} if isinstance(value, int) else set(value)
