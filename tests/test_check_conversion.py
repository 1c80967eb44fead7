"""The 27B's layout, 1/32 as wide: every tensor to its place on a mesh, every byte back, and little on the host."""

import importlib.util
import tracemalloc
from pathlib import Path

import numpy as np
import pytest

from logra_jax.mesh import make_mesh, place, shardings
from logra_jax.models import CausalLM, ModelConfig, hf, load_hf, save_hf

ROOT = Path(__file__).parent.parent
MESH = make_mesh(4, 2)


@pytest.fixture(scope="module")
def script():
    spec = importlib.util.spec_from_file_location("check_conversion", ROOT / "scripts" / "check_conversion.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def numpy_peak(work):
    """What `work()` returns, and the most bytes that Python and numpy held for it at a time."""
    tracemalloc.start()
    try:
        return work(), tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def unaligned(array):
    """A copy that no fake device takes as its own memory, which it does where one begins at 64 bytes."""
    memory = np.empty(array.nbytes + 64, np.uint8)
    start = (4 - memory.ctypes.data) % 64
    copy = memory[start : start + array.nbytes].view(array.dtype).reshape(array.shape)
    copy[...] = array
    return copy


def test_the_27b_goes_through_a_mesh_and_little_of_the_host(script, tmp_path, monkeypatch):
    """A stacked MLP kernel has 22 MB in float32, the largest shard 5 MB."""
    source = tmp_path / "source"
    tensors = script.make_folder(source, shrink=32)
    shards = [path.stat().st_size for path in source.glob("*.safetensors")]
    assert (sum(name.startswith((script.TEXT, "lm_head")) for name in tensors), len(shards)) == (851, 18)
    assert {code for code, _ in tensors.values()} == {"BF16", "F32"}
    empty = CausalLM(ModelConfig.from_hf(script.make_config(32)))
    places = shardings(MESH, empty.logical_axes(), empty.abstract_params())
    load = lambda: load_hf(source, "float32", shardings=places)
    model, params = load()
    assert params["layers"]["mlp"]["up_proj"]["kernel"].shape == (16, 4, 160, 544)
    assert script.misplaced(params, tensors) == []
    _, peak = numpy_peak(lambda: save_hf(model, params, tmp_path / "back"))
    assert peak < max(shards)
    assert script.differing(source, tmp_path / "back") == []
    monkeypatch.setattr(hf, "place", lambda shape, read, at: place(shape, lambda part: unaligned(read(part)), at))
    _, peak = numpy_peak(load)  # again, as the objects of the compiler are larger than these tensors
    assert peak < max(shards)
