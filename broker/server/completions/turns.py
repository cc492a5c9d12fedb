"""From the body of a request for completions to the turns that answer it."""

from msgspec.structs import replace

from ..errors import invalid
from ..openai_fields import check_top, choice_seed
from ..settings import ServerSettings
from ..turns.turn import Caller, Turn
from .wire import CompletionBody

DEFAULT_TOKENS = 16
MAX_TURNS = 1024

PromptOf = str | tuple[int, ...]


def turns_of(body: CompletionBody, caller: Caller, settings: ServerSettings) -> list[Turn]:
    """A turn for each choice of each prompt, those of one prompt in a row.

    Raises `ApiError` naming the field that is wrong.
    """
    prompts, choices = prompts_of(body), body.choices()
    if len(prompts) * choices > MAX_TURNS:
        raise invalid(
            f"{len(prompts):,} prompts with {choices} choices each are asked for; up to "
            f"{MAX_TURNS:,} choices are taken",
            "prompt",
        )
    _check(body, choices)
    turn = _turn(body, caller, settings)
    seeds = [choice_seed(body.seed, index) for index in range(choices)]
    return [
        replace(turn, prompt=prompt, sampling=replace(turn.sampling, seed=seed))
        for prompt in prompts
        for seed in seeds
    ]


def prompts_of(body: CompletionBody) -> list[PromptOf]:
    """The prompts. Raises `ApiError` for empty ones and for lists of different things."""
    given = body.prompt
    if isinstance(given, str):
        prompts: list[PromptOf] = [given]
    elif given and all(isinstance(each, int) for each in given):
        prompts = [tuple(each for each in given if isinstance(each, int))]
    else:
        prompts = [_prompt(each, f"prompt[{at}]") for at, each in enumerate(given or [])]
    if not prompts or not all(prompts) or len({type(each) for each in prompts}) > 1:
        raise invalid(
            "prompt is a text, a list of tokens, or a list of texts or of lists of tokens; none "
            "of them empty",
            "prompt",
        )
    return prompts


def _prompt(given: str | int | list[int], where: str) -> PromptOf:
    if isinstance(given, int):
        raise invalid(f"{where} is a token among other things", where)
    return given if isinstance(given, str) else tuple(given)


def _check(body: CompletionBody, choices: int) -> None:
    if body.suffix:
        raise invalid("suffix is not supported: models here only continue a text", "suffix")
    if body.best_of is not None and body.best_of != choices:
        raise invalid(
            f"best_of is {body.best_of} and n is {choices}; all that is generated is returned",
            "best_of",
        )
    if body.max_tokens is not None and body.max_tokens < 0:
        raise invalid(f"max_tokens is {body.max_tokens}; it must be 0 or more", "max_tokens")


def _turn(body: CompletionBody, caller: Caller, settings: ServerSettings) -> Turn:
    wants_logprobs = body.logprobs is not None
    default = settings.default_tokens or DEFAULT_TOKENS
    return Turn(
        prompt="",
        caller=caller,
        model=body.model or "",
        max_tokens=body.max_tokens or default,
        sampling=body.sampling(settings.temperature),
        stop=body.stops(),
        logprobs=wants_logprobs,
        top_logprobs=check_top("logprobs", body.logprobs),
        prompt_logprobs=wants_logprobs and bool(body.echo),
        generate=body.max_tokens != 0,
    )
