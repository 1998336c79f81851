"""Every check of the project: `uv run nox`, or one of them: `uv run nox -s lint`."""

import shutil
from pathlib import Path

import nox

nox.needs_version = ">=2025.5"
nox.options.default_venv_backend = "uv"
nox.options.sessions = ["lint", "unit", "compose"]
nox.options.error_on_missing_interpreters = True

PACKAGES = sorted(path.parent.name for path in Path("packages").glob("*/pyproject.toml"))


PYTEST = ("pytest", "--numprocesses=2", "--dist=loadgroup")
ENVIRONMENT = {
    # A new environment holds no bytecode, and where none may be written every process that a test
    # starts compiles torch's Python again, which takes as long as importing it.
    "PYTHONDONTWRITEBYTECODE": "",
    # Two processes share the cores: threads of torch would only wait for one another.
    "OMP_NUM_THREADS": "1",
}


def sync(session: nox.Session, *arguments: str) -> None:
    """Install exactly what `uv.lock` says for these arguments, and nothing else."""
    session.run_install(
        *("uv", "sync", "--locked", "--exact", "--no-default-groups", *arguments),
        env={"UV_PROJECT_ENVIRONMENT": session.virtualenv.location},
    )


@nox.session
def lint(session: nox.Session) -> None:
    """Format, lint, import contracts and types."""
    sync(session, "--all-packages", "--group", "dev")
    session.run("ruff", "format", "--check", ".")
    session.run("ruff", "check", ".")
    session.run("lint-imports")
    session.run("basedpyright")


@nox.session
@nox.parametrize("package", PACKAGES, ids=PACKAGES)
def unit(session: nox.Session, package: str) -> None:
    """One package alone: only its wheel and its declared needs are installed."""
    sync(session, "--no-editable", "--package", package, "--group", "test")
    session.run(*PYTEST, f"packages/{package}/tests", *session.posargs, env=ENVIRONMENT)


@nox.session
def compose(session: nox.Session) -> None:
    """The seams between the packages, and the trainer that assembles them."""
    sync(session, "--all-packages", "--group", "test")
    session.run(*PYTEST, "tests", "apps", *session.posargs, env=ENVIRONMENT)


@nox.session(default=False, venv_backend="none")
def gpu(session: nox.Session) -> None:
    """The tests marked `gpu` and `multigpu`, from source with the Python that holds torch."""
    python = shutil.which("python3") or "python3"
    sources = [*sorted(Path("packages").glob("*/src")), *sorted(Path("apps").glob("*/src"))]
    paths = ":".join(str(path) for path in sources)
    tests = [str(path) for path in [*Path().glob("packages/*/tests"), *Path().glob("apps/*/tests")]]
    tests = [*sorted(tests), "tests"]
    session.run(
        *(python, "-m", "pytest", "-m", "gpu or multigpu", *tests, *session.posargs),
        env={"PYTHONPATH": paths},
        external=True,
    )
