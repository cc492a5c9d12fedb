"""Errors of other libraries, retold in one line."""

LONGEST_REASON = 300


def reason_of(error: BaseException) -> str:
    """The kind of an error and the first line of its text."""
    lines = str(error).strip().splitlines()
    text = lines[0].strip() if lines else ""
    kind = type(error).__name__
    return f"{kind}: {text[:LONGEST_REASON]}" if text else kind
