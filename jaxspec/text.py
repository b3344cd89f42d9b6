"""Text from files, text from tokens as they come, and stop strings."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any


def read_text(path: str | Path, errors: str = "strict") -> str:
    """The text of a UTF-8 file; `errors` is that of `open`.

    Raises:
        ValueError: the file cannot be read, and why.
    """
    try:
        return Path(path).read_text(encoding="utf-8", errors=errors)
    except OSError as error:
        raise ValueError(f"cannot read {path}: {error.strerror or error}") from None
    except UnicodeDecodeError:
        raise ValueError(f"cannot read {path}: not UTF-8 text") from None


def check_stop(stop: tuple[str, ...], tokenizer: Any) -> tuple[str, ...]:
    """Validates stop strings. Raises ValueError."""
    if isinstance(stop, str):
        stop = (stop,)
    if not isinstance(stop, Iterable) or any(not isinstance(s, str) or not s for s in stop):
        raise ValueError(f"stop strings must be non-empty strings, got {stop!r}")
    if stop and tokenizer is None:
        raise ValueError("stop strings need a tokenizer")
    return tuple(stop)


class TextStream:
    """Detokenises one row and looks for stop strings.

    Text is handed out once it is certain: not while a character's bytes are incomplete, and not while it may be the
    beginning of a stop string.
    """

    def __init__(self, tokenizer: Any, stop: tuple[str, ...] = ()) -> None:
        self._tokenizer = getattr(tokenizer, "backend_tokenizer", tokenizer)
        if not hasattr(self._tokenizer, "id_to_token"):
            raise ValueError(f"a fast tokenizer is needed to stream text, got {type(tokenizer).__name__}")
        # ids are decoded behind those of the last piece of text: a token's spaces can depend on what precedes it
        self._context: list[int] = []
        self._context_text = ""
        self._pending: list[int] = []  # ids behind the context that are no text yet
        self._decoded = ""  # everything decoded so far
        self._shown = 0  # characters of it already handed out
        self._stop = stop

    def push(self, ids: list[int], last: bool) -> tuple[list[int], str, bool]:
        """Takes the ids of a round; `last` says that the row ends with them.

        Returns:
            The ids up to the one that completes a stop string, the new certain text, and whether a stop string was
            found.
        """
        for position, token in enumerate(ids):
            self._pending.append(token)
            searched = max(len(self._decoded) - max(map(len, self._stop), default=1) + 1, 0)
            self._decode(whole_characters=True)
            found = [at for s in self._stop if (at := self._decoded.find(s, searched)) >= 0]
            if found:
                return ids[: position + 1], self._hand_out(min(found)), True
        if last:
            # bytes of a character that never became whole are shown as the tokenizer shows them
            self._decode(whole_characters=False)
            return ids, self._hand_out(len(self._decoded)), False
        held = max((n for s in self._stop for n in range(1, len(s)) if self._decoded.endswith(s[:n])), default=0)
        return ids, self._hand_out(len(self._decoded) - held), False

    def _decode(self, whole_characters: bool) -> None:
        text = self._tokenizer.decode(self._context + self._pending, skip_special_tokens=True)
        # An incomplete character is shown as U+FFFD. With byte tokens it can turn whole ones before it into U+FFFD too;
        # what was decoded stays, so that only lengths are compared.
        if len(text) <= len(self._context_text) or (whole_characters and text.endswith("\ufffd")):
            return
        self._decoded += text[len(self._context_text) :]
        self._context, self._pending = self._pending, []
        self._context_text = self._tokenizer.decode(self._context, skip_special_tokens=True)

    def _hand_out(self, end: int) -> str:
        text = self._decoded[self._shown : end]
        self._shown = max(self._shown, end)
        return text
