"""Output items and their events, and the message that they are again in the next turn."""

from collections.abc import Iterable

from mlx_swarm.broker.messages import Message, ToolCall
from mlx_swarm.broker.server.responses.conversations import reply
from mlx_swarm.broker.server.responses.events import ResponseEvent
from mlx_swarm.broker.server.responses.output import OutputWriter
from mlx_swarm.broker.server.turns.turn import Call

CALL = Call("call_1", "look", "{}")


def types(events: Iterable[ResponseEvent]) -> list[str]:
    return [event.type.removeprefix("response.") for event in events]


def test_each_change_of_what_is_written_is_an_item() -> None:
    writer = OutputWriter()
    events = [
        *writer.reasoning("hm"),
        *writer.reasoning("m"),
        *writer.text("a"),
        *writer.call(CALL),
        *writer.text("b"),
        *writer.close("incomplete"),
    ]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert types(events) == [
        "output_item.added",
        "content_part.added",
        "reasoning_text.delta",
        "reasoning_text.delta",
        "reasoning_text.done",
        "content_part.done",
        "output_item.done",
        "output_item.added",
        "content_part.added",
        "output_text.delta",
        "output_text.done",
        "content_part.done",
        "output_item.done",
        "output_item.added",
        "function_call_arguments.delta",
        "function_call_arguments.done",
        "output_item.done",
        "output_item.added",
        "content_part.added",
        "output_text.delta",
        "output_text.done",
        "content_part.done",
        "output_item.done",
    ]
    assert [item.status for item in writer.items] == [*["completed"] * 3, "incomplete"]
    assert reply(writer.items) == [
        Message(
            "assistant",
            "ab",
            tool_calls=(ToolCall("call_1", "look", "{}"),),
            reasoning="hmm",
        )
    ]


def test_a_text_of_nothing_is_an_empty_message() -> None:
    writer = OutputWriter()
    assert writer.is_empty
    assert types([*writer.text(""), *writer.close("completed")]) == [
        "output_item.added",
        "content_part.added",
        "output_text.done",
        "content_part.done",
        "output_item.done",
    ]
    assert reply(writer.items) == [Message("assistant", "")]


def test_nothing_written_is_no_message() -> None:
    assert reply([]) == []
