"""Log-probabilities of tokens as the API writes them: with the tokens' texts."""

from collections.abc import Sequence

from ...request import TokenLogprob
from ..turns.token_texts import TokenTexts
from .objects import Logprob, TopLogprob


async def logprobs_of(found: Sequence[TokenLogprob], texts: TokenTexts) -> tuple[Logprob, ...]:
    """These, with texts and bytes."""
    await texts.learn(found)
    return tuple(
        Logprob(
            *_named(each.token, each.logprob, texts),
            top_logprobs=tuple(TopLogprob(*_named(*top, texts)) for top in each.top),
        )
        for each in found
    )


def _named(token: int, logprob: float, texts: TokenTexts) -> tuple[str, float, tuple[int, ...]]:
    return texts.text_of(token), logprob, tuple(texts.bytes_of(token))
