"""Loading checkpoints: those that `convert` wrote, and through it everything that it can convert."""

import json
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

from convert.errors import ConversionError
from convert.json_file import parse_object, read_object
from jaxspec.checksums import checked
from jaxspec.models import Decoder, ModelConfig, config_from_hf, param_shapes
from jaxspec.types import Params

FORMAT_VERSION = 1
CONFIG, GENERATION_CONFIG, REPORT = "config.json", "generation_config.json", "report.json"
PARAMS, TOKENIZER = "params", "tokenizer"

# the axis of a layer's leaf that is split over a mesh: kv heads (with their query heads) and MLP columns
_SPLIT_AXIS = {
    ("attention", "qkv", "kernel"): 1,
    ("attention", "qkv", "bias"): 0,
    ("attention", "out", "kernel"): 0,
    ("mlp", "gate_up", "kernel"): 2,
    ("mlp", "gate_up", "bias"): 1,
    ("mlp", "down", "kernel"): 0,
}
_MODEL_AXIS = "model"


@dataclass(frozen=True)
class Loaded:
    """A loaded checkpoint; unpacks as `model, params, tokenizer`.

    Attributes:
        model: the decoder, to be applied as `model.apply({'params': params}, tokens, cache, start)`.
        params: the parameter tree.
        tokenizer: a transformers tokenizer, or None if the checkpoint has none.
        config: the model's config.
        generation_config: the Hugging Face generation config ({} if there is none).
        eos_ids: every id that ends a text: the union of config, generation config and tokenizer, sorted.
        report: what the conversion recorded.
    """

    model: Decoder
    params: Params
    tokenizer: Any
    config: ModelConfig
    generation_config: dict[str, Any]
    eos_ids: tuple[int, ...]
    report: dict[str, Any]

    def __iter__(self) -> Iterator[Any]:
        return iter((self.model, self.params, self.tokenizer))


def load(path: str | os.PathLike[str], *, mesh: Mesh | None = None, dtype: Any = None) -> Loaded:
    """Loads a converted checkpoint, or whatever `convert` converts.

    A Hugging Face directory, a hub id or a GGUF file is converted once, into `$JAXSPEC_CACHE` (default:
    `$XDG_CACHE_HOME/jaxspec`, `~/.cache/jaxspec`), and again when its files change. Two processes may do so at once.

    Args:
        path: a converted checkpoint, a Hugging Face directory, a hub id or a GGUF file.
        mesh: places the parameters on its devices, however many the checkpoint was saved from. Attention leaves are
            split by kv heads and MLP leaves by columns over the axis 'model' (else the last one) where that divides
            them; the others are replicated. None: the default device.
        dtype: 'float32', 'bfloat16' or 'float16'; default: as stored.

    Raises:
        ConversionError: nothing that can be loaded; the message says why.
    """
    path = os.fspath(path)
    directory = Path(path).expanduser()
    if not is_checkpoint(directory):
        directory = _convert_to_cache(path, dtype)
    return restore(directory, mesh=mesh, dtype=dtype)


def is_checkpoint(directory: Path) -> bool:
    """Whether `directory` is a complete converted checkpoint. An unfinished conversion never is one."""
    from convert.atomic import is_staging

    return not is_staging(directory) and not _missing(directory)


def restore(directory: Path, *, mesh: Mesh | None = None, dtype: Any = None) -> Loaded:
    """`load` for a directory that `convert` wrote.

    Raises:
        ConversionError: unreadable, contradictory or changed contents, or values that overflow `dtype`.
    """
    report = read_object(directory / REPORT)
    # checked first, because Orbax reports missing pieces in many ways
    sizes, files = file_sizes(directory), report.get("files")
    if not isinstance(files, dict) or not files.items() <= sizes.items():
        damaged = (
            sorted(p for p, size in files.items() if sizes.get(p) != size) if isinstance(files, dict) else [REPORT]
        )
        raise ConversionError(f"{directory}: damaged checkpoint: missing or cut files: {damaged[:8]}")
    config, hf_config = _read_config(directory / CONFIG)
    generation_path = directory / GENERATION_CONFIG
    generation = read_object(generation_path) if generation_path.is_file() else {}
    tokenizer = _load_tokenizer(directory / TOKENIZER)
    expected = report.get("crc32", {})  # checkpoints that were converted before have none
    if not isinstance(expected, dict):
        raise ConversionError(f"{directory / REPORT}: crc32 must be an object, got {type(expected).__name__}")
    with checked(directory, expected):
        params = restore_params(directory / PARAMS, config, report.get("dtype"), mesh=mesh, dtype=dtype)
    eos = token_ids(hf_config, "eos_token_id", CONFIG) | token_ids(generation, "eos_token_id", GENERATION_CONFIG)
    if tokenizer is not None and tokenizer.eos_token_id is not None:
        eos |= {tokenizer.eos_token_id}
    # an id that the model cannot emit ends nothing
    eos_ids = tuple(sorted(i for i in eos if 0 <= i < config.vocab_size))
    return Loaded(Decoder(config), params, tokenizer, config, generation, eos_ids, report)


