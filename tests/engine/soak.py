"""A long random life of the batch lane: `python -m tests.engine.soak --seconds 3600`.

In each world an engine of another model kind, budget and row limit serves a random mix of arrivals,
preemptions, cancellations, deadlines and injected failures, for several models and adapters in both
lanes; some worlds have a cold tier. Greedy tokens must be mlx-lm's, seeded ones those of the same
request alone (a sum in another order may turn a draw once in `RARELY` requests), the prompt's
log-probabilities the model's; nothing may be left behind. Prints its progress, and the seed of the
world that failed (`--seed S --worlds 1` repeats it). `--kind smollm2-135m` lives in the real model
alone, which is slow.
"""

import argparse
import math
import random
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from msgspec.structs import replace

from mlx_swarm.broker import Request, Sampling
from mlx_swarm.broker.engine import sharing
from mlx_swarm.broker.engine.decode_batch import PrefillLimits
from mlx_swarm.broker.engine.memory import weight_bytes
from mlx_swarm.broker.engine.roster import ModelSource
from mlx_swarm.broker.errors import DeadlineExceeded, InvalidRequest, ModelBusy, OutOfMemory
from mlx_swarm.broker.models import LoadedModel, load_adapter
from mlx_swarm.broker.request import TokenLogprob
from tests.engine.driver import Box, Driver, assert_greedy
from tests.engine.test_shared import KINDS, SIZES, FailingModel, model_of, with_model
from tests.models.tiny_adapter import write_adapter
from tests.tiny_broker import SHARED

WORLDS = {
    **KINDS,
    "gemma3_text, a wide window": f"synthetic:gemma3_text?layers=4&{SIZES}&window=128",
    "deepseek_v3": f"synthetic:deepseek_v3?layers=2&{SIZES}",
    "falcon_h1": f"synthetic:falcon_h1?layers=2&{SIZES}",
}

RARELY = 500

LONGEST = 200
"""Tokens of a prompt at most: forks of forks grow."""

ACTIONS = {
    "submit": 6,
    "fork": 2,
    "repeat": 1,
    "run": 6,
    "preempt": 2,
    "cancel": 2,
    "fail": 0.3,
    "clear": 0.2,
    "load": 0.2,
    "unload": 0.2,
    "rest": 0.3,
}

ADAPTED = {"llama", "qwen3"}
"""Kinds whose models get adapters."""

PROMPT_TOLERANCE = 1e-3

MODELS = 3
"""Further models and adapters of a world at most."""


