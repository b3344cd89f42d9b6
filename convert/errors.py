"""The one error type of conversion and loading."""


class ConversionError(ValueError):
    """A checkpoint that cannot be converted or loaded; the message says what is wrong and, where known, what to do."""
