"""Ask one question of a model, of adapters over it, and with a draft, all at the same time.

python examples/several_models.py QUESTION [--model MODEL] [--adapter FOLDER ...] [--draft MODEL]
"""

import argparse
import sys

import anyio

from mlx_swarm import Broker, Completed, Message, Request, SwarmError


async def ask(question: str, model: str, adapters: list[str], draft: str) -> None:
    """Print what every model answers, in the order in which they do."""
    async with Broker(model) as broker:
        asked = {"the model": Request(messages=[Message("user", question)], max_tokens=60)}
        for number, folder in enumerate(adapters, start=1):
            adapter = await broker.load_adapter(folder, name=f"adapter-{number}")
            asked[folder] = Request(
                messages=[Message("user", question)], max_tokens=60, model=adapter.name
            )
        if draft:
            # A smaller model of the same tokenizer proposes what the model only has to check.
            await broker.load(draft, name="draft")
            asked["with a draft"] = Request(
                messages=[Message("user", question)], max_tokens=60, draft="draft"
            )

        async def answer(who: str, request: Request) -> None:
            done: Completed = await broker.complete(request)
            print(f"{who}: {done.text!r}")

        async with anyio.create_task_group() as tasks:
            for who, request in asked.items():
                tasks.start_soon(answer, who, request)
        serving = (await broker.statistics()).engine.models
        print(f"{sum(each.weights for each in serving.values()):,} bytes of weights in memory")
        if draft:
            serial = serving[broker.model_name].serial
            print(f"{serial.accepted_tokens} of {serial.drafted_tokens} proposed tokens were right")


def main() -> None:
    """Run the example."""
    parser = argparse.ArgumentParser(description="Ask one question of several models at once.")
    parser.add_argument("question", metavar="QUESTION")
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--adapter", metavar="FOLDER", action="append", default=[])
    parser.add_argument("--draft", metavar="MODEL", default="")
    given = parser.parse_args()
    try:
        anyio.run(ask, given.question, given.model, given.adapter, given.draft)
    except* SwarmError as errors:
        sys.exit("\n".join(str(error) for error in errors.exceptions))


if __name__ == "__main__":
    main()