class World:
    """One engine and the random choices that drive it."""

    def __init__(self, seed: int, kind: str | None = None) -> None:
        self.random = random.Random(seed)
        self.kind = kind or self.random.choice(sorted(WORLDS))
        self.model = model_of(WORLDS.get(self.kind, self.kind))
        self.failing: Any = FailingModel(self.model.model)
        self.now = 0.0
        self.folder = tempfile.TemporaryDirectory()
        self.models: dict[str, LoadedModel] = {"": self.model}
        self.oracles: list[LoadedModel] = []
        has_cold = self.random.random() < 0.3
        self.driver = Driver(
            with_model(self.model, self.failing),
            ram=self.random.choice([0, 40_000, 200_000, 64 << 20]),
            max_rows=self.random.randint(1, 10),
            chunk=self.random.choice([8, 32, 128]),
            memory=weight_bytes(self.model) + self.random.choice([200_000, 1_000_000, 1 << 30]),
            cold=Path(self.folder.name) / "kv" if has_cold else None,
            idle_unload=self.random.choice([None, 5.0]),
            clock=lambda: self.now,
            sleep=self.wait,
        )
        # A place lasts long in these lives; in some of them it is lost soon.
        self.driver.engine.scheduler._slice = self.random.choice([4, 16, 1024])
        self.narrow()
        self.asked: list[Request] = []
        self.failures = 0
        self.turned = 0

    def wait(self, seconds: float) -> None:
        """Time passes."""
        self.now += seconds + 0.01

    def narrow(self) -> None:
        """Limits that prompts as short as these reach."""
        sharing.LEAST_OWN_SPAN = self.random.choice([8, 32, 512])
        decoder: Any = self.driver.engine.lane._shared
        if decoder is not None:
            rest, keys = self.random.choice([0, 20, 256]), self.random.choice([500, 1 << 30])
            decoder._limits = PrefillLimits(rest, keys)
            decoder._batch._limits = decoder._limits
            decoder._batch._placement._max_spans = self.random.choice([1, 2, 8])

    def live(self, steps: int) -> None:
        """So many random actions; then everything runs to its end and is checked."""
        names, weights = list(ACTIONS), list(ACTIONS.values())
        for _ in range(steps):
            self.now += self.random.choice([0.0, 0.1, 3.0])
            getattr(self, self.random.choices(names, weights)[0])()
            self.driver.engine.check_integrity()
        self.failing.left = 0
        self.driver.run()
        self.driver.check_idle()
        for asked in zip(self.asked, self.driver.boxes, self.oracles, strict=True):
            self.check(*asked)
        self.driver.engine.close()
        self.folder.cleanup()

    def submit(self) -> None:
        """A request, mostly of a family that others belong to as well."""
        pick = self.random
        family = pick.randint(0, 3)
        common = [(token + 31 * family) % 250 for token in SHARED[: pick.choice([0, 5, 40, 60])]]
        own = [pick.randint(1, 250) for _ in range(pick.choice([1, 1, 4, 12, 40]))]
        self.ask([*common, *own], (len(common),) if common and pick.random() < 0.5 else ())

    def fork(self) -> None:
        """What a request has said so far goes on somewhere else, whether or not it still runs."""
        if self.asked:
            at = self.random.randrange(len(self.asked))
            said = [*self.asked[at].tokens, *self.driver.boxes[at].tokens]
            kept = self.random.choice([len(said), len(said), self.random.randint(1, len(said))])
            more = [self.random.randint(1, 250) for _ in range(self.random.choice([0, 1, 8, 30]))]
            self.ask([*said[:kept], *more][:LONGEST])

    def repeat(self) -> None:
        """The same prompt again, several times at once."""
        if self.asked:
            tokens = self.random.choice(self.asked).tokens
            for _ in range(self.random.randint(1, 3)):
                self.ask(tokens)

    def ask(self, tokens: Sequence[int], boundaries: tuple[int, ...] = ()) -> None:
        """Submit a request with everything else left to chance."""
        pick = self.random
        if pick.random() < 0.2:
            boundaries = tuple(pick.randint(0, len(tokens) + 5) for _ in range(3))
        is_asking = pick.random() < 0.2
        self.asked.append(
            Request(
                tokens=tokens,
                max_tokens=pick.randint(1, 24),
                sampling=Sampling(temperature=0.8, top_p=0.9, seed=pick.randint(0, 9))
                if pick.random() < 0.3
                else Sampling(),
                stop=tuple(pick.choice("etaoinshr") for _ in range(2))
                if pick.random() < 0.15
                else (),
                logprobs=is_asking,
                top_logprobs=pick.choice([0, 1, 5, 20]) if is_asking else 0,
                cache=pick.random() < 0.85,
                tenant=pick.choice(["", "", "", "other"]),
                swarm=pick.choice(["", "s"]),
                agent=pick.choice(["", "a", "b"]),
                priority=pick.choice([0, 0, 0, -1, 2]),
                deadline=pick.choice([*[None] * 8, 0.5, 20.0]),
                boundaries=boundaries,
                next_use=pick.choice([None, None, 0.0, 2.0, math.inf]),
                model=pick.choice([*self.models, "", ""]),
                **self.lane_of(),
            )
        )
        self.oracles.append(self.models[self.asked[-1].model])
        self.driver.submit(self.asked[-1])

    def lane_of(self) -> dict[str, Any]:
        """Mostly the batch; else alone, with or without a draft."""
        chance = self.random.random()
        if chance < 0.05:
            return {"deterministic": True}
        draft = self.random.choice([*self.models]) if chance < 0.1 else ""
        return {"draft": draft, "prompt_logprobs": self.random.random() < 0.1}

    def load(self) -> None:
        """One more model: the same weights again, as somebody else's, or an adapter."""
        if len(self.models) > MODELS:
            return
        name, oracle = f"model-{len(self.asked)}", self.model
        source = ModelSource(WORLDS.get(self.kind, self.kind))
        bases = [each for each, model in self.models.items() if each and not model.adapter]
        if self.kind in ADAPTED and bases:
            folder = Path(self.folder.name) / name
            write_adapter(folder, self.model.model, seed=self.random.randint(0, 2))
            source = ModelSource(str(folder), base=bases[0])
            oracle = load_adapter(self.model, folder)
        with suppress(OutOfMemory, InvalidRequest):
            self.driver.engine.load(name, source)
            self.models[name] = oracle

    def unload(self) -> None:
        """Let a model go, unless somebody uses it."""
        name = self.random.choice([*self.models])
        with suppress(ModelBusy, InvalidRequest):
            for gone in self.driver.engine.unload(name):
                self.models.pop(gone, None)

    def rest(self) -> None:
        """A long time passes, and everything that is open runs to its end."""
        self.driver.run()
        self.now += 10.0
        self.driver.run()

    def run(self) -> None:
        """Some turns."""
        self.driver.run(self.random.randint(1, 12))

    def cancel(self) -> None:
        """Cancel any request, also one that is over."""
        if self.asked:
            self.driver.cancel(self.random.randrange(len(self.asked)))

    def preempt(self) -> None:
        """Take any request from its row, if it runs."""
        if self.asked:
            self.driver.preempt(self.random.randrange(len(self.asked)))

    def fail(self) -> None:
        """Let one of the next calls of the model fail."""
        self.failing.left = self.random.randint(1, 6)

    def clear(self) -> None:
        """Forget what is cached, whatever runs."""
        self.driver.engine.cache.clear()

    def check(self, request: Request, box: Box, model: LoadedModel) -> None:
        """The tokens are right as far as they go; what fails was made to, or lacked memory."""
        if box.error is not None:
            is_expected = isinstance(box.error, OutOfMemory | DeadlineExceeded)
            # Not every model goes with a draft.
            is_expected |= bool(request.draft) and isinstance(box.error, InvalidRequest)
            assert is_expected or "on purpose" in str(box.error), box.error
            self.failures += 1
        elif box.end is not None and box.end.finish_reason == "length":
            assert len(box.tokens) == request.max_tokens
        assert len(box.logprobs) == len(box.tokens) * request.logprobs
        if box.end is not None and box.end.finish_reason != "cancelled" and request.prompt_logprobs:
            check_prompt(model, request.tokens, box.end.prompt_logprobs)
        if request.sampling.temperature == 0:
            assert_greedy(model, request.tokens, box.tokens)
        elif box.tokens:
            alone = Driver(model, max_rows=1)
            expected = alone.submit(replace(request, model="", draft="", prompt_logprobs=False))
            alone.run()
            self.turned += expected.tokens[: len(box.tokens)] != box.tokens
            alone.engine.close()


