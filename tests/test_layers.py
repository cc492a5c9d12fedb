"""Imports point down only, and what must work without MLX does not import it."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

PROJECT = Path(__file__).parents[1]
PACKAGES = ("broker", "agents")

# Lowest first. A module may import from its own layer and from those under it.
LAYERS = (
    (
        "broker.errors",
        "broker.affinity",
        "broker.interrupts",
        "broker.threads",
        "broker.backend",
        "broker.checks",
        "broker.sizes",
        "broker.sampling",
        "broker.grammar",
        "broker.messages",
        "broker.request",
    ),
    ("broker.trace",),
    ("broker.cache", "broker.models"),
    ("broker.engine",),
    (
        "broker.response",
        "broker.texts",
        "broker.inspection",
        "broker.broker",
        "broker.preflight",
    ),
    ("broker.server",),
    ("agents",),
    ("broker.cache_cli", "broker.serve_cli"),
    ("broker.cli",),
)
# The package itself only hands out names, and loads what is above it when they are asked for.
FRONTS = ("broker", "agents", "")

WITHOUT_MLX = (
    "broker/request.py",
    "broker/messages.py",
    "broker/sampling.py",
    "broker/grammar.py",
    "broker/checks.py",
    "broker/response.py",
    "broker/sizes.py",
    "broker/errors.py",
    "broker/affinity.py",
    "broker/broker.py",
    "broker/texts.py",
    "broker/inspection.py",
    "broker/cache_cli.py",
    "broker/models/adapter_files.py",
    "broker/models/cache_folder.py",
    "broker/cache/layout.py",
    "broker/cache/prefix_hash.py",
    "broker/cache/tree.py",
    "broker/cache/eviction.py",
    "broker/cache/ledger.py",
    "broker/cache/plan.py",
    "broker/engine/deadlines.py",
    "broker/engine/entry.py",
    "broker/engine/fairness.py",
    "broker/engine/leaders.py",
    "broker/engine/turns.py",
    "broker/engine/footprints.py",
    "broker/engine/session.py",
    "broker/engine/sessions.py",
    "broker/engine/scheduler.py",
    "broker/engine/preemption.py",
    "broker/engine/pressure.py",
    "broker/engine/footprint.py",
    "broker/engine/work.py",
    "broker/engine/mailbox.py",
    "broker/engine/thread.py",
    "broker/engine/text.py",
    "broker/engine/submission.py",
    *sorted(str(path.relative_to(PROJECT)) for path in PROJECT.glob("broker/trace/**/*.py")),
    *sorted(str(path.relative_to(PROJECT)) for path in PROJECT.glob("agents/**/*.py")),
)


def _module(path: Path) -> str:
    parts = path.relative_to(PROJECT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def _runtime_nodes(tree: ast.AST) -> Iterator[ast.AST]:
    """All nodes but those that only type checkers see."""
    for child in ast.iter_child_nodes(tree):
        if isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
            continue
        yield child
        yield from _runtime_nodes(child)


def _absolute(path: Path, node: ast.ImportFrom) -> str:
    """What a `from ... import` names, without the distribution's own prefix."""
    if not node.level:
        return node.module or ""
    package = path.relative_to(PROJECT).parent.parts
    base = package[: len(package) - node.level + 1]
    return ".".join([*base, *([node.module] if node.module else [])])


def imports(path: Path) -> set[str]:
    """Everything a file imports at run time, lazily or not, relative to the project's root."""
    tree = ast.parse(path.read_text("utf-8"))
    found = set()
    for node in _runtime_nodes(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            name = _absolute(path, node)
            found |= {name, *(f"{name}.{alias.name}" for alias in node.names)}
    return {name.removeprefix("mlx_swarm.") for name in found}


def _layer(module: str) -> int | None:
    for index, prefixes in enumerate(LAYERS):
        if any(module == prefix or module.startswith(f"{prefix}.") for prefix in prefixes):
            return index
    return None


def _sources() -> list[Path]:
    return sorted(path for package in PACKAGES for path in (PROJECT / package).rglob("*.py"))


@pytest.mark.parametrize("path", _sources(), ids=lambda path: str(path.relative_to(PROJECT)))
def test_imports_point_down(path: Path) -> None:
    module = _module(path)
    own = _layer(module)
    if module in FRONTS:
        return
    assert own is not None, f"{module} is in no layer"
    for name in imports(path):
        layer = _layer(name)
        assert layer is None or layer <= own, f"{module} imports {name}, which is above it"


@pytest.mark.parametrize("name", WITHOUT_MLX)
def test_modules_that_do_without_mlx_import_none(name: str) -> None:
    roots = {imported.partition(".")[0] for imported in imports(PROJECT / name)}
    assert not roots & {"mlx", "mlx_lm"}


def test_cache_and_models_do_not_know_each_other() -> None:
    for path in (PROJECT / "broker" / "models").rglob("*.py"):
        assert not [name for name in imports(path) if name.startswith("broker.cache")], path
    for path in (PROJECT / "broker" / "cache").rglob("*.py"):
        assert not [name for name in imports(path) if name.startswith("broker.models")], path


def test_across_packages_imports_name_the_distribution() -> None:
    for path in (PROJECT / "agents").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, ast.ImportFrom):
                assert (node.module or "").partition(".")[0] != "broker", path
                assert not _absolute(path, node).startswith("broker"), path


def test_importing_the_public_names_loads_no_mlx() -> None:
    code = (
        "import sys; from mlx_swarm import Broker, Request, Sampling, SwarmError; "
        "from mlx_swarm.broker import ResponseStream, BrokerStatistics, Usage; "
        "sys.exit(any(name.partition('.')[0] in ('mlx', 'mlx_lm') for name in sys.modules))"
    )
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_the_backend_comes_before_anything_that_imports_mlx() -> None:
    path = PROJECT / "broker" / "__init__.py"
    first = next(
        node
        for node in ast.parse(path.read_text("utf-8")).body
        if isinstance(node, ast.ImportFrom) and node.level
    )
    assert [alias.name for alias in first.names] == ["backend"]
