"""Errors of other libraries, retold in one line."""

LONGEST_REASON = 300


def reason_of(error: BaseException) -> str:
    """The kind of an error and the first line of its text, with the next if that announces it."""
    lines = str(error).strip().splitlines()
    told = 2 if lines and lines[0].rstrip().endswith(":") else 1
    text = " ".join(line.strip() for line in lines[:told])
    kind = type(error).__name__
    return f"{kind}: {text[:LONGEST_REASON]}" if text else kind