def check_prompt(
    model: LoadedModel, tokens: Sequence[int], got: Sequence[TokenLogprob | None]
) -> None:
    """Assert that a prompt's log-probabilities are those of the model alone."""
    logits = model.model(mx.array([list(tokens)]), cache=model.make_caches())[0].astype(mx.float32)
    logprobs = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
    expected = np.array(
        mx.take_along_axis(logprobs[:-1], mx.array(list(tokens)[1:], mx.int32)[:, None], axis=-1)
    )
    assert got[0] is None
    found = [each.logprob for each in got[1:] if each is not None]
    assert np.allclose(found, expected[:, 0], atol=PROMPT_TOLERANCE)


def main() -> None:
    """Live worlds until the time is over."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=3600.0)
    parser.add_argument("--worlds", type=int, default=1 << 30)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--kind", help="of a model, or its name, instead of many in turn")
    options = parser.parse_args()
    begun = reported = time.monotonic()
    worlds = requests = failures = turned = 0
    while worlds < options.worlds and time.monotonic() - begun < options.seconds:
        seed = options.seed + worlds
        world = World(seed, options.kind)
        try:
            world.live(options.steps)
        except BaseException:
            sys.stderr.write(f"the world of seed {seed} ({world.kind}) failed\n")
            raise
        worlds += 1
        requests += len(world.asked)
        failures += world.failures
        turned += world.turned
        assert turned <= 1 + requests // RARELY, f"{turned} seeded replies differ, seed {seed}"
        if time.monotonic() - reported > 60:
            reported = time.monotonic()
            memory = mx.get_active_memory() / 2**20
            sys.stdout.write(f"{reported - begun:6.0f} s: {worlds} worlds, {memory:.1f} MiB\n")
            sys.stdout.flush()
    seconds = time.monotonic() - begun
    sys.stdout.write(
        f"passed: {worlds} worlds, {requests} requests, {failures} ended by deadlines or failures, "
        f"{turned} seeded replies turned by rounding, {seconds:.0f} s\n"
    )


if __name__ == "__main__":
    main()
