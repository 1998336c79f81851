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
import tempfile
from olmo_pipeline import (
    dual_pipe_v, gpipe, interleaved_one_f_one_b, load_schedule, lower_bound, plot, save_schedule,
    search, simulate, split_layers, v_shape, validate, zero_bubble,
)
validate(interleaved_one_f_one_b(2, 3, 2))
simulate(interleaved_one_f_one_b(2, 3, 2))
split_layers(5, 2)
for build in (dual_pipe_v, gpipe, v_shape, zero_bubble):
    validate(build(2, 3))
search(2, 3, tries=2)
lower_bound(2, 3)
with tempfile.TemporaryDirectory() as folder:
    save_schedule(gpipe(2, 2), folder + "/a.json")
    plot(load_schedule(folder + "/a.json"), folder + "/a.png")
"""
    assert not _imports_torch(use)


def test_the_check_can_fail():
    assert _imports_torch("import sys, types\nsys.modules['torch'] = types.ModuleType('torch')")


def test_every_public_name_is_there():
    for name in olmo_pipeline.__all__:
        assert getattr(olmo_pipeline, name) is not None
    with pytest.raises(AttributeError, match="has no attribute 'Pipeline'"):
        _ = olmo_pipeline.Pipeline
