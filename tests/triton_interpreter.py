"""A pytest plugin: run the tests of kernels in Triton's interpreter, on a machine without a GPU.

Triton reads `TRITON_INTERPRET` when it is imported, so these tests get a process of their own. A
test names the files that lie beside it, and says which of their tests cannot run there:

    def test_the_kernels_in_the_interpreter(interpreter):
        assert interpreter.skipped("test_kernels.py") == []

What fails there fails here, with its traceback. In that process this plugin also spares the
interpreter most of its patching. bfloat16 is wrong in the interpreter: use float16 and float32.
"""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from xml.etree import ElementTree

import pytest

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
TIMEOUT_SECONDS = 900.0


class Interpreter:
    """Runs test files that lie in `folder` in a process that interprets."""

    def __init__(self, config: pytest.Config, folder: Path, report: Path) -> None:
        self._config = config
        self._folder = folder
        self._report = report

    def skipped(self, *files: str) -> list[str]:
        """Run the files; return why tests were skipped, and fail unless all others passed."""
        if importlib.util.find_spec("triton") is None:
            pytest.skip("triton is not installed")
        command = [sys.executable, "-m", "pytest", "-q", "--tb=short", "-p", "no:cacheprovider"]
        command += ["-c", str(self._config.inipath), f"--rootdir={self._config.rootpath}"]
        done = subprocess.run(
            [
                *command,
                f"--junit-xml={self._report}",
                *(str(self._folder / file) for file in files),
            ],
            env={**os.environ, "TRITON_INTERPRET": "1"},
            capture_output=True,
            text=True,
            check=False,
            timeout=TIMEOUT_SECONDS,
        )
        # A read or write outside all memory ends the process, and so may leave no report.
        if done.returncode != 0 or not self._report.exists():
            output = f"{done.stdout[-8000:]}\n{done.stderr[-2000:]}"
            pytest.fail(f"the interpreter's process ended with {done.returncode}:\n{output}", False)
        cases = list(ElementTree.parse(self._report).iter("testcase"))
        reasons = [skip.get("message", "") for case in cases for skip in case.iter("skipped")]
        assert len(reasons) < len(cases), f"none of {files} ran: {reasons}"
        return reasons


@pytest.fixture
def interpreter(request: pytest.FixtureRequest, tmp_path: Path) -> Interpreter:
    """Runs test files that lie beside the test that asks for it."""
    return Interpreter(request.config, request.path.parent, tmp_path / "report.xml")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """First what takes longest, so that nothing waits for it at the end."""
    items.sort(key=lambda item: "interpreter" not in getattr(item, "fixturenames", ()))


def pytest_configure() -> None:
    if INTERPRETED and importlib.util.find_spec("triton") is not None:
        _patch_once_a_launch()
        _reduce_by_numpy()


def _patch_once_a_launch() -> None:
    """Let the interpreter patch its language once a launch.

    Triton 3.6 does so again at every call of one jitted function by another, hundreds of times a
    launch, though the language is patched by then. What a launch patches is undone at its end.
    """
    from triton.runtime import interpreter

    patch_language = interpreter._patch_lang
    patched: set[int] = set()

    def patch_once(function: Any) -> Any:
        seen = {id(value) for value in function.__globals__.values()}
        modules = {id(interpreter.tl), id(interpreter.tl.core)} & seen
        if patched and modules <= patched:
            return SimpleNamespace(restore=lambda: None)
        outermost, scope = not patched, patch_language(function)
        patched.update(modules)

        def restore() -> None:
            scope.restore()
            if outermost:
                patched.clear()

        return SimpleNamespace(restore=restore)

    interpreter._patch_lang = patch_once


def _reduce_by_numpy() -> None:
    """Let numpy take the exclusive or along an axis, which `tl.sort` does for every exchange.

    Triton 3.6 has numpy take sums and extremes, and calls a Python function for each element here.
    """
    from triton.runtime import interpreter

    reduce_others = interpreter.ReduceOps.apply_impl

    def apply(self: Any, inputs: tuple[Any, ...]) -> Any:
        if self.combine_fn != interpreter.tl.standard._xor_combine or self.axis is None:
            return reduce_others(self, inputs)
        (value,) = inputs
        bits = value.handle.data
        reduced = interpreter.np.bitwise_xor.reduce(bits, axis=self.axis, keepdims=self.keep_dims)
        return [self.to_tensor(reduced, value.dtype)]

    interpreter.ReduceOps.apply_impl = apply
