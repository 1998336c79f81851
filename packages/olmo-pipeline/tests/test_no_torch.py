import subprocess
import sys

import olmo_pipeline
import pytest


def _imports_torch(code: str) -> bool:
    check = f"{code}\nimport sys\nprint('torch' in sys.modules)"
    output = subprocess.run(
        [sys.executable, "-c", check], check=True, capture_output=True, text=True
    )
    return {"True\n": True, "False\n": False}[output.stdout]


def test_schedules_do_not_import_torch():
    use = """
from olmo_pipeline import interleaved_one_f_one_b, simulate, split_layers, validate
validate(interleaved_one_f_one_b(2, 3, 2))
simulate(interleaved_one_f_one_b(2, 3, 2))
split_layers(5, 2)
"""
    assert not _imports_torch(use)


def test_the_check_can_fail():
    assert _imports_torch("import sys, types\nsys.modules['torch'] = types.ModuleType('torch')")


def test_every_public_name_is_there():
    for name in olmo_pipeline.__all__:
        assert getattr(olmo_pipeline, name) is not None
    with pytest.raises(AttributeError, match="has no attribute 'Pipeline'"):
        _ = olmo_pipeline.Pipeline
