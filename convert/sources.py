"""Opening whatever the user names: a Hugging Face directory, a hub id or a GGUF file."""

from pathlib import Path

from convert.errors import ConversionError
from convert.hf_directory import PICKLE_ADVICE, PICKLES, HFDirectory
from convert.source import Source


def open_source(src: str | Path) -> Source:
    """Opens a checkpoint for reading. Only headers and configs are read.

    Raises:
        ConversionError: nothing there, a format that is not supported, or malformed files.
    """
    try:
        return _open(src)
    except ImportError as error:
        needs = f"{error.name}, which the extra 'convert' of jaxspec installs"
        raise ConversionError(f"{src}: converting needs {needs}") from error


def _open(src: str | Path) -> Source:
    path = Path(src).expanduser()
    if path.is_dir():
        from jaxspec.checkpoint import is_checkpoint

        if is_checkpoint(path):
            raise ConversionError(f"{src}: already converted; jaxspec.load reads it as it is")
        return HFDirectory(path.resolve(), origin=str(src))
    if path.is_file():
        if any(path.match(pattern) for pattern in PICKLES):
            raise ConversionError(f"{src}: {PICKLE_ADVICE}")
        if path.suffix == ".safetensors":
            raise ConversionError(f"{src}: give the directory that holds it together with config.json")
        from convert.gguf_source import GGUFSource

        return GGUFSource(path.resolve(), origin=str(src))
    if path.exists():
        raise ConversionError(f"{src}: neither a file nor a directory")
    from convert.hub import HUB_ID, download

    if not isinstance(src, str) or HUB_ID.fullmatch(src) is None:
        raise ConversionError(f"cannot read {src}: No such file or directory")
    return download(src)
