"""The broker: one process, one prompt cache, one model or several, many agents.

The names below are the public ones. Importing this package neither imports MLX nor starts anything.
"""

from importlib import import_module
from typing import TYPE_CHECKING

from . import backend as backend  # first: a BLAS must be in place before anything imports MLX
from .errors import AdapterError as AdapterError
from .errors import AgentCancelled as AgentCancelled
from .errors import BackendMissing as BackendMissing
from .errors import BrokerClosed as BrokerClosed
from .errors import CacheError as CacheError
from .errors import ContextOverflow as ContextOverflow
from .errors import DeadlineExceeded as DeadlineExceeded
from .errors import EngineFailed as EngineFailed
from .errors import InvalidRequest as InvalidRequest
from .errors import InvalidSetting as InvalidSetting
from .errors import ModelBusy as ModelBusy
from .errors import ModelError as ModelError
from .errors import ModelNotFound as ModelNotFound
from .errors import ModelUnreadable as ModelUnreadable
from .errors import OutOfMemory as OutOfMemory
from .errors import QueueFull as QueueFull
from .errors import SwarmClosed as SwarmClosed
from .errors import SwarmError as SwarmError
from .errors import TraceError as TraceError
from .errors import UnsupportedCacheKind as UnsupportedCacheKind
from .request import Completed as Completed
from .request import Delta as Delta
from .request import FinishReason as FinishReason
from .request import Grammar as Grammar
from .request import Message as Message
from .request import ModelInfo as ModelInfo
from .request import NamedTool as NamedTool
from .request import Request as Request
from .request import RequestId as RequestId
from .request import Sampling as Sampling
from .request import Started as Started
from .request import StreamEvent as StreamEvent
from .request import TokenLogprob as TokenLogprob
from .request import Tool as Tool
from .request import ToolCall as ToolCall
from .request import ToolChoice as ToolChoice
from .request import Usage as Usage

if TYPE_CHECKING:
    from .broker import Broker as Broker
    from .broker import BrokerStatistics as BrokerStatistics
    from .response import ResponseStream as ResponseStream

_LAZY = ("Broker", "BrokerStatistics", "ResponseStream")


def __getattr__(name: str) -> object:
    """Import the broker itself on first use, so that this package stays cheap to import."""
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(".broker", __name__), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_LAZY])
