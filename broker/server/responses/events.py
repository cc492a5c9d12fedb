"""The events of a response on the wire, as OpenAI names them.

`sequence_number` counts the events of one response from 0.
"""

from msgspec import Struct

from .objects import Logprob, OutputItem, OutputText, ReasoningText, Response


class ResponseEvent(Struct, frozen=True, kw_only=True, tag_field="type"):
    """What all events have."""

    sequence_number: int

    @property
    def type(self) -> str:
        """The event's name."""
        return str(self.__struct_config__.tag)


class Lifecycle(ResponseEvent, frozen=True, kw_only=True):
    """An event with the response as it is then."""

    response: Response


class Created(Lifecycle, frozen=True, kw_only=True, tag="response.created"):
    """The request was accepted."""


class InProgress(Lifecycle, frozen=True, kw_only=True, tag="response.in_progress"):
    """It is computed."""


class Completed(Lifecycle, frozen=True, kw_only=True, tag="response.completed"):
    """The end: the model was done."""


class Incomplete(Lifecycle, frozen=True, kw_only=True, tag="response.incomplete"):
    """The end: cut off by `max_output_tokens`, or cancelled (its status says so)."""


class Failed(Lifecycle, frozen=True, kw_only=True, tag="response.failed"):
    """The end: an error."""


class OutputEvent(ResponseEvent, frozen=True, kw_only=True):
    """An event of the output item with this place in the output."""

    output_index: int


class ItemAdded(OutputEvent, frozen=True, kw_only=True, tag="response.output_item.added"):
    """A new output item, as yet empty."""

    item: OutputItem


class ItemDone(OutputEvent, frozen=True, kw_only=True, tag="response.output_item.done"):
    """An output item that is whole."""

    item: OutputItem


class PartEvent(OutputEvent, frozen=True, kw_only=True):
    """An event of one part of an item's content."""

    item_id: str
    content_index: int = 0


class PartAdded(PartEvent, frozen=True, kw_only=True, tag="response.content_part.added"):
    """A new part, as yet empty."""

    part: OutputText | ReasoningText


class PartDone(PartEvent, frozen=True, kw_only=True, tag="response.content_part.done"):
    """A part that is whole."""

    part: OutputText | ReasoningText


class TextDelta(PartEvent, frozen=True, kw_only=True, tag="response.output_text.delta"):
    """More text."""

    delta: str
    logprobs: tuple[Logprob, ...] = ()


class TextDone(PartEvent, frozen=True, kw_only=True, tag="response.output_text.done"):
    """All of a part's text."""

    text: str
    logprobs: tuple[Logprob, ...] = ()


class ReasoningDelta(PartEvent, frozen=True, kw_only=True, tag="response.reasoning_text.delta"):
    """More of what the model thinks."""

    delta: str


class ReasoningDone(PartEvent, frozen=True, kw_only=True, tag="response.reasoning_text.done"):
    """All of what the model thought."""

    text: str


class ArgumentsDelta(
    OutputEvent, frozen=True, kw_only=True, tag="response.function_call_arguments.delta"
):
    """More of a call's arguments."""

    item_id: str
    delta: str


class ArgumentsDone(
    OutputEvent, frozen=True, kw_only=True, tag="response.function_call_arguments.done"
):
    """All of a call's arguments."""

    item_id: str
    name: str
    arguments: str


class ErrorEvent(ResponseEvent, frozen=True, kw_only=True, tag="error"):
    """The stream ends here, though the response need not."""

    message: str
    code: str | None = None
    param: str | None = None


StreamEvent = (
    Created
    | InProgress
    | Completed
    | Incomplete
    | Failed
    | ItemAdded
    | ItemDone
    | PartAdded
    | PartDone
    | TextDelta
    | TextDone
    | ReasoningDelta
    | ReasoningDone
    | ArgumentsDelta
    | ArgumentsDone
    | ErrorEvent
)
"""Any event that there is."""
