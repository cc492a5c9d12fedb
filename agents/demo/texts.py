"""What the demo's agents are told: one editor's handbook for all, and a short task for each."""

from importlib.resources import files
from typing import NamedTuple


class Task(NamedTuple):
    """A short job for one agent."""

    name: str
    text: str


TASKS = (
    Task(
        "summary",
        "Summarize\n"
        "Text: The water in Mill Street will be off on Tuesday from 9 to 12 because the main "
        "pipe is being replaced. Please fill some bottles in advance.",
    ),
    Task(
        "friendly",
        "Make it friendly\n"
        "Text: Anna, the slides are still missing. I need them by Thursday at 3 pm.\nReply:",
    ),
    Task(
        "professional",
        "Make it professional\n"
        "Text: Hey, you guys STILL haven't paid the 480 euros. It's been 6 weeks!\nReply:",
    ),
    Task(
        "shorter",
        "Make it shorter\n"
        "Text: I just wanted to quickly let you know that, due to the fact that the train was"
        " cancelled, I will not be able to be at the office before 11 today.\nReply:",
    ),
    Task(
        "subject",
        "Write a subject line\n"
        "Text: The kitchen on the second floor is closed from Monday because it gets new "
        "tiles. Please empty the fridge by Friday evening.",
    ),
    Task(
        "title",
        "Write a title\n"
        "Text: A small library in Norway lends out skis, tents and bicycles beside its books."
        " Last year people borrowed 2,300 of them.",
    ),
    Task(
        "points",
        "List the key points\n"
        "Text: The new bus line 7 starts in May. It runs every 20 minutes between the station"
        " and the harbour. A ticket costs 2 euros, and children ride free.",
    ),
    Task(
        "corrected",
        "Correct the mistakes\n"
        "Text: The comitee meet on the first monday of every month and send there decisions "
        "to all members.",
    ),
)


def handbook(*, short: bool) -> str:
    """The instructions that all agents share: about 800 tokens, or 300."""
    name = "handbook_short.md" if short else "handbook.md"
    return files(__package__).joinpath(name).read_text("utf-8")


def tasks_for(agents: int) -> list[Task]:
    """One task for each of `agents` agents; a task that comes again gets a numbered name."""
    rounds = (divmod(number, len(TASKS)) for number in range(agents))
    return [
        Task(TASKS[index].name + (f"-{turn + 1}" if turn else ""), TASKS[index].text)
        for turn, index in rounds
    ]
