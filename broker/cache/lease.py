"""What `take` hands out: a clone of a donor's first tokens, and the pins that keep it alive."""

import logging
from collections.abc import Callable
from typing import Any, NamedTuple, Self

from ..affinity import ThreadGuard
from .extents import Extent, ExtentRange
from .holdings import Holdings
from .kinds import clone
from .logprobs import Logprobs
from .node import Node
from .plan import Plan
from .prefix_hash import Tokens
from .space import Space

_log = logging.getLogger(__name__)


class PromptLease:
    """A clone at offset `length`, and its pins. A context manager; releasing twice is harmless.

    `tokens` are the `length` tokens whose KV the clone holds; `caches` is one cache object a layer,
    made when first asked for. Running a model on them never changes the donor. `ranges` are the
    parts of extents that they read, from position 0 on. `ram_tokens` and `cold_tokens` say where
    they came from and add up to `length`; `plan` says why there are no more. `logprobs`, where they
    were asked for, are those of its tokens and of the one after them.
    """

    def __init__(
        self,
        tokens: Tokens,
        make_caches: Callable[[], list[Any]],
        *,
        namespace: str,
        plan: Plan,
        on_release: Callable[["PromptLease"], None],
        ranges: tuple[ExtentRange, ...] = (),
    ) -> None:
        self.tokens = tokens
        self._make_caches = make_caches
        self._caches: list[Any] | None = None
        self.ranges = ranges
        self.namespace = namespace
        self.plan = plan
        self.logprobs: Logprobs | None = None
        self._on_release: Callable[[PromptLease], None] | None = on_release

    @property
    def length(self) -> int:
        """Tokens whose KV the clone holds."""
        return len(self.tokens)

    @property
    def caches(self) -> list[Any]:
        """One cache object a layer, always the same ones; none after the release."""
        if self._caches is None:
            self._caches = self._make_caches()
        return self._caches

    @property
    def ram_tokens(self) -> int:
        """Tokens of it that were in RAM when it was asked for."""
        return self.length - self.cold_tokens

    @property
    def cold_tokens(self) -> int:
        """Tokens of it that were restored for it."""
        return self.plan.cold_tokens

    @property
    def released(self) -> bool:
        """Whether the pins are gone."""
        return self._on_release is None

    def release(self) -> None:
        """Give the pins back and drop the clone's caches. Only the first call does something."""
        hook, self._on_release = self._on_release, None
        if hook is not None:
            self._caches, self.ranges = [], ()
            hook(self)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.release()


class Lender:
    """Makes leases and knows those that are out."""

    def __init__(self, holdings: Holdings, guard: ThreadGuard) -> None:
        self._holdings = holdings
        self._guard = guard
        self.on_released: Callable[[], object] | None = None
        self.departing_bytes = 0
        """Bytes that only leases without a node keep: they go as those are released."""
        self._out: dict[PromptLease, _Loan] = {}

    def __len__(self) -> int:
        """Leases not yet released."""
        return len(self._out)

    def lend(self, space: Space, node: Node, plan: Plan) -> PromptLease:
        """A lease on all tokens down to the end of `node`, which must be a usable length."""
        layout = space.layout
        assert layout is not None
        tree = space.tree
        spans = [each.span for each in node.path() if isinstance(each.span, ExtentRange)]
        checkpoint, length = node.checkpoint, node.stop
        lent = [self._holdings.lend(span) for span in spans]
        tree.lease(node)
        lease = PromptLease(
            tree.tokens_of(node),
            lambda: clone(layout, lent, checkpoint, length),
            namespace=space.name,
            plan=plan,
            on_release=self._released,
            ranges=tuple(lent),
        )
        self._out[lease] = _Loan(node, lent, 0)
        return lease

    def detach(self, lease: PromptLease) -> None:
        """Keep what the lease reads, but let its node go, which is about to leave the tree."""
        node, lent, _ = self._out[lease]
        assert node is not None
        departing = lent[-1].nbytes if lent else 0
        self._out[lease] = _Loan(None, lent, departing)
        self.departing_bytes += departing
        node.tree.release(node)

    def node_of(self, lease: PromptLease) -> Node | None:
        """The node at whose end a lease ends; None if it is released or its namespace cleared."""
        loan = self._out.get(lease)
        if loan is None or loan.node is None or loan.node.span is None:
            return None
        return loan.node

    def nodes(self) -> set[Node]:
        """Every node that a lease protects: those it ends at and all above them."""
        ends = (loan.node for loan in self._out.values() if loan.node is not None)
        return {node for end in ends if end.span is not None for node in end.path()}

    def readers(self, extent: Extent) -> int:
        """How many leases read an extent."""
        return sum(any(span.extent is extent for span in loan.lent) for loan in self._out.values())

    def spans(self) -> list[ExtentRange]:
        """Every range that clones keep."""
        return [span for loan in self._out.values() for span in loan.lent]

    def _released(self, lease: PromptLease) -> None:
        self._guard.check()
        loan = self._out.pop(lease)
        self.departing_bytes -= loan.departing
        for span in loan.lent:
            self._holdings.give_back(span)
        if loan.node is not None:
            loan.node.tree.release(loan.node)
        if self.on_released is None:
            return
        try:
            self.on_released()
        except Exception:  # compacting needs memory; whoever gave some back did nothing wrong
            _log.exception("no room could be made after a lease was released")


class _Loan(NamedTuple):
    node: Node | None
    lent: list[ExtentRange]
    departing: int