def restore_params(
    directory: Path, config: ModelConfig, stored_dtype: Any, *, mesh: Mesh | None = None, dtype: Any = None
) -> Params:
    """Restores the parameter tree of an Orbax checkpoint.

    Raises:
        ConversionError: other leaves or shapes than the config's, unreadable data, or values that overflow `dtype`.
    """
    import orbax.checkpoint as ocp

    from convert.dtypes import target_dtype

    shapes = param_shapes(config)
    stored, target = target_dtype(stored_dtype), target_dtype(dtype or stored_dtype)

    def restore_args(path: tuple[Any, ...], leaf: jax.ShapeDtypeStruct) -> ocp.ArrayRestoreArgs:
        sharding = leaf_sharding(tuple(key.key for key in path), leaf.shape, config, mesh)
        return ocp.ArrayRestoreArgs(sharding=sharding, global_shape=leaf.shape, dtype=target)

    def read() -> Params:
        with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer:
            _check_leaves(checkpointer.metadata(directory.resolve()), shapes, directory)
            return checkpointer.restore(
                directory.resolve(),
                args=ocp.args.PyTreeRestore(
                    item=shapes, restore_args=jax.tree_util.tree_map_with_path(restore_args, shapes)
                ),
            )

    # an interrupt reaches the main thread only, where Orbax would take it for an error of its own
    thread = ThreadPoolExecutor(1, thread_name_prefix="jaxspec-restore")
    try:
        params = thread.submit(read).result()
    except ConversionError:
        raise
    except Exception as error:  # Orbax and TensorStore raise whatever their layers raise
        first_line = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise ConversionError(f"{directory}: damaged checkpoint: {first_line[:300]}") from error
    finally:
        thread.shutdown(wait=False)
    if target == jnp.float16 and stored != jnp.float16:
        _check_finite(params, target)
    return params


def leaf_sharding(
    path: tuple[str, ...], shape: tuple[int, ...], config: ModelConfig, mesh: Mesh | None
) -> NamedSharding | SingleDeviceSharding:
    """Where the leaf at `path` lives; see `load`."""
    if mesh is None:
        return SingleDeviceSharding(jax.devices()[0])
    # the decoder leaves the layout of its activations to the compiler
    mesh = Mesh(mesh.devices, mesh.axis_names, axis_types=(AxisType.Auto,) * len(mesh.axis_names))
    axis_name = _MODEL_AXIS if _MODEL_AXIS in mesh.axis_names else mesh.axis_names[-1]
    axis = _SPLIT_AXIS.get(path[1:])
    units = config.num_kv_heads if "attention" in path else config.intermediate_size
    if axis is None or units % mesh.shape[axis_name]:
        return NamedSharding(mesh, PartitionSpec())
    return NamedSharding(mesh, PartitionSpec(*[None] * axis, axis_name))


def file_sizes(directory: Path) -> dict[str, int]:
    """Bytes of every file below `directory`, by relative path, except its report."""
    files = sorted(path for path in directory.rglob("*") if path.is_file() and path != directory / REPORT)
    return {path.relative_to(directory).as_posix(): path.stat().st_size for path in files}


def config_record(config: ModelConfig, hf_config: dict[str, Any]) -> dict[str, Any]:
    """The contents of a converted checkpoint's config.json."""
    return {"format_version": FORMAT_VERSION, "model": asdict(config), "hf_config": hf_config}


def read_model_config(hf_config: Any, where: str) -> ModelConfig:
    """`config_from_hf` with one kind of error.

    Raises:
        ConversionError: the config is malformed or asks for something that is not supported.
    """
    try:
        return config_from_hf(hf_config)
    except ValueError as error:
        raise ConversionError(f"{where}: {error}") from error
    except (TypeError, KeyError, AttributeError, OverflowError) as error:
        raise ConversionError(f"{where}: malformed config ({type(error).__name__}: {str(error)[:200]})") from error


