"""What was said before, as the tokens that the model wrote: histories that clients send again.

A client sends a conversation as messages. Rendered and tokenized anew, a reply need not give the
tokens that were generated; then the next turn would miss from there on. So what every turn became
is kept, and a conversation that continues it gets its very tokens, as far as they say what its
rendering says. Where a template shows history otherwise than it was written (without what the model
thought, say), the rendering's own tokens follow.
"""

import hashlib
import secrets
from collections import Counter, OrderedDict, deque
from collections.abc import Iterator, Sequence
from itertools import groupby, islice
from threading import Lock
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import msgspec
import numpy as np
from msgspec import Struct

from ...models.chat_format import ChatFormat, Rendered
from ...request import Message, Tool, ToolCall, check_messages, check_tools
from .alignment import Alignment, Ids, align
from .turn import Caller, Conversation, Ended

MAX_BYTES = 64 << 20
ENTRY_BYTES = 1024
"""What a history takes beside its tokens, about."""

MAX_HEIRS = 64
"""So many agents that said the same are told apart."""

CANDIDATES = 4
"""So many of the longest known histories are compared with a conversation."""


class Prompt(NamedTuple):
    """A prompt as tokens, and as the `text` that the template made of it; `boundaries` in tokens.

    `caller` is who it belongs to. `scope` and `key` name the conversation, `history` the longest
    known one that it continues; all are empty for what is no conversation.
    """

    tokens: tuple[int, ...]
    boundaries: tuple[int, ...]
    text: str
    caller: Caller
    scope: bytes = b""
    key: bytes = b""
    history: bytes = b""


class HistoriesStatistics(Struct, frozen=True, kw_only=True):
    """Histories that are kept and their bytes; conversations that continued one, and their tokens
    that were taken from it.
    """

    entries: int
    bytes: int
    continued: int
    tokens: int


class _History:
    """What a conversation became. `heirs` are the agents that have been here and may go on, `taken`
    says which ones did, by the conversations that they went on with.
    """

    def __init__(self, tokens: Ids) -> None:
        self.tokens = tokens
        self.heirs: deque[str] = deque(maxlen=MAX_HEIRS)
        self.taken: OrderedDict[bytes, str] = OrderedDict()

    @property
    def nbytes(self) -> int:
        return int(self.tokens.nbytes) + ENTRY_BYTES


