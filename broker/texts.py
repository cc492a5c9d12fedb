"""The models of an open broker, by name: what text is encoded and rendered with.

Names come and go in the engine's thread, together with the engine's own, so that the two agree
whatever is cancelled in the event loop.
"""

from contextlib import suppress
from typing import TYPE_CHECKING

from .errors import BrokerClosed, ModelBusy, ModelNotFound
from .request import ModelInfo

if TYPE_CHECKING:
    from .engine.loop import EngineLoop
    from .engine.roster import ModelSource
    from .models import LoadedModel


class Texts:
    """Tokenizers and chat templates, which may be used in any thread."""

    def __init__(self, first: "LoadedModel") -> None:
        self._models = {first.name: first}

    def named(self, name: str) -> "LoadedModel":
        """A model; raises `ModelNotFound`."""
        model = self._models.get(name)
        if model is None:
            names = ", ".join(list(self._models))
            raise ModelNotFound(f"no model {name!r} is loaded; there are {names}")
        return model

    def names(self) -> tuple[str, ...]:
        """All names, those of adapters and aliases included."""
        return tuple(self._models)

    def load(self, engine: "EngineLoop", name: str, source: "ModelSource") -> ModelInfo:
        """Engine side: `EngineLoop.load`."""
        info, self._models[name] = engine.load(name, source)
        return info

    def alias(self, engine: "EngineLoop", name: str, existing: str) -> ModelInfo:
        """Engine side: `EngineLoop.alias`."""
        info = engine.alias(name, existing)
        self._models[name] = self._models[info.name]
        return info

    def unload(self, engine: "EngineLoop", name: str) -> None:
        """Engine side: `EngineLoop.unload`."""
        for gone in engine.unload(name):
            del self._models[gone]


class Addition:
    """One more model, unless whoever asked for it gives up: then it goes again, if it came."""

    def __init__(self, texts: Texts, name: str, source: "ModelSource") -> None:
        self._texts = texts
        self._name = name
        self._source = source
        self._is_done = False
        self.is_given_up = False

    def do(self, engine: "EngineLoop") -> ModelInfo:
        """Engine side: load it."""
        if self.is_given_up:
            raise BrokerClosed(f"nobody waits for {self._name!r} any more")
        info = self._texts.load(engine, self._name, self._source)
        self._is_done = True
        return info

    def undo(self, engine: "EngineLoop") -> None:
        """Engine side: let go of it, unless somebody has begun to use it."""
        if self._is_done:
            with suppress(ModelBusy, ModelNotFound):
                self._texts.unload(engine, self._name)
