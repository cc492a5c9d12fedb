"""What is built installs beside other packages, without MLX, and says what is missing."""

import subprocess
import sys
import tarfile
import tomllib
import venv
from pathlib import Path
from zipfile import ZipFile

import pytest

PROJECT = Path(__file__).parents[1]
NEEDS_MLX = ("mlx", "mlx-lm", "llguidance")
PACKAGES = ("broker", "agents")

pytestmark = pytest.mark.timeout(300)  # the network is part of it


def run(*command: str | Path, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    """The outcome of a command."""
    return subprocess.run(command, capture_output=True, text=True, cwd=cwd)


def succeed(*command: str | Path, cwd: Path | None = None) -> str:
    """What a command prints; it must not fail."""
    done = run(*command, cwd=cwd)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The sdist, and the wheel that was built from it."""
    folder = tmp_path_factory.mktemp("dist")
    # Without --sdist and --wheel, the wheel is built from the sdist.
    succeed(sys.executable, "-m", "build", "--no-isolation", "--outdir", folder, PROJECT)
    [sdist], [wheel] = folder.glob("*.tar.gz"), folder.glob("*.whl")
    return sdist, wheel


class CleanVenv:
    """A virtual environment with nothing of this one, operated from outside by this one's pip."""

    def __init__(self, folder: Path) -> None:
        venv.create(folder, symlinks=True)
        self.bin = folder / "bin"

    def pip(self, *arguments: str | Path) -> None:
        """Run a pip command on the environment."""
        succeed(sys.executable, "-m", "pip", "--python", self.bin / "python", *arguments, "-qq")

    def run(self, program: str, *arguments: str) -> subprocess.CompletedProcess[str]:
        """Run a program of the environment, away from the sources."""
        return run(self.bin / program, *arguments, cwd=self.bin)

    def python(self, code: str) -> str:
        """What Python code prints there."""
        return succeed(self.bin / "python", "-c", code, cwd=self.bin)


@pytest.fixture(scope="module")
def clean(built: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> CleanVenv:
    """openai-agents, and beside it the wheel with what it depends on, except for MLX."""
    environment = CleanVenv(tmp_path_factory.mktemp("clean") / "venv")
    wanted = tomllib.loads((PROJECT / "pyproject.toml").read_text())["project"]["dependencies"]
    light = [name for name in wanted if not name.startswith(NEEDS_MLX)]
    environment.pip("install", "--no-compile", "openai-agents", *light)
    environment.pip("install", "--no-deps", built[1])
    return environment


def sources(*, folder: str, prefix: str) -> set[str]:
    """The files of a source folder by the names that an archive should give them."""
    return {
        f"{prefix}{path.relative_to(PROJECT)}"
        for path in (PROJECT / folder).rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }


def test_wheel_holds_the_package_and_nothing_else(built: tuple[Path, Path]) -> None:
    with ZipFile(built[1]) as wheel:
        names = {name for name in wheel.namelist() if ".dist-info/" not in name}
        licenses = [name for name in wheel.namelist() if name.endswith("licenses/LICENSE")]
    expected = {"mlx_swarm/__init__.py", "mlx_swarm/py.typed"}
    for folder in PACKAGES:
        expected |= sources(folder=folder, prefix="mlx_swarm/")
    assert names == expected
    assert len(licenses) == 1


def test_sdist_holds_what_the_wheel_is_built_from(built: tuple[Path, Path]) -> None:
    root = built[0].name.removesuffix(".tar.gz")
    with tarfile.open(built[0]) as sdist:
        names = {member.name for member in sdist if member.isfile()}
    for folder in PACKAGES:
        assert sources(folder=folder, prefix=f"{root}/") <= names
    assert {f"{root}/{name}" for name in ("LICENSE", "README.md", "pyproject.toml")} <= names


def test_it_lives_beside_the_other_agents_package(clean: CleanVenv) -> None:
    code = "import agents, mlx_swarm.agents as ours; print(agents.Runner.__module__, ours.Swarm)"
    assert clean.python(code) == "agents.run <class 'mlx_swarm.agents.swarm.Swarm'>"


def test_it_imports_without_mlx(clean: CleanVenv) -> None:
    code = "import sys, mlx_swarm; mlx_swarm.Broker, mlx_swarm.Swarm; print('mlx' in sys.modules)"
    assert clean.python(code) == "False"


def test_without_mlx_using_it_names_the_extra(clean: CleanVenv) -> None:
    done = clean.run("mlx-swarm", "demo")
    assert (done.returncode, done.stdout) == (1, "")
    assert len(done.stderr.splitlines()) == 1
    assert ("mlx-swarm[cpu]" if sys.platform == "linux" else "pip install mlx") in done.stderr


def test_without_mlx_importing_the_loader_names_the_extra(clean: CleanVenv) -> None:
    code = (
        "try: from mlx_swarm.broker.models import load\n"
        "except ImportError as error: print(type(error).__name__, str(error).splitlines()[0])"
    )
    assert clean.python(code).startswith("BackendMissing MLX is not installed: run `pip install")


def test_help_works_without_mlx(clean: CleanVenv) -> None:
    done = clean.run("mlx-swarm", "--help")
    assert done.returncode == 0, done.stderr
    assert "demo" in done.stdout


def test_type_checkers_find_the_marker(clean: CleanVenv) -> None:
    code = (
        "from importlib.resources import files; print((files('mlx_swarm') / 'py.typed').is_file())"
    )
    assert clean.python(code) == "True"


def test_uninstalling_leaves_the_other_agents_package_whole(
    clean: CleanVenv, built: tuple[Path, Path]
) -> None:
    clean.pip("uninstall", "--yes", "mlx-swarm")
    code = (
        "import agents; from importlib.metadata import files; "
        "print(all(file.locate().exists() for file in files('openai-agents')))"
    )
    assert clean.python(code) == "True"
    clean.pip("install", "--no-deps", built[1])
