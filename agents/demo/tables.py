"""The demo's closing tables."""

from rich.console import Console
from rich.table import Table

from .report import Run


def print_run(console: Console, run: Run, title: str) -> None:
    """One row an agent, the totals, and a sentence that says what sharing did."""
    table = Table(title=title, show_footer=True, footer_style="bold")
    prompt = run.total(lambda a: a.prompt_tokens)
    cached = run.total(lambda a: a.cached_tokens)
    prefilled = run.total(lambda a: a.prefilled_tokens)
    output = run.total(lambda a: a.output_tokens)
    table.add_column("agent", f"{len(run.agents)} agents")
    table.add_column("prompt", f"{prompt:,}", justify="right")
    table.add_column("cached", f"{cached:,}", justify="right")
    table.add_column("prefilled", f"{prefilled:,}", justify="right")
    table.add_column("first token", f"{run.last_first_token:.2f} s", justify="right")
    table.add_column("generated", f"{output:,}", justify="right")
    table.add_column("tok/s", f"{output / run.seconds:.1f}", justify="right")
    for agent in run.agents:
        table.add_row(
            agent.name,
            f"{agent.prompt_tokens:,}",
            f"{agent.cached_tokens:,}",
            f"{agent.prefilled_tokens:,}",
            f"{agent.ttft:.2f} s",
            f"{agent.output_tokens:,}",
            f"{agent.rate:.1f}",
        )
    console.print(table)
    console.print(
        f"{run.shared_prefix_tokens:,} tokens of instructions in common{_what_more(run)}, "
        f"{prompt:,} prompt tokens in all: "
        f"{prefilled:,} computed, {cached:,} from the cache; {run.seconds:.1f} s.",
        highlight=False,
        soft_wrap=True,
    )
    if told := _told_of_the_disk(run):
        console.print(told, highlight=False, soft_wrap=True)


def print_comparison(console: Console, shared: Run, alone: Run) -> None:
    """The same work with and without sharing, both measured in this process."""
    table = Table("measured", show_header=True)
    table.add_column("shared", justify="right")
    table.add_column("not shared", justify="right")
    table.add_column("ratio", justify="right")
    prefilled = [run.total(lambda a: a.prefilled_tokens) for run in (shared, alone)]
    rows = (
        ("prompt tokens computed", prefilled[0], prefilled[1], ",.0f"),
        ("last first token, s", shared.last_first_token, alone.last_first_token, ".2f"),
        ("whole run, s", shared.seconds, alone.seconds, ".2f"),
    )
    for name, with_sharing, without, form in rows:
        ratio = f"{without / with_sharing:.1f}"
        table.add_row(name, f"{with_sharing:{form}}", f"{without:{form}}", ratio)
    console.print(table)


def _what_more(run: Run) -> str:
    """Why an agent may have found more than the instructions in the cache."""
    if all(agent.cached_tokens <= run.shared_prefix_tokens for agent in run.agents):
        return ""
    return " (more is cached where tasks begin alike, or were read before)"


def _told_of_the_disk(run: Run) -> str:
    restored = run.total(lambda a: a.restored_tokens)
    if restored:
        return f"{restored:,} of them were read from disk, where an earlier run had left them."
    if any(agent.too_slow for agent in run.agents):
        return "The disk had some of them, but computing them was faster."
    return ""
