"""The tests of the Triton kernels' public face in Triton's interpreter, at small sizes."""


def test_the_public_functions_in_the_interpreter(interpreter):
    files = ("layer", "layer_autograd", "defer", "offsets", "product")
    assert interpreter.skipped(*(f"test_triton_{file}.py" for file in files)) == []
