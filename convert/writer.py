"""Writing a converted checkpoint, one leaf at a time."""

import inspect
import threading
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import numpy as np
from tqdm import tqdm

from convert.atomic import locked, staged
from convert.dtypes import target_dtype
from convert.errors import ConversionError
from convert.json_file import write_object
from convert.plan import PlannedLeaf, plan_leaves
from convert.source import Source
from convert.sources import open_source
from jaxspec.checkpoint import (
    CONFIG,
    FORMAT_VERSION,
    GENERATION_CONFIG,
    PARAMS,
    REPORT,
    TOKENIZER,
    check_token_ids,
    config_record,
    file_sizes,
    is_checkpoint,
    read_model_config,
)
from jaxspec.checksums import checksums

if TYPE_CHECKING:
    from convert.check import CheckRow

CHUNK_BYTES = 64 << 20  # of one array on disk: bounds what encoding it copies


@dataclass
class Report:
    """What a conversion did; `report.json` holds it.

    Attributes:
        source: 'safetensors' or 'gguf', and what the user named.
        sha256: digest of every source file.
        model_type: the Hugging Face model type.
        dtype: of the written parameters.
        stored_dtypes: how many source tensors had which storage type.
        num_tensors: tensors in the source.
        num_leaves: leaves written.
        num_parameters: their elements in all.
        tokenizer: the tokenizer's files.
        files: bytes of every file of the checkpoint except `report.json`, by its path.
        crc32: CRC-32 of every file of the parameters, 8 hex digits, by its path; `load` compares.
        checks: what has been verified, in words.
        check: the comparison with transformers, row by row; empty unless asked for.
        seconds: the conversion's wall time, checks excluded.
    """

    source: dict[str, str]
    sha256: dict[str, str]
    model_type: str
    dtype: str
    stored_dtypes: dict[str, int]
    num_tensors: int
    num_leaves: int
    num_parameters: int
    tokenizer: list[str]
    files: dict[str, int]
    crc32: dict[str, str]
    checks: list[str]
    seconds: float
    check: list["CheckRow"] = field(default_factory=list)
    format_version: int = FORMAT_VERSION
    versions: dict[str, str] = field(
        default_factory=lambda: {name: version(name) for name in ("jax", "orbax-checkpoint", "numpy")}
    )


def convert(
    src: str | Path,
    dst: str | Path,
    *,
    dtype: Any = None,
    check: bool = False,
    overwrite: bool = False,
    progress: bool = True,
) -> Report:
    """Converts a checkpoint to one that `jaxspec.load` restores.

    Tensors are read, cast and written one leaf at a time; `dst` appears, complete, at the end.

    Args:
        src: a Hugging Face directory with safetensors, a hub id (`owner/name`, `owner/name@revision`), or a GGUF file.
        dst: the directory to make.
        dtype: 'float32', 'bfloat16' or 'float16'; default: the source's own, bfloat16 for quantised GGUF files.
        check: compare with transformers on real text before `dst` appears.
        overwrite: replace an existing checkpoint at `dst`; it stays until the new one is complete.
        progress: show a progress bar on stderr.

    Raises:
        ConversionError: a source or destination that cannot be used, or one inside the other; nothing is written then.
        CheckFailed: the check failed; nothing is written then either.
    """
    if check:
        from convert.reference import require_torch

        require_torch()
    dst = Path(dst).expanduser().resolve()
    _check_apart(src, dst)
    if dst.exists() and not is_checkpoint(dst) and not (dst.is_dir() and not any(dst.iterdir())):
        raise ConversionError(f"{dst} exists and is not a converted checkpoint; it will not be replaced")
    with locked(dst, wait=False):
        return _convert(open_source(src), dst, dtype=dtype, check=check, overwrite=overwrite, progress=progress)


def _check_apart(src: str | Path, dst: Path) -> None:
    """Raises ConversionError where the checkpoint would be written into its own source, or would replace it."""
    source = Path(src).expanduser()
    if not source.exists():  # a hub id, or what opening it says is not there
        return
    source = source.resolve()
    if source in dst.parents and source.is_dir():
        raise ConversionError(f"{dst} lies inside its source directory, {source}; name a directory outside it")
    if dst in source.parents:
        raise ConversionError(f"{dst} holds its source, {source}, and would replace it; name another directory")


def convert_cached(source: Source, dst: Path, *, dtype: Any = None, progress: bool = True) -> None:
    """Converts an opened source to `dst` unless that is there; two processes at once convert once."""
    with locked(dst, wait=True):
        if not is_checkpoint(dst):
            _convert(source, dst, dtype=dtype, check=False, overwrite=True, progress=progress)


