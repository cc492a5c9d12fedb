"""What a turn came to, in the words of the Messages API: one reply, or the events of a stream."""

from http import HTTPStatus

from msgspec import Raw

from ..errors import ApiError
from ..turns.histories import Prompt
from ..turns.turn import Call, Ended, ReasoningDelta, TextDelta, TurnEvent
from .turns import Marks
from .wire import (
    BlockDelta,
    BlockStart,
    BlockStop,
    Delta,
    Event,
    InputDelta,
    MessageDelta,
    MessageStart,
    MessageStop,
    Reply,
    ReplyBlock,
    SignatureDelta,
    Stop,
    StopReason,
    TextReply,
    Thinking,
    ThinkingDelta,
    ToolUseReply,
    Usage,
)
from .wire import TextDelta as TextDeltaEvent

STOPS: dict[str, StopReason] = {
    "stop": "end_turn",
    "length": "max_tokens",
    "tool_calls": "tool_use",
}


class ReplyBuilder:
    """Turns the events of a turn into those of a stream, and into the reply they add up to.

    `marked` is the length of the prompt, in tokens, up to which it is marked as shared.
    """

    def __init__(self, identifier: str, model: str, prompt_tokens: int, marked: int) -> None:
        usage = Usage(input_tokens=prompt_tokens)
        self.reply = Reply(id=identifier, model=model, usage=usage)
        self._marked = marked
        self._blocks: list[ReplyBlock] = []
        self._open: type[TextReply] | type[Thinking] | None = None
        self._parts: list[str] = []

    def start(self) -> MessageStart:
        """The first event. What of the prompt is cached is not known yet."""
        return MessageStart(self.reply)

    def take(self, event: TurnEvent) -> list[Event]:
        """The events of a stream that an event of the turn leads to.

        Raises `ApiError` for a turn that was cancelled.
        """
        match event:
            case TextDelta():
                return [*self._go_on(TextReply), self._delta(TextDeltaEvent(event.text))]
            case ReasoningDelta():
                return [*self._go_on(Thinking), self._delta(ThinkingDelta(event.text))]
            case Call():
                return [*self._close(), *self._call(event)]
            case Ended():
                return [*self._close(), *self._end(event)]
        return []

    def _go_on(self, kind: type[TextReply] | type[Thinking]) -> list[Event]:
        if self._open is kind:
            return []
        closed = self._close()
        self._open = kind
        return [*closed, BlockStart(len(self._blocks), kind(""))]

    def _delta(self, delta: TextDeltaEvent | ThinkingDelta) -> Event:
        text = delta.text if isinstance(delta, TextDeltaEvent) else delta.thinking
        self._parts.append(text)
        return BlockDelta(len(self._blocks), delta)

    def _close(self) -> list[Event]:
        if self._open is None:
            return []
        at = len(self._blocks)
        signed: list[Event] = [BlockDelta(at, SignatureDelta())] if self._open is Thinking else []
        self._blocks.append(self._open("".join(self._parts)))
        self._open, self._parts = None, []
        return [*signed, BlockStop(at)]

    def _call(self, call: Call) -> list[Event]:
        at = len(self._blocks)
        self._blocks.append(ToolUseReply(call.id, call.name, Raw(call.arguments.encode())))
        delta: Delta = InputDelta(call.arguments)
        return [
            BlockStart(at, ToolUseReply(call.id, call.name, Raw(b"{}"))),
            BlockDelta(at, delta),
            BlockStop(at),
        ]

    def _end(self, ended: Ended) -> list[Event]:
        stop = _stop(ended)
        usage = _usage(ended, self._marked)
        self.reply = Reply(
            id=self.reply.id,
            model=self.reply.model,
            content=tuple(self._blocks),
            stop_reason=stop.stop_reason,
            stop_sequence=stop.stop_sequence,
            usage=usage,
        )
        return [MessageDelta(stop, usage), MessageStop()]


def marked_length(prompt: Prompt, marks: Marks) -> int:
    """Up to how many tokens a prompt is marked: the first boundary is the instructions' end."""
    if marks == "none" or not prompt.boundaries:
        return 0
    return prompt.boundaries[0 if marks == "instructions" else -1]


def _stop(ended: Ended) -> Stop:
    if ended.finish_reason == "cancelled":
        raise ApiError(
            HTTPStatus.SERVICE_UNAVAILABLE,
            "the server ended the turn before it was complete",
            type="server_error",
            code="overloaded",
        )
    if ended.stop_sequence is not None and ended.finish_reason == "stop":
        return Stop("stop_sequence", ended.stop_sequence)
    # Nothing was to be written: the prompt alone was computed.
    if ended.finish_reason == "stop" and not ended.tokens:
        return Stop("max_tokens", None)
    return Stop(STOPS[ended.finish_reason], None)


def _usage(ended: Ended, marked: int) -> Usage:
    usage = ended.usage
    created = max(0, marked - usage.cached_tokens)
    return Usage(
        input_tokens=usage.prompt_tokens - usage.cached_tokens - created,
        cache_creation_input_tokens=created,
        cache_read_input_tokens=usage.cached_tokens,
        output_tokens=usage.output_tokens,
    )
