"""How requests end, each in one of two ways: with a result, or with an error."""

from collections.abc import Callable, Sequence
from typing import Concatenate, ParamSpec

from ..errors import DeadlineExceeded, EngineFailed, SwarmError
from ..request import Completed, Delta, FinishReason, RequestId, TokenLogprob, Usage
from ..trace import events
from ..trace.recorder import Recorder
from .memory import RowMemory
from .row import Row, RowToken
from .sampling import RowSampler
from .scheduler import Scheduler

P = ParamSpec("P")


class Endings:
    """Hands tokens to the readers of open rows, and ends rows: all forget them, readers hear of it.

    `rows` are the open ones; those that ended leave it. `usage` is what these cost together.
    `on_end` is called with each, and with how many of its tokens were put.
    """

    def __init__(
        self,
        rows: dict[RequestId, Row],
        scheduler: Scheduler,
        memory: RowMemory,
        recorder: Recorder,
        on_end: Callable[[Row, int], None],
    ) -> None:
        self.usage = Usage()
        self._rows = rows
        self._scheduler = scheduler
        self._memory = memory
        self._recorder = recorder
        self._on_end = on_end

    def receive(self, tokens: Sequence[RowToken], now: float) -> None:
        """Hand on the tokens of a step, and end the rows that got their last one.

        Of several tokens of a row those after its end are nobody's.
        """
        for received in tokens:
            if received.row.id not in self._rows:
                continue
            # Written out, as `guarded` is: this happens for every token.
            try:
                self._receive(received, now)
            except Exception as error:
                if received.row.id in self._rows:
                    self.fail(received.row, error)

    def guarded(
        self,
        row: Row,
        action: Callable[Concatenate[Row, P], None],
        *args: P.args,
        **named: P.kwargs,
    ) -> None:
        """Do something for a row; what goes wrong ends that row alone."""
        try:
            action(row, *args, **named)
        except Exception as error:
            if row.id in self._rows:
                self.fail(row, error)

    def end(self, row: Row, reason: FinishReason) -> None:
        """The one way out for a request that did not fail."""
        # First of all, because it may fail; then the row has not ended yet.
        asked = row.prompt_logprobs.items() if row.prompt_logprobs is not None else ()
        rest = row.text.finish()
        # The last characters can complete a stop string too.
        reason = "stop" if row.text.stopped and reason == "length" else reason
        if rest:
            row.mailbox.put(Delta(row.id, rest, ()))
        kept = _keep(row)
        self._retire(row, kept)
        if reason == "cancelled":
            self._recorder.note(
                events.Cancelled, request=row.id, output_tokens=len(row.output), kept_tokens=kept
            )
        else:
            self._recorder.note(
                events.Finished,
                request=row.id,
                finish_reason=reason,
                output_tokens=len(row.output),
            )
        row.mailbox.put(self._completed(row, reason, asked))

    def expire(self, row: Row) -> None:
        """The way out for a request past its deadline: an error, but what it computed is kept."""
        kept = _keep(row)
        self.fail(row, too_late(row, self._recorder.now()), kept)

    def fail(self, row: Row, error: Exception, kept: int = 0) -> None:
        """The one way out for a request that failed."""
        failure = as_swarm_error(error, "failed", row.id)
        self._recorder.note(
            events.Failed, request=row.id, error=f"{type(failure).__name__}: {failure}"
        )
        row.mailbox.fail(failure)
        self._retire(row, kept)
        row.lane.discard(row)

    def _receive(self, received: RowToken, now: float) -> None:
        row, token, reason = received.row, received.token, received.finish_reason
        sampler = row.sampler
        if type(sampler) is RowSampler and sampler.error is not None:
            raise sampler.error
        if row.grammar is not None and row.grammar.error is not None:
            raise row.grammar.error
        if row.first_token is None:
            row.first_token = now
            self._recorder.note(events.FirstToken, request=row.id)
        row.output.append(token)
        stream = row.text
        text = "" if token in row.ends else stream.add(token)
        if (logprob := received.logprob) is None:
            row.mailbox.put(Delta(row.id, text, (token,)))
        else:
            row.logprobs.append(logprob)
            row.mailbox.put(Delta(row.id, text, (token,), (logprob,)))
        if reason is not None or stream.stopped:
            self.end(row, "stop" if stream.stopped or reason == "stop" else "length")

    def _retire(self, row: Row, kept: int) -> None:
        del self._rows[row.id]
        self._on_end(row, kept)
        self._memory.release(row)
        self._scheduler.ended(row.id)
        self.usage += row.usage(self._recorder.now())

    def _completed(
        self, row: Row, reason: FinishReason, asked: tuple[TokenLogprob | None, ...]
    ) -> Completed:
        first = row.submitted if row.first_token is None else row.first_token
        return Completed(
            request=row.id,
            text=row.text.text,
            tokens=tuple(row.output),
            finish_reason=reason,
            usage=row.usage(self._recorder.now()),
            ttft_seconds=first - row.submitted,
            prompt=tuple(row.prompt.tolist()),
            logprobs=tuple(row.logprobs),
            prompt_logprobs=asked,
        )


def _keep(row: Row) -> int:
    """Take a row out of its lane; how many of its tokens were put, now or when it was preempted."""
    return row.lane.keep(row) or row.kept


def too_late(row: Row, now: float) -> DeadlineExceeded:
    """What the reader of a row past its deadline is told."""
    return DeadlineExceeded(
        f"request {row.id} had {row.request.deadline:g} s; after {now - row.submitted:.3g} s it "
        f"had computed {row.usage(now).prompt_tokens:,} of {len(row.prompt):,} prompt tokens and "
        f"{len(row.output):,} of at most {row.max_tokens:,} new ones"
    )


def as_swarm_error(error: Exception, what: str, request: RequestId) -> SwarmError:
    """What a reader is told: the error itself if it is one of ours, else `EngineFailed`."""
    if isinstance(error, SwarmError):
        return error
    failure = EngineFailed(f"request {request} {what}: {type(error).__name__}: {error}")
    failure.__cause__ = error
    return failure