def _convert(source: Source, dst: Path, *, dtype: Any, check: bool, overwrite: bool, progress: bool) -> Report:
    started = time.monotonic()
    config = read_model_config(source.config, source.origin)
    check_token_ids(source.config, f"{source.origin}: {CONFIG}")
    check_token_ids(source.generation_config or {}, f"{source.origin}: {GENERATION_CONFIG}")
    target = target_dtype(dtype or source.default_dtype)
    with staged(dst, overwrite=overwrite) as directory:
        leaves = plan_leaves(source, config)
        (directory / TOKENIZER).mkdir()
        tokenizer = source.write_tokenizer(directory / TOKENIZER)
        write_object(directory / CONFIG, config_record(config, source.config))
        if source.generation_config is not None:
            write_object(directory / GENERATION_CONFIG, source.generation_config)
        _write_params(directory / PARAMS, source, leaves, target, progress)
        files = file_sizes(directory)
        report = Report(
            source={"kind": source.kind, "origin": source.origin},
            sha256=dict(source.sha256()),
            model_type=config.model_type,
            dtype=target.name,
            stored_dtypes=dict(Counter(info.dtype for info in source.tensors.values())),
            num_tensors=len(source.tensors),
            num_leaves=len(leaves),
            num_parameters=sum(_size(leaf.shape) for leaf in leaves),
            tokenizer=tokenizer,
            files=files,
            crc32=checksums(directory, [name for name in files if name.startswith(f"{PARAMS}/")]),
            checks=["every leaf filled once, every tensor used or known to be redundant", "all values finite"],
            seconds=round(time.monotonic() - started, 2),
        )
        write_object(directory / REPORT, asdict(report))
        if check:
            _check(source, directory, report)
    return report


def _check(source: Source, directory: Path, report: Report) -> None:
    from convert.check import CheckFailed, check_conversion

    report.check = check_conversion(source, directory)
    if not all(row.passed for row in report.check):
        raise CheckFailed(source.origin, report.check)
    report.checks.append("equal to transformers on real text, see 'check'")
    write_object(directory / REPORT, asdict(report))


class _Leaf:
    """A leaf that exists only while it is written. Quacks like an array for Orbax's bookkeeping."""

    def __init__(self, leaf: PlannedLeaf, dtype: np.dtype, build: Callable[[], np.ndarray]) -> None:
        self.shape, self.dtype, self.build = leaf.shape, dtype, build
        self.size = _size(leaf.shape)
        self.nbytes = self.size * dtype.itemsize
        self.ndim = len(leaf.shape)


def _write_params(directory: Path, source: Source, leaves: list[PlannedLeaf], dtype: np.dtype, progress: bool) -> None:
    import orbax.checkpoint as ocp

    given_up = threading.Event()

    class LeafHandler(ocp.type_handlers.NumpyHandler):
        """Builds one leaf, waits until it is on disk, and only then builds the next."""

        async def serialize(self, values: Any, infos: Any, args: Any = None) -> list[Any]:
            for leaf, info, arg in zip(values, infos, args or [ocp.SaveArgs()] * len(values), strict=True):
                if given_up.is_set():
                    raise ConversionError("interrupted")
                array = leaf.build()
                for write in await super().serialize([array], [info], [arg]):
                    write.result()
                bar.update(leaf.nbytes)
            return []

    total = sum(_size(leaf.shape) for leaf in leaves) * dtype.itemsize
    # newer releases copy what they are given unless told not to; older ones never do
    parameters = inspect.signature(ocp.type_handlers.NumpyHandler.__init__).parameters
    no_copy = {"deepcopy_host_arrays": False} if "deepcopy_host_arrays" in parameters else {}
    # without a handler for jax.Array Orbax warns, although no leaf is one
    handlers = ocp.type_handlers.create_type_handler_registry(
        (_Leaf, LeafHandler(**no_copy)), (jax.Array, ocp.type_handlers.ArrayHandler())
    )
    tree: dict[str, Any] = {}
    for leaf in leaves:
        node = tree
        for key in leaf.path[:-1]:
            node = node.setdefault(key, {})
        node[leaf.path[-1]] = _Leaf(leaf, dtype, partial(_build, source, leaf, dtype))
    # compressing weights saves a fifth of the space and costs most of the time of converting and loading
    handler = ocp.PyTreeCheckpointHandler(use_compression=False, type_handler_registry=handlers)
    with (
        tqdm(total=total, unit="B", unit_scale=True, desc="converting", disable=None if progress else True) as bar,
        ocp.Checkpointer(handler) as checkpointer,
        ThreadPoolExecutor(1) as thread,
    ):
        save_args = _map_leaves(tree, lambda _: ocp.SaveArgs(chunk_byte_size=CHUNK_BYTES))
        # an interrupt, which reaches the main thread only, must not leave Orbax's own threads writing behind it
        saving = thread.submit(checkpointer.save, directory, args=ocp.args.PyTreeSave(tree, save_args=save_args))
        try:
            saving.result()
        except KeyboardInterrupt:
            given_up.set()
            raise
        except (ConversionError, OSError):
            raise
        except Exception as error:  # Orbax and TensorStore raise whatever their layers raise
            raise ConversionError(f"cannot write {directory}: {str(error)[:300]}") from error


def _build(source: Source, leaf: PlannedLeaf, dtype: np.dtype) -> np.ndarray:
    array = np.ascontiguousarray(leaf.source.assemble([source.read(name, dtype) for name in leaf.source.names]))
    if array.shape != leaf.shape or array.dtype != dtype:
        raise ConversionError(
            f"leaf {'/'.join(leaf.path)} came out as {array.dtype} {array.shape}, expected {dtype} {leaf.shape}"
        )
    return array


def _map_leaves(tree: dict[str, Any], function: Callable[[Any], Any]) -> dict[str, Any]:
    return {k: _map_leaves(v, function) if isinstance(v, dict) else function(v) for k, v in tree.items()}


def _size(shape: tuple[int, ...]) -> int:
    return int(np.prod(shape, dtype=np.int64))