def token_ids(config: dict[str, Any], name: str, where: str) -> set[int]:
    """The ids of a config field that holds an id, a list of ids or nothing.

    Raises:
        ConversionError: it holds something else.
    """
    value = config.get(name)
    ids = [] if value is None else value if isinstance(value, list) else [value]
    if not all(type(i) is int for i in ids):
        raise ConversionError(f"{where}: {name} must be an id or a list of ids, got {str(value)[:80]}")
    return set(ids)


def check_token_ids(config: dict[str, Any], where: str) -> None:
    """Checks the special tokens of a Hugging Face config or generation config.

    Raises:
        ConversionError: one of them is neither an id nor a list of ids nor absent.
    """
    for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
        token_ids(config, name, where)


def cache_directory() -> Path:
    """Where `load` keeps what it converts."""
    if root := os.environ.get("JAXSPEC_CACHE"):
        return Path(root).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "jaxspec"


def _convert_to_cache(path: str, dtype: Any) -> Path:
    import hashlib

    from convert.atomic import is_staging
    from convert.dtypes import target_dtype
    from convert.sources import open_source
    from convert.writer import convert_cached

    directory = Path(path).expanduser()
    weights = any(directory.glob("*.safetensors"))
    if is_staging(directory) or (directory / PARAMS).is_dir() or ((directory / REPORT).is_file() and not weights):
        without = f" without {', '.join(missing)}" if (missing := _missing(directory)) else ""
        raise ConversionError(f"{path}: an unfinished or damaged conversion{without}; convert it again")
    source = open_source(path)
    target = target_dtype(dtype or source.default_dtype)
    key = hashlib.sha256(f"{source.fingerprint()}\0{target.name}\0{FORMAT_VERSION}".encode()).hexdigest()[:24]
    cached = cache_directory() / f"{directory.name}-{target.name}-{key}"
    if not is_checkpoint(cached):
        convert_cached(source, cached, dtype=target)
    return cached


def _missing(directory: Path) -> list[str]:
    """The parts of a converted checkpoint that are not there."""
    return [part for part in (REPORT, CONFIG, f"{PARAMS}/_METADATA") if not (directory / part).is_file()]


def _read_config(path: Path) -> tuple[ModelConfig, dict[str, Any]]:
    record = read_object(path)
    if record.get("format_version") != FORMAT_VERSION:
        raise ConversionError(
            f"{path}: format version {record.get('format_version')!r} instead of {FORMAT_VERSION}; convert again"
        )
    hf_config = record.get("hf_config")
    config = read_model_config(hf_config, str(path))
    # through JSON, which knows no tuples
    if parse_object(json.dumps(asdict(config)), "config") != record.get("model"):
        raise ConversionError(f"{path}: converted by a version that read the model's config differently; convert again")
    return config, hf_config


def _load_tokenizer(directory: Path) -> Any:
    if not directory.is_dir() or not any(directory.iterdir()):
        return None
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(directory, local_files_only=True)
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # readers of tokenizer files raise anything, PanicException of the bindings included
        first_line = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise ConversionError(f"{directory}: the tokenizer cannot be loaded: {first_line[:300]}") from error


def _check_leaves(metadata: Any, expected: Any, directory: Path) -> None:
    stored = metadata.item_metadata if hasattr(metadata, "item_metadata") else metadata
    found = {
        tuple(getattr(key, "key", getattr(key, "name", None)) for key in path): tuple(leaf.shape)
        for path, leaf in jax.tree_util.tree_flatten_with_path(getattr(stored, "tree", stored))[0]
    }
    wanted = {
        tuple(key.key for key in path): tuple(leaf.shape)
        for path, leaf in jax.tree_util.tree_flatten_with_path(expected)[0]
    }
    if found != wanted:
        differing = sorted("/".join(map(str, path)) for path, _ in found.items() ^ wanted.items())
        raise ConversionError(
            f"{directory}: damaged checkpoint: leaves missing, left over or mis-shaped: {differing[:8]}"
        )


def _check_finite(params: Params, target: Any) -> None:
    for path, leaf in jax.tree_util.tree_flatten_with_path(params)[0]:
        if not bool(jnp.isfinite(leaf).all()):
            raise ConversionError(
                f"{jax.tree_util.keystr(path)}: values overflow {target}; load as bfloat16 or float32"
            )
