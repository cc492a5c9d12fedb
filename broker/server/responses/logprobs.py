"""Log-probabilities of tokens as the API writes them: with the tokens' texts."""

from collections.abc import Sequence

from ...broker import Broker
from ...request import TokenLogprob
from .objects import Logprob, TopLogprob


class TokenTexts:
    """The texts of single tokens of a model, each decoded once."""

    def __init__(self, broker: Broker, model: str) -> None:
        self._broker = broker
        self._model = model
        self._texts: dict[int, str] = {}

    async def logprobs(self, found: Sequence[TokenLogprob]) -> tuple[Logprob, ...]:
        """These, with texts."""
        for each in found:
            for token in (each.token, *(token for token, _ in each.top)):
                if token not in self._texts:
                    self._texts[token] = await self._broker.decode([token], model=self._model)
        return tuple(
            Logprob(
                *self._named(each.token, each.logprob),
                top_logprobs=tuple(TopLogprob(*self._named(*top)) for top in each.top),
            )
            for each in found
        )

    def _named(self, token: int, logprob: float) -> tuple[str, float, tuple[int, ...]]:
        text = self._texts[token]
        return text, logprob, tuple(text.encode())
