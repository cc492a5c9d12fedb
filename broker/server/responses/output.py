"""The output of a response: what the model writes as items, and as the events that tell of them."""

from abc import ABC, abstractmethod
from collections.abc import Iterator

from ..turns.turn import Call
from .events import (
    ArgumentsDelta,
    ArgumentsDone,
    ItemAdded,
    ItemDone,
    PartAdded,
    PartDone,
    ReasoningDelta,
    ReasoningDone,
    ResponseEvent,
    TextDelta,
    TextDone,
)
from .items import new_id
from .objects import (
    ItemStatus,
    Logprob,
    OutputCall,
    OutputItem,
    OutputMessage,
    OutputReasoning,
    OutputText,
    ReasoningText,
)


class OutputWriter:
    """Makes items and events of what comes. `items` are those that are whole."""

    def __init__(self) -> None:
        self.items: list[OutputItem] = []
        self._next = 0
        self._open: _OpenItem | None = None

    @property
    def is_empty(self) -> bool:
        """Whether nothing has come yet."""
        return not self.items and self._open is None

    def number(self) -> int:
        """The sequence number of the next event."""
        self._next += 1
        return self._next - 1

    def text(self, delta: str, logprobs: tuple[Logprob, ...] = ()) -> Iterator[ResponseEvent]:
        """More text, which opens a message if none is open."""
        yield from self._opened(_OpenMessage)
        assert isinstance(self._open, _OpenMessage)
        self._open.logprobs += logprobs
        self._open.pieces.append(delta)
        if delta or logprobs:
            yield TextDelta(
                sequence_number=self.number(),
                output_index=len(self.items),
                item_id=self._open.id,
                delta=delta,
                logprobs=logprobs,
            )

    def reasoning(self, delta: str) -> Iterator[ResponseEvent]:
        """More of what the model thinks, which opens a reasoning item if none is open."""
        yield from self._opened(_OpenReasoning)
        assert self._open is not None
        self._open.pieces.append(delta)
        yield ReasoningDelta(
            sequence_number=self.number(),
            output_index=len(self.items),
            item_id=self._open.id,
            delta=delta,
        )

    def call(self, call: Call) -> Iterator[ResponseEvent]:
        """A whole call."""
        yield from self.close("completed")
        index, id = len(self.items), new_id("fc")
        empty = OutputCall(
            id=id, status="in_progress", call_id=call.id, name=call.name, arguments=""
        )
        yield ItemAdded(sequence_number=self.number(), output_index=index, item=empty)
        yield ArgumentsDelta(
            sequence_number=self.number(), output_index=index, item_id=id, delta=call.arguments
        )
        yield ArgumentsDone(
            sequence_number=self.number(),
            output_index=index,
            item_id=id,
            name=call.name,
            arguments=call.arguments,
        )
        yield self._done(
            OutputCall(
                id=id,
                status="completed",
                call_id=call.id,
                name=call.name,
                arguments=call.arguments,
            )
        )

    def close(self, status: ItemStatus) -> Iterator[ResponseEvent]:
        """End the item that is open, if one is."""
        item, self._open = self._open, None
        if item is None:
            return
        index = len(self.items)
        yield item.told(self.number(), index)
        yield PartDone(
            sequence_number=self.number(),
            output_index=index,
            item_id=item.id,
            part=item.part(),
        )
        yield self._done(item.item(status, whole=True))

    def _opened(self, kind: "type[_OpenItem]") -> Iterator[ResponseEvent]:
        if isinstance(self._open, kind):
            return
        yield from self.close("completed")
        item = self._open = kind()
        index = len(self.items)
        added = item.item("in_progress", whole=False)
        yield ItemAdded(sequence_number=self.number(), output_index=index, item=added)
        yield PartAdded(
            sequence_number=self.number(), output_index=index, item_id=item.id, part=item.part()
        )

    def _done(self, item: OutputItem) -> ItemDone:
        self.items.append(item)
        return ItemDone(sequence_number=self.number(), output_index=len(self.items) - 1, item=item)


class _OpenItem(ABC):
    """An item that is being written."""

    prefix = ""

    def __init__(self) -> None:
        self.id = new_id(self.prefix)
        self.pieces: list[str] = []

    @property
    def written(self) -> str:
        return "".join(self.pieces)

    @abstractmethod
    def part(self) -> OutputText | ReasoningText:
        """What is written so far, as a part of its content."""

    @abstractmethod
    def told(self, number: int, index: int) -> ResponseEvent:
        """The event that tells all of it at its end."""

    @abstractmethod
    def item(self, status: ItemStatus, *, whole: bool) -> OutputItem:
        """The item as it is now; without its content unless `whole`."""


class _OpenMessage(_OpenItem):
    prefix = "msg"

    def __init__(self) -> None:
        super().__init__()
        self.logprobs: list[Logprob] = []

    def part(self) -> OutputText:
        return OutputText(self.written, logprobs=tuple(self.logprobs))

    def told(self, number: int, index: int) -> TextDone:
        return TextDone(
            sequence_number=number,
            output_index=index,
            item_id=self.id,
            text=self.written,
            logprobs=tuple(self.logprobs),
        )

    def item(self, status: ItemStatus, *, whole: bool) -> OutputMessage:
        content = (self.part(),) if whole else ()
        return OutputMessage(id=self.id, status=status, content=content)


class _OpenReasoning(_OpenItem):
    prefix = "rs"

    def part(self) -> ReasoningText:
        return ReasoningText(self.written)

    def told(self, number: int, index: int) -> ReasoningDone:
        return ReasoningDone(
            sequence_number=number, output_index=index, item_id=self.id, text=self.written
        )

    def item(self, status: ItemStatus, *, whole: bool) -> OutputReasoning:
        content = (self.part(),) if whole else ()
        return OutputReasoning(id=self.id, status=status, content=content)
