"""What the agents write reaches the reader whole, on a terminal and elsewhere."""

import io

import pytest
from rich.console import Console

from mlx_swarm.agents.demo.display import PLAIN_WIDTH, LineDisplay, LiveDisplay, display_for
from mlx_swarm.agents.events import AgentDelta, AgentFailed, AgentFinished, AgentStopped
from mlx_swarm.broker.request import Usage

WORDS = " ".join(f"word{number}" for number in range(60))


def delta(agent: str, text: str) -> AgentDelta:
    return AgentDelta(agent=agent, turn=0, text=text, tokens=(0,))


def finished(agent: str) -> AgentFinished:
    return AgentFinished(
        agent=agent, turn=0, text="", finish_reason="stop", usage=Usage(), ttft_seconds=0.0
    )


def test_lines_carry_names_and_lose_no_word() -> None:
    file = io.StringIO()
    with LineDisplay(Console(file=file), ["one", "other"]) as display:
        for start in range(0, len(WORDS), 7):
            display.show(delta("one", WORDS[start : start + 7]))
        display.show(delta("other", "first\nsecond"))
        display.show(finished("other"))
        display.show(finished("one"))
    lines = [line.split(" | ") for line in file.getvalue().splitlines()]
    assert " ".join(text for name, text in lines if name == "  one") == WORDS
    assert [text for name, text in lines if name == "other"] == ["first", "second"]
    assert max(len(text) for _, text in lines) <= PLAIN_WIDTH


@pytest.mark.parametrize("text", ["x" * 200, "x" * 100 + "\nrest", "[bold]not markup[/]", "\n\n a"])
def test_lines_take_any_text(text: str) -> None:
    file = io.StringIO()
    with LineDisplay(Console(file=file), ["one"]) as display:
        display.show(delta("one", text))
        display.show(finished("one"))
    shown = "".join(line.removeprefix("one | ") for line in file.getvalue().splitlines())
    assert shown == "".join(text.split("\n")).strip()


def test_nothing_a_model_writes_steers_the_terminal() -> None:
    for terminal in (False, True):
        file = io.StringIO()
        console = Console(file=file, force_terminal=terminal, color_system=None, width=60)
        with display_for(console, ["one"]) as display:
            display.show(delta("one", "a\x1b]0;title\x07b\x9b31mc\x08\rd\te"))
            display.show(finished("one"))
        assert "a\ufffd]0;title\ufffdb\ufffd31mc\ufffdd e" in file.getvalue()


@pytest.mark.parametrize("agents", [1, 8, 40])
def test_live_table_shows_the_end_of_what_each_agent_wrote(agents: int) -> None:
    names = [f"agent-{number}" for number in range(agents)]
    console = Console(file=io.StringIO(), force_terminal=True, width=60, height=20)
    with LiveDisplay(console, names) as display:
        display.show(delta(names[0], WORDS + " [bold]"))
    with console.capture() as capture:
        console.print(display.table())
    shown = capture.get()
    assert "word59 [bold]" in shown
    assert "word0 " not in shown
    assert all(name in shown for name in names)


def test_the_console_decides() -> None:
    terminal = Console(file=io.StringIO(), force_terminal=True)
    assert isinstance(display_for(terminal, ["one"]), LiveDisplay)
    assert isinstance(display_for(Console(file=io.StringIO()), ["one"]), LineDisplay)


def test_live_table_tells_the_cancelled_from_the_failed() -> None:
    console = Console(file=io.StringIO(), force_terminal=True, color_system=None, width=60)
    with LiveDisplay(console, ["one", "other"]) as display:
        display.show(AgentStopped(agent="one", turn=0, usage=Usage()))
        display.show(AgentFailed(agent="other", turn=0, error="broken", usage=Usage()))
    with console.capture() as capture:
        console.print(display.table())
    assert [line.split() for line in capture.get().splitlines()] == [
        ["one", "cancelled"],
        ["other", "failed"],
    ]
