"""Converting Hugging Face and GGUF checkpoints to what `jaxspec.load` restores."""

from typing import TYPE_CHECKING, Any

from convert.errors import ConversionError

if TYPE_CHECKING:
    from convert.writer import Report, convert

__all__ = ["ConversionError", "Report", "convert"]


def __getattr__(name: str) -> Any:
    # imported on first use: naming the error type must not load jax and Orbax
    if name in ("Report", "convert"):
        from convert import writer

        return getattr(writer, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
