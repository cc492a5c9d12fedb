"""Summarize every text file of a folder: one agent a file, one set of instructions for all.

python examples/summarize_folder.py FOLDER [PATTERN] [MODEL]
"""

import argparse
import sys
from pathlib import Path

import anyio

from mlx_swarm import Broker, Swarm, SwarmError

INSTRUCTIONS = """\
You summarize texts. Each message is one text. Reply with one sentence that says what the text is
about and what matters most in it. Keep names, numbers and dates as they are. Add nothing.

Text: The lift will be serviced on Wednesday between 8 and 10. Please use the stairs.
Reply: The lift is out of order on Wednesday from 8 to 10.
"""
LONGEST_TEXT = 4000  # characters of a file that its agent reads


def read(folder: Path, pattern: str) -> dict[str, str]:
    """The texts that are not empty, by the name of their file."""
    files = sorted(path for path in folder.glob(pattern) if path.is_file())
    texts = {path.name: path.read_text("utf-8", "replace")[:LONGEST_TEXT] for path in files}
    return {name: text for name, text in texts.items() if text.strip()}


async def summarize(texts: dict[str, str], model: str) -> None:
    """Print a sentence for every text, and what all of them cost."""
    async with (
        Broker(model) as broker,
        Swarm(broker, instructions=INSTRUCTIONS, concurrency=16, max_tokens=60) as swarm,
    ):
        results = await swarm.map(f"Text: {text}" for text in texts.values())
    for name, result in zip(texts, results, strict=True):
        print(f"{name}: {result.text if result.error is None else result.error}")
    usage = results.usage
    print(
        f"{len(results)} agents, {usage.prompt_tokens:,} prompt tokens, "
        f"{usage.cached_tokens:,} of them from the cache"
    )


def main() -> None:
    """Run the example."""
    parser = argparse.ArgumentParser(description="Summarize every text file of a folder.")
    parser.add_argument("folder", metavar="FOLDER", type=Path)
    parser.add_argument("pattern", metavar="PATTERN", nargs="?", default="*.txt")
    parser.add_argument("model", metavar="MODEL", nargs="?", default="smollm2-135m")
    given = parser.parse_args()
    if not given.folder.is_dir():
        parser.error(f"there is no folder {given.folder}")
    try:
        texts = read(given.folder, given.pattern)
        if not texts:
            sys.exit(f"no file of {given.folder} that matches {given.pattern} has any text")
        anyio.run(summarize, texts, given.model)
    except (SwarmError, OSError) as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main()
