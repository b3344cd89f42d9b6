"""Text from tokens as they come, and stop strings."""

from collections.abc import Iterable
from typing import Any


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
        from tokenizers.decoders import DecodeStream

        self._tokenizer = getattr(tokenizer, "backend_tokenizer", tokenizer)
        if not hasattr(self._tokenizer, "id_to_token"):
            raise ValueError(f"a fast tokenizer is needed to stream text, got {type(tokenizer).__name__}")
        self._decoder = DecodeStream(skip_special_tokens=True)
        self._ids: list[int] = []
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
            self._ids.append(token)
            searched = max(len(self._decoded) - max(map(len, self._stop), default=1) + 1, 0)
            self._decoded += self._decoder.step(self._tokenizer, token) or ""
            found = [at for s in self._stop if (at := self._decoded.find(s, searched)) >= 0]
            if found:
                return ids[: position + 1], self._hand_out(min(found)), True
        if last:
            # bytes of a character that never became whole are shown as the tokenizer shows them
            whole = self._tokenizer.decode(self._ids, skip_special_tokens=True)
            if whole.startswith(self._decoded):
                self._decoded = whole
            return ids, self._hand_out(len(self._decoded)), False
        held = max((n for s in self._stop for n in range(1, len(s)) if self._decoded.endswith(s[:n])), default=0)
        return ids, self._hand_out(len(self._decoded) - held), False

    def _hand_out(self, end: int) -> str:
        text = self._decoded[self._shown : end]
        self._shown = max(self._shown, end)
        return text
