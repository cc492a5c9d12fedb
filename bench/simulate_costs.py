"""What computing, storing and reading would take: a cost model, and two machines that it is for.

Prefill of `n` tokens after `p` others in one piece takes `piece + n token + (n p + n² / 2) key`
seconds: every token attends to those before it. A decode step takes `step + rows row + own key +
once span + read look` seconds, of which `own` are the tokens in the rows' own tails, `once` the
tokens of shared prefixes, each counted once, and `read` the same tokens, counted for every reader.
"""

from pathlib import Path

import msgspec
from msgspec import Struct

from mlx_swarm.broker.errors import InvalidSetting


class PrefillCosts(Struct, frozen=True, kw_only=True):
    """Seconds for a piece, for a token, and for a key that a token attends to."""

    piece: float
    token: float
    key: float

    def seconds(self, tokens: int, keys: int) -> float:
        """What one piece takes."""
        return self.piece + self.token * tokens + self.key * keys


class StepCosts(Struct, frozen=True, kw_only=True):
    """Seconds for a step, a row, and the tokens that its attention reads, as said above."""

    step: float
    row: float
    own: float
    span: float
    look: float

    def seconds(self, rows: int, own: int, once: int, read: int) -> float:
        """What one step takes."""
        return self.step + self.row * rows + self.own * own + self.span * once + self.look * read


class Costs(Struct, frozen=True, kw_only=True):
    """A machine with a model on it. `source` says where the figures come from.

    `alone` is a prompt computed by itself, `together` the short rests of several. `turn` is what
    the host needs for a turn whatever it is, `store` for a token that becomes part of an extent.
    `read_rate` and `write_rate` are bytes a second of the cold tier. `rest` is the longest rest of
    a prompt that is computed together with others, `rest_keys` bounds it with what it attends to,
    and `least_chunk` is the least that is computed at once.
    """

    source: str
    bytes_per_token: int
    weight_bytes: int
    alone: PrefillCosts
    together: PrefillCosts
    step: StepCosts
    turn: float
    store: float
    read_seconds: float
    read_rate: float
    write_rate: float
    rest: int
    rest_keys: int
    least_chunk: int


PROFILES: dict[str, Costs] = {
    "cpu-small": Costs(
        source=(
            "bench.swarm's small Llama shape (4 layers, hidden size 256) in float32 on two CPU "
            "cores, from bench/results: steps from `Decode step`, and the broker's share from "
            "`Tokens a second while all rows decode`; prefill from the arrivals and from `gate`; "
            "reading and writing from `rates`"
        ),
        bytes_per_token=2048,
        weight_bytes=17_310_720,
        alone=PrefillCosts(piece=0.0, token=3.8e-4, key=5.1e-7),
        together=PrefillCosts(piece=0.0, token=2.7e-4, key=7.7e-8),
        step=StepCosts(step=5.2e-3, row=4.2e-4, own=9e-7, span=6e-7, look=3.3e-7),
        turn=0.0,
        store=1e-6,
        read_seconds=0.0,
        read_rate=0.791e9,
        write_rate=0.348e9,
        rest=256,
        rest_keys=1 << 22,
        least_chunk=32,
    ),
    "h200-8b": Costs(
        source=(
            "a Llama-3-8B-shaped model in bfloat16 on one H200, from bench/results: steps from "
            "`Decode step` and `Tokens a second while all rows decode`, prefill alone and reading "
            "from `gate`, prefill together from the arrivals on a cached prefix; writing is the "
            "CPU machine's"
        ),
        bytes_per_token=131_072,
        weight_bytes=16_060_000_000,
        alone=PrefillCosts(piece=2e-3, token=2.69e-5, key=9.97e-10),
        together=PrefillCosts(piece=2e-3, token=2.5e-5, key=0.0),
        step=StepCosts(step=7.9e-3, row=3.5e-5, own=2.7e-8, span=7e-8, look=0.0),
        turn=1e-4,
        store=1e-7,
        read_seconds=5e-3,
        read_rate=0.88e9,
        write_rate=0.35e9,
        rest=2048,
        rest_keys=1 << 62,
        least_chunk=512,
    ),
}


def named(profile: str, file: Path | None) -> Costs:
    """A profile, or what `calibrate` wrote. Raises `InvalidSetting` for what is neither."""
    if file is not None:
        try:
            return msgspec.json.decode(file.read_bytes(), type=Costs)
        except msgspec.DecodeError as error:
            raise InvalidSetting(f"{file} holds no costs: {error}") from error
    if profile not in PROFILES:
        raise InvalidSetting(f"{profile!r} is no profile; there are {', '.join(PROFILES)}")
    return PROFILES[profile]
