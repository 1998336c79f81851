"""What an import may bring in, each in a fresh interpreter."""

import subprocess
import sys

import pytest

PROBE = "import sys; import {module}; print('{forbidden}' in sys.modules)"

LIGHT = [
    ("olmo_pipeline", "torch"),
    ("olmo_trainer.cli", "torch"),
    ("olmo_trainer.config", "torch"),
    ("olmo_trainer.describe", "torch"),
    ("olmo_trainer.checkpoint", "torch"),
    ("olmo_trainer.metrics", "torch"),
]
PACKAGES = ["olmo_routing", "olmo_experts_gemm", "olmo_mxfp8", "olmo_ep_comm", "olmo_distopt"]


def _is_loaded(module: str, forbidden: str) -> bool:
    code = PROBE.format(module=module, forbidden=forbidden)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
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
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_the_probe_can_fail():
    assert _is_loaded("torch", "torch")
