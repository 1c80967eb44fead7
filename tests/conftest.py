"""Eight fake CPU devices, programs that compile fast, strict JAX, and shape annotations checked by machine."""

import json
import os
import shutil
import subprocess
from importlib.metadata import version

# Before anything imports jax. Nearly all time goes into compiling tiny programs, and more than half of it is saved when
# XLA writes plain machine code. Subprocesses inherit all of this. What the caller has set comes last and decides.
os.environ["XLA_FLAGS"] = (
    "--xla_force_host_platform_device_count=8 "
    + "--xla_cpu_opt_preset=CPU_OPT_PRESET_FAST_COMPILE --xla_cpu_use_fusion_emitters=false "
    "--xla_cpu_parallel_codegen_split_count=1 "
    * version("jaxlib").startswith("0.10.")  # later ones refuse some of these
    + os.environ.get("XLA_FLAGS", "")
)
os.environ.setdefault("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")
os.environ.setdefault("JAX_PLATFORMS", "cpu")

from collections.abc import Callable, Iterator
from pathlib import Path

import hypothesis
import jax
import pytest
from jax.experimental.compilation_cache import compilation_cache
from jaxtyping import install_import_hook

jax.config.update("jax_numpy_rank_promotion", "raise")
jax.config.update("jax_numpy_dtype_promotion", "strict")
install_import_hook(["logra_jax.optim", "logra_jax.models", "logra_jax.rl"], "beartype.beartype")

# The same examples in every run: a change is to blame for what fails, not luck.
hypothesis.settings.register_profile("same", derandomize=True, deadline=None)
hypothesis.settings.load_profile("same")

HERE = Path(__file__).parent
TINY = """
steps=4 mesh.fsdp=1 data.max_prompt_length=6 reward.pattern=(7) log.tensorboard=false checkpoint.every=2
rollout.prompts=4 rollout.generations=2 rollout.max_new_tokens=6 optimizer.rank=4 optimizer.update_ratio=.03
optimizer.b1=.5 optimizer.refresh=3 loss.reference_kl=.1
eval.every=2 eval.max_prompts=12 eval.temperature=1
kl.probe_responses=4 kl.check_responses=2 kl.check_every=2 kl.mismatch=true
"""


@pytest.fixture(scope="session")
def fixtures() -> Path:
    """Folder of tiny Hugging Face checkpoints with float32 reference numbers from torch."""
    return HERE / "fixtures"


@pytest.fixture(scope="session")
def golden() -> Path:
    """Folder of exact numbers, computed in float64 numpy from the formulas alone."""
    return HERE / "golden"


@pytest.fixture(scope="session")
def small_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder with `model`, one random layer over the demo's tokenizer, `rows.jsonl`, 18 prompts, and `run.yaml`.

    The answer to all of them is 7: with reward.pattern=(7) every text with a 7 in it is right.
    """
    from logra_jax.config import PACKAGED, load_config, to_yaml
    from logra_jax.models import CausalLM, ModelConfig, save_hf

    folder = tmp_path_factory.mktemp("small_run")
    raw = json.loads((PACKAGED / "model" / "config.json").read_text())
    raw |= {"num_hidden_layers": 1, "hidden_size": 32, "intermediate_size": 48}
    model = CausalLM(ModelConfig.from_hf(raw))
    save_hf(model, model.init_params(jax.random.key(0), "float32"), folder / "model")
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        shutil.copy(PACKAGED / "model" / name, folder / "model")
    rows = [{"prompt": f"{a}*{b}=", "answer": "7"} for a in (8, 12, 345) for b in range(2, 8)]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "run.yaml").write_text(to_yaml(load_config(None, TINY.split())))
    return folder


@pytest.fixture(scope="session")
def program_cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder for compiled programs that the tests of the commands share, subprocesses included."""
    return tmp_path_factory.mktemp("programs")


@pytest.fixture(scope="session", autouse=True)
def no_shared_programs(program_cache: Path) -> None:
    """Keeps commands off the user's cache: JAX may read there what another process has written half of, and warns."""
    os.environ["JAX_COMPILATION_CACHE_DIR"] = str(program_cache)  # JAX has been imported and takes no notice here


@pytest.fixture
def members() -> Iterator[Callable[..., list[subprocess.Popen]]]:
    """See `members.starting`."""
    from members import starting

    with starting() as start:
        yield start


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch):
    """See `interrupted.watch`."""
    from interrupted import watch

    return watch(monkeypatch)


@pytest.fixture
def command_settings(small_run: Path, program_cache: Path, tmp_path: Path, monkeypatch) -> Iterator[list[str]]:
    """Settings of a tiny run, in an empty current directory; programs are compiled once."""
    monkeypatch.chdir(tmp_path)
    settings = {  # here, and in other tests
        "jax_compilation_cache_dir": (str(program_cache), None),
        "jax_persistent_cache_min_compile_time_secs": (0, 1),
    }
    for name, (value, _) in settings.items():
        monkeypatch.setenv(name.upper(), str(value))  # for subprocesses
        jax.config.update(name, value)
    compilation_cache.reset_cache()  # it may have decided earlier that there is none
    yield [
        f"--config={small_run / 'run.yaml'}",
        f"model.path={small_run / 'model'}",
        f"data.train={small_run / 'rows.jsonl'}",
        f"data.eval={small_run / 'rows.jsonl'}",
    ]
    for name, (_, value) in settings.items():
        jax.config.update(name, value)
    compilation_cache.reset_cache()