class Histories:
    """Conversations and the tokens they became, in up to `max_bytes`; the longest unused go first.

    May be used from any thread.
    """

    def __init__(self, max_bytes: int = MAX_BYTES) -> None:
        self._max_bytes = max_bytes
        self._bytes = self._continued = self._tokens = 0
        self._kept: OrderedDict[bytes, _History] = OrderedDict()
        self._running: Counter[tuple[str, str]] = Counter()
        self._chats: WeakKeyDictionary[ChatFormat, bytes] = WeakKeyDictionary()
        self._lock = Lock()

    def prompt(
        self,
        chat: ChatFormat,
        model: str,
        conversation: Conversation,
        caller: Caller,
        most_tokens: int | None = None,
    ) -> Prompt:
        """The prompt of a conversation. Raises what `ChatFormat.render` raises.

        Decoded, its tokens are always what the rendering's own would be.
        """
        check_messages(conversation.messages)
        check_tools(conversation.tools)
        rendered = chat.render(
            conversation.messages,
            conversation.tools,
            thinking=conversation.thinking,
            most_tokens=most_tokens,
        )
        scope = self._scope(chat, conversation.tools, caller.tenant)
        keys = list(_keys(scope, conversation.messages))
        known = self._known([key for role, key in reversed(keys) if role == "assistant"])
        tokens, boundaries, taken = _continued(chat, rendered, [each for _, each in known])
        if taken:
            with self._lock:
                self._continued += 1
                self._tokens += taken
        return Prompt(
            tokens=tokens,
            boundaries=boundaries,
            text=rendered.text,
            caller=caller,
            scope=scope,
            key=keys[-1][1] if keys else scope,
            history=known[0][0] if known else b"",
        )

    def join(self, prompt: Prompt) -> Prompt:
        """A turn on this prompt begins: whose it is. `leave` has to follow.

        Without a name it belongs to an agent of the history that it continues, unless that has a
        turn running or went on from there with something else: then to a new one.
        """
        caller = prompt.caller
        with self._lock:
            agent = caller.agent or self._heir(prompt)
            self._running[caller.tenant, agent] += 1
        return prompt._replace(caller=msgspec.structs.replace(caller, agent=agent))

    def leave(self, prompt: Prompt) -> None:
        """The turn that joined with this prompt is over, whatever became of it."""
        party = prompt.caller.tenant, prompt.caller.agent
        with self._lock:
            self._running[party] -= 1
            if self._running[party] <= 0:
                del self._running[party]

    def keep(self, prompt: Prompt, model: str, conversation: Conversation, ended: Ended) -> None:
        """Remember what a turn became."""
        if not prompt.scope or not ended.tokens:
            return
        calls = tuple(ToolCall(call.id, call.name, call.arguments) for call in ended.calls)
        reply = Message("assistant", conversation.begun + ended.text, tool_calls=calls)
        *_, (_, key) = _keys(prompt.scope, [*conversation.messages, reply])
        history = _History(np.array([*prompt.tokens, *ended.tokens], np.int32))
        with self._lock:
            before = self._kept.get(key)
            if before is not None:
                history.heirs, history.taken = before.heirs, before.taken
                self._forget(key)
            if prompt.caller.agent not in history.heirs:
                history.heirs.append(prompt.caller.agent)
            self._kept[key] = history
            self._bytes += history.nbytes
            while self._bytes > self._max_bytes:
                self._forget(next(iter(self._kept)))

    def statistics(self) -> HistoriesStatistics:
        """Sizes now, counts since the start."""
        with self._lock:
            return HistoriesStatistics(
                entries=len(self._kept),
                bytes=self._bytes,
                continued=self._continued,
                tokens=self._tokens,
            )

    def check_integrity(self) -> None:
        """Assert what must always hold."""
        with self._lock:
            assert self._bytes == sum(each.nbytes for each in self._kept.values())
            assert self._bytes <= self._max_bytes
            assert all(count > 0 for count in self._running.values())

    def _scope(self, chat: ChatFormat, tools: Sequence[Tool], tenant: str) -> bytes:
        """Names what must agree before histories are compared at all."""
        with self._lock:
            name = self._chats.setdefault(chat, secrets.token_bytes(8))
        return _digest(name, [tenant, [[t.name, t.description, t.parameters] for t in tools]])

    def _known(self, keys: Sequence[bytes]) -> list[tuple[bytes, _History]]:
        with self._lock:
            found = list(islice((key for key in keys if key in self._kept), CANDIDATES))
            for key in reversed(found):
                self._kept.move_to_end(key)
            return [(key, self._kept[key]) for key in found]

    def _heir(self, prompt: Prompt) -> str:
        """The agent that goes on with a history, or a new name."""
        history = self._kept.get(prompt.history)
        if history is not None:
            tenant = prompt.caller.tenant
            for agent in [*history.heirs, history.taken.get(prompt.key, "")]:
                if agent and (tenant, agent) not in self._running:
                    self._take(history, prompt.key, agent)
                    return agent
        return f"chat-{secrets.token_hex(4)}"

    def _take(self, history: _History, key: bytes, agent: str) -> None:
        if agent in history.heirs:
            history.heirs.remove(agent)
        history.taken[key] = agent
        if len(history.taken) > MAX_HEIRS:
            history.taken.popitem(last=False)

    def _forget(self, key: bytes) -> None:
        history = self._kept.pop(key, None)
        if history is not None:
            self._bytes -= history.nbytes


def _continued(
    chat: ChatFormat, rendered: Rendered, known: Sequence[_History]
) -> tuple[tuple[int, ...], tuple[int, ...], int]:
    """The tokens of a prompt, its boundaries, and how many of its tokens are a history's."""
    own = np.array(rendered.tokens, np.int32)
    plain = tuple(rendered.tokens), rendered.boundaries, 0
    best: Alignment | None = None
    for history in known:
        found = align(history.tokens, own, chat.decode, chat.special)
        if best is None or found.rendered > best.rendered:
            best, tokens = found, history.tokens
        if found.kept == len(history.tokens):
            break
    if best is None or not best.kept:
        return plain
    joined = best.joined(tokens, own)
    if not np.array_equal(joined, own) and chat.decode(joined) != chat.decode(own):
        return plain
    boundaries = {*best.moved(rendered.boundaries), best.kept}
    return tuple(joined.tolist()), tuple(sorted(boundaries)), best.kept


def _keys(scope: bytes, messages: Sequence[Message]) -> Iterator[tuple[str, bytes]]:
    """For each turn its role, and a name of the conversation up to it.

    Messages of an assistant that follow each other are one turn. What clients leave out or change
    is no part of a name: ids, reasoning, white space around a text, how arguments are written.
    """
    key = scope
    for number, (role, turns) in enumerate(groupby(messages, _role)):
        for turn in [list(turns)] if role == "assistant" else [[each] for each in turns]:
            text = "".join(each.content.strip() for each in turn)
            calls = [
                [call.name, _arguments(call.arguments)] for each in turn for call in each.tool_calls
            ]
            key = _digest(key, [number, role, text, calls])
            yield role, key


def _role(message: Message) -> str:
    return "system" if message.role == "developer" else message.role


def _arguments(text: str) -> Any:
    try:
        return msgspec.json.decode(text)
    except (msgspec.DecodeError, RecursionError):
        return text


def _digest(before: bytes, value: Any) -> bytes:
    hashed = hashlib.sha256(before)
    hashed.update(msgspec.json.encode(value, order="sorted"))
    return hashed.digest()
