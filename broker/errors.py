"""Every error that mlx-swarm raises on purpose, as one small tree under `SwarmError`.

Messages are one line, carry the numbers, and say what to do where there is something to do.
"""


class SwarmError(Exception):
    """Base of all errors raised by mlx-swarm."""


class InvalidRequest(SwarmError):
    """A request that can never be served as it stands; nothing was changed by refusing it.

    `field` names what is wrong, where it is one field of the `Request`, its `Sampling` or its
    `Grammar`.
    """

    def __init__(self, message: str, field: str | None = None) -> None:
        super().__init__(message)
        self.field = field


class ContextOverflow(InvalidRequest):
    """The prompt and the tokens asked for do not fit the model's context."""


class InvalidSetting(SwarmError, ValueError):
    """A setting of the broker outside its range; the message says what is taken."""


class ModelError(SwarmError):
    """A model could not be found, fetched, converted or loaded."""


class ModelNotFound(ModelError):
    """Nothing answers to the name; the message says what was looked for and where."""


class ModelUnreadable(ModelError):
    """The files are there but broken, incomplete or of a kind that is not supported."""


class ModelBusy(ModelError):
    """A model with open requests cannot be unloaded."""


class AdapterError(ModelError):
    """An adapter is not there, is broken or does not fit its model, which is as before."""


class BackendMissing(SwarmError, ImportError):
    """MLX itself is not installed; the message names the extra to install."""


class QueueFull(SwarmError):
    """As many requests wait as may; nothing was changed by refusing one more."""


class DeadlineExceeded(SwarmError):
    """A request was not over by its deadline; what it had computed may serve the next one."""


class CacheError(SwarmError):
    """The prompt cache refused an operation; the caller still owns what it passed in."""


class UnsupportedCacheKind(CacheError):
    """A cache class that no codec knows; the message names the class."""


class ColdStoreBusy(CacheError):
    """The cold store takes no more writes just now; the same write may be offered again."""


class ColdStoreRefused(CacheError):
    """The cold store will never take this write; nothing is wrong with it otherwise."""


class CorruptFile(CacheError):
    """A file of the cold store does not hold what was written; the message says where."""


class ForeignFile(CacheError):
    """A file of another identity or of a newer format; it is left alone."""


class OutOfMemory(SwarmError):
    """A reservation that the memory ledger cannot grant; the message carries the numbers."""


class EngineFailed(SwarmError):
    """A model step failed; the rows of that step ended, later requests are served."""


class BrokerClosed(SwarmError):
    """The broker was closed, or was never opened."""


class TraceError(SwarmError):
    """A trace file cannot be written or read; the message names the file and the line."""


class SwarmClosed(SwarmError):
    """An agent was given work outside its swarm's scope."""


class AgentCancelled(SwarmError):
    """The result of an agent that was cancelled was asked for."""
