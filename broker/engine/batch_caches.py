"""The cache objects that a model sees while many rows decode: one a layer, for all rows together.

The prefix of the rows lies in extents that they share, everything else in their tails. What
`update_and_fetch` returns is a `BatchHandle`; the seam's dispatcher lets it attend.
"""

from typing import Any, NamedTuple

import mlx.core as mx

from ..cache.layout import TokenLeaf
from .shared_attention import DecodePlan, Geometry, Span, Tails, decode_attention, geometry_of
from .slabs import TailSlabs


class WindowMask(NamedTuple):
    """Stands for the mask of a window that the model asks for and its cache does not have.

    Opaque to models, as a `BatchHandle` is.
    """

    window: int


class Asked(NamedTuple):
    """The shapes of one layer's attention, and whether it has sinks or a window."""

    geometry: Geometry
    sinks: bool
    window: bool


class StepState:
    """What all layers of a step share. `offset` `[rows]` counts the tokens before the step's own,
    `place` `[rows]` is where in the slabs that one goes. `plans` and `spans` are by the layers'
    own window (0: none), spans also by leaf.
    """

    def __init__(
        self,
        offset: mx.array,
        place: mx.array,
        plans: dict[int, DecodePlan],
        spans: dict[int, list[Span]],
    ) -> None:
        self.offset = offset
        self.place = place
        self.plans = plans
        self.spans = spans
        self.asked: set[Asked] | None = None
        """What its layers ask of attention, where somebody wants to know."""
        self._places: dict[tuple[int, int], mx.array] = {}
        self._narrowed: dict[tuple[int, int], DecodePlan] = {}

    def advance(self) -> "StepState":
        """The next step of the same rows, every one a token further."""
        plans = {window: plan.advance() for window, plan in self.plans.items()}
        return StepState(self.offset + 1, self.place + 1, plans, self.spans)

    def places(self, new: mx.array) -> mx.array:
        """`place`, as the slabs take it for one token a row, `[rows, heads, 1, dim]`."""
        _, heads, _, dim = new.shape
        if (heads, dim) not in self._places:
            shape = (1, heads, len(self.place), dim)
            self._places[heads, dim] = mx.broadcast_to(self.place[None, None, :, None], shape)
        return self._places[heads, dim]

    def plan(self, own: int, asked: int) -> DecodePlan:
        """The plan of layers with an own window, where the model asks for a smaller one."""
        if not asked or 0 < own <= asked:
            return self.plans[own]
        if (own, asked) not in self._narrowed:
            base = self.plans[own]
            self._narrowed[own, asked] = DecodePlan(
                base.groups,
                base.host_lengths,
                slots=base.host_slots,
                begins=base.host_begins,
                window=asked,
                positions=base.positions,
            )
        return self._narrowed[own, asked]


class BatchCache:
    """One layer's KV of all rows, for one token a row."""

    def __init__(self, leaf: TokenLeaf, index: int, slabs: TailSlabs, state: StepState) -> None:
        self._leaf = leaf
        self._index = index
        self._slabs = slabs
        self._state = state
        self._handle: BatchHandle | None = None

    @property
    def offset(self) -> mx.array:
        """Tokens of each row before this step's."""
        return self._state.offset

    def make_mask(
        self, N: int, return_array: bool = False, window_size: int | None = None
    ) -> WindowMask | None:
        """None where a row may see all that its plan shows it."""
        if N != 1:
            raise TypeError(f"{N} tokens a row; a decode step has one")
        own = self._leaf.retention.window
        if window_size is None or 0 < own <= window_size:
            return None
        return WindowMask(window_size)

    def update_and_fetch(
        self, keys: mx.array, values: mx.array
    ) -> tuple["BatchHandle", "BatchHandle"]:
        """Append one token a row, `[rows, heads, 1, dim]`; return what to attend to, twice."""
        self._slabs.write(self._index, self._state.places(keys), (keys, values))
        self._handle = BatchHandle(
            self._state,
            self._leaf.retention.window,
            self._state.spans[self._index],
            Tails(*self._slabs.view(self._index)),
        )
        return self.keys_and_values()

    def keys_and_values(self) -> tuple["BatchHandle", "BatchHandle"]:
        """What `update_and_fetch` returned, for layers that share another one's KV."""
        assert self._handle is not None
        return self._handle, self._handle


class BatchHandle:
    """What one layer's queries attend to. Opaque to models."""

    __slots__ = ("_spans", "_state", "_tails", "_window")

    def __init__(self, state: StepState, window: int, spans: list[Span], tails: Tails) -> None:
        self._state = state
        self._window = window
        self._spans = spans
        self._tails = tails

    def attend(
        self, queries: mx.array, scale: float, mask: Any, sinks: mx.array | None
    ) -> mx.array:
        """Attention `[rows, heads, 1, dim]`; raises `TypeError` for a mask of the model's own."""
        if mask is not None and not isinstance(mask, WindowMask):
            raise TypeError("the model makes its own masks: it needs stock caches")
        plan = self._state.plan(self._window, mask.window if mask is not None else 0)
        if self._state.asked is not None:
            asked = Asked(geometry_of(queries, self._tails), sinks is not None, bool(plan.window))
            self._state.asked.add(asked)
        return decode_attention(queries, self._spans, self._tails, plan, scale=scale, sinks=sinks)
