"""What an import may bring in, each in a fresh interpreter."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

PROBE = "import sys; import {module}; print('{forbidden}' in sys.modules)"

LIGHT = [
    ("olmo_pipeline", "torch"),
    ("olmo_trainer.cli", "torch"),
    ("olmo_trainer.config", "torch"),
    ("olmo_trainer.describe", "torch"),
    ("olmo_trainer.checkpoint_manifest", "torch"),
    ("olmo_trainer.metrics", "torch"),
]
PACKAGES = ["olmo_routing", "olmo_experts_gemm", "olmo_mxfp8", "olmo_ep_comm", "olmo_distopt"]


def _is_loaded(module: str, forbidden: str) -> bool:
    code = PROBE.format(module=module, forbidden=forbidden)
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=240
    )
    return done.stdout.strip() == "True"


@pytest.mark.parametrize(("module", "forbidden"), LIGHT)
def test_light_modules_do_not_import_torch(module, forbidden):
    assert not _is_loaded(module, forbidden)


@pytest.mark.parametrize("module", PACKAGES)
def test_packages_do_not_import_triton_or_the_apps_libraries(module):
    code = (
        f"import sys, torch; before = set(sys.modules); import {module}; "
        "new = {name.partition('.')[0] for name in set(sys.modules) - before}; "
        "print(sorted(new & {'triton', 'numpy', 'pydantic', 'rich', 'matplotlib'}))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=240
    )
    assert done.stdout.strip() == "[]"


def test_the_probe_can_fail():
    assert _is_loaded("torch", "torch")


def test_everything_runs_where_there_is_no_triton(tmp_path):
    code = (
        "import sys; sys.modules['triton'] = None\n"
        "from olmo_trainer.cli import main\n"
        f"sys.exit(main(['nano', '--steps', '1', '--set', 'run.folder={tmp_path}/run']))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=240
    )
    assert done.returncode == 0, done.stderr
    assert "step 1/1" in done.stdout


def test_the_lock_brings_triton_to_linux_alone():
    lock = (Path(__file__).parents[1] / "uv.lock").read_text()
    # A line of a package's needs, not the pin of its version.
    needs = [line for line in re.findall(r'\{ name = "triton".*', lock) if "specifier" not in line]
    assert needs
    assert all("marker = \"sys_platform == 'linux'\"" in line for line in needs)


def test_packages_use_no_collective_that_needs_numpy():
    """`all_gather_object` and its kind call `Tensor.numpy`, and torch does not bring numpy."""
    root = Path(__file__).parents[1]
    sources = sorted(root.glob("packages/*/src/**/*.py"))
    assert len(sources) > 100
    for source in sources:
        assert not re.search(r"dist\.\w+_object(_list)?\(", source.read_text()), source
