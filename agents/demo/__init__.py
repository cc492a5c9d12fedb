"""The demo: agents that share one set of instructions, and what each of them cost."""

from .job import Options as Options
from .job import run as run
