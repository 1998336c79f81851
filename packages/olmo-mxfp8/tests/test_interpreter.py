"""The tests of the kernels in Triton's interpreter, by float16 and float32."""

NEEDS_A_GPU = {
    "the interpreter is not for large tensors",
    "the interpreter has no device to wait for",
}


def test_the_kernels_in_the_interpreter(interpreter):
    files = ("test_kernels.py", "test_product_kernels.py", "test_swiglu_kernels.py")
    skipped = interpreter.skipped(*files)
    assert set(skipped) == NEEDS_A_GPU
    assert len(skipped) == 7
