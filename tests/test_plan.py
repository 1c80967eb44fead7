"""The planner on a CPU: sizes against sums by hand, both forms of its output, and settings that cannot be planned."""

import json
import subprocess
import sys
from pathlib import Path

import jax
import pytest

from logra_jax import cli, plan
from logra_jax.build import read_model_config
from logra_jax.config import load_config
from logra_jax.errors import UserError
from logra_jax.footprint import Footprint, Parts, with_optimizer
from logra_jax.gpus import GIB, GPUS, find_gpu
from logra_jax.plan import OPTIMIZERS
from logra_jax.rules import check

ROOT = Path(__file__).parent.parent

# tests/fixtures/tiny-qwen2-tied: its config.json, multiplied out by hand.
LAYERS, HIDDEN, MLP, Q, KV, VOCAB = 3, 64, 160, 64, 32, 320
MATRICES = [(HIDDEN, Q), (HIDDEN, KV), (HIDDEN, KV), (Q, HIDDEN), (HIDDEN, MLP), (HIDDEN, MLP), (MLP, HIDDEN)]
TARGETS = LAYERS * sum(k * d for k, d in MATRICES)
OUTPUTS = LAYERS * sum(d for _, d in MATRICES)
NORMS_AND_BIASES = LAYERS * (2 * HIDDEN + Q + 2 * KV) + HIDDEN
PROMPT, ANSWER, ROWS, RANK = 6, 10, 8, 8


@pytest.fixture
def settings(fixtures, command_settings):
    """Settings of a tiny plan; `command_settings` has programs compiled once."""
    return [
        f"model.path={fixtures / 'tiny-qwen2-tied'}",
        "model.compute_dtype=bfloat16",
        "steps=4",
        f"data.max_prompt_length={PROMPT}",
        f"rollout.max_new_tokens={ANSWER}",
        "rollout.prompts=4",
        "rollout.generations=2",
        "loss.micro_batch=4",
        f"optimizer.rank={RANK}",
        "kl.probe_responses=2",
        "kl.check_every=0",
    ]


def test_slots_have_keys_and_values_and_so_have_prompts_that_wait(settings):
    """Two devices with 3 of 6 slots each: two of a device's prompts, of 2 answers each, fill them."""
    config = load_config(None, [*settings, "rollout.slots=6", "rollout.cache_dtype=float32"])
    found = Parts(config, read_model_config(config), VOCAB, jax.devices()[:2]).kv_cache()
    assert found == 2 * LAYERS * KV * 4 * (3 * (PROMPT + ANSWER) + 2 * PROMPT)


@pytest.fixture
def on_cpu(monkeypatch):
    """As where no compiler for GPUs is installed."""
    monkeypatch.setattr(plan, "has_compiler", lambda: False)


def test_sizes_are_those_computed_by_hand(settings, on_cpu, capsys):
    with jax.numpy_dtype_promotion("standard"):  # optax.adamw needs it
        assert plan.main(["--gpus", "2", "--json", *settings]) == 0
    said = capsys.readouterr()
    found = json.loads(said.out)
    assert "ESTIMATE" in said.err
    assert "logra-jax[plan]" in said.err
    assert list(found) == ["logra", "adamw", "galore", "lora"]
    # Two devices split all that has a dimension of the hidden size; biases and q/k/v outputs have none.
    split_frozen = VOCAB * HIDDEN
    adapters = LAYERS * RANK * sum(k + d for k, d in MATRICES)
    trained = {"logra": 4 * TARGETS, "adamw": 4 * TARGETS, "galore": 4 * TARGETS, "lora": 2 * TARGETS + 4 * adapters}
    # Adam's two moments in the shorter side's place, and the longer side's projector; three counts per matrix.
    projected = LAYERS * RANK * sum(2 * min(k, d) + max(k, d) for k, d in MATRICES)
    slack = 2 * NORMS_AND_BIASES + 4 * 7 * LAYERS  # held whole at most, in bfloat16; and the factors of adapters
    rows = ROWS // 2
    kv_cache = 2 * LAYERS * rows * (PROMPT + ANSWER) * KV * 2
    for name, entry in found.items():
        weights = trained[name] // 2 + 2 * split_frozen // 2
        sizes = {key.removesuffix("_gib"): value for key, value in entry.items() if key.endswith("_gib")}
        assert entry["compiled_for"] == "cpu (estimate)"
        assert entry["fits"] is True
        in_bytes = {key: value * GIB for key, value in sizes.items()}
        rounding = 1e-9 * GIB
        assert weights - rounding <= in_bytes["weights"] <= weights + slack + rounding
        assert in_bytes["kv_cache"] == pytest.approx(kv_cache, abs=rounding)
        moments = {
            "logra": (4 * OUTPUTS // 2, 4 * OUTPUTS + 64),
            "adamw": (4 * TARGETS, 4 * TARGETS + 64),
            "galore": (4 * projected // 2, 4 * projected // 2 + 4 * 3 * 7 * LAYERS + 64),
            "lora": (4 * adapters, 4 * adapters + 64),
        }[name]
        assert moments[0] <= in_bytes["optimizer"] <= moments[1]
        dense = {"logra": RANK * OUTPUTS, "adamw": TARGETS, "galore": TARGETS, "lora": adapters}
        gradients = 4 * dense[name] // 2
        assert in_bytes["sketches" if name == "logra" else "gradients"] == pytest.approx(gradients, abs=rounding)
        # Arguments and outputs but for the donated state; the batch comes on top.
        held = in_bytes["weights"] + in_bytes["optimizer"] + in_bytes["temporaries"]
        assert held <= in_bytes["total"] <= held + 20_000
        assert in_bytes["rollout"] >= in_bytes["weights"] + in_bytes["kv_cache"]
        assert sizes["reserve"] == 1.25
        larger = max(sizes["total"], sizes["rollout"] + sizes["optimizer"])
        assert sizes["needed"] == pytest.approx(larger + 1.25, abs=1e-6)
        assert sizes["left"] == pytest.approx(sizes["card"] - sizes["needed"], abs=1e-6)
    assert found["adamw"]["optimizer_gib"] > 10 * found["logra"]["optimizer_gib"]
    assert found["adamw"]["rollout_gib"] == found["galore"]["rollout_gib"] == found["logra"]["rollout_gib"]


@pytest.mark.parametrize(
    ("need", "given", "said"), [(76, None, ""), (77, None, "0.97 instead of 0.95"), (77, 0.97, "")]
)
def test_a_run_that_fits_only_in_a_larger_share(need, given, said):
    """76 of 80 GiB are 0.95 of them, 77 are 0.9625."""
    found = Footprint(*[0] * 5, update=need * GIB, rollout=9 * GIB, reference=0)
    config = load_config(None, [f"mesh.memory_fraction={given}" if given else "steps=9"])
    more = f", if mesh.memory_fraction={said}" if said else ""
    expected = f"logra: fits, {80 - need - 0.75:.2f} GiB left{more}"
    assert plan.verdict("logra", plan.Plan(found, card=80, reserve=0.75), config, 1) == expected


def test_table_and_verdict_of_a_run_that_cannot_fit(settings, on_cpu, capsys, monkeypatch):
    gib = Footprint(weights=9, optimizer=3, gradients=1, temporaries=30, kv_cache=4, update=42, rollout=20, reference=0)
    fake = Footprint(**{key: value * GIB for key, value in vars(gib).items()})
    monkeypatch.setattr("logra_jax.footprint.measure", lambda *args, **rest: fake)
    argv = ["--gpu", "RTX 4090", *settings, "model.remat=none", "model.attention=cudnn"]
    assert plan.main(argv) == 0
    said = capsys.readouterr().out
    lines = {line[:50].strip(): line[50:].split() for line in said.splitlines()}
    assert lines["GiB per GPU"] == ["logra", "adamw", "galore", "lora"]
    assert lines["temporaries of the update"] == ["30.00"] * 4
    assert lines["sketches / gradients (computed; in temporaries)"] == ["1.00"] * 4
    assert lines["total: larger phase + estimate"] == ["42.75"] * 4  # one GPU has no collectives
    assert lines["left"] == ["-19.15"] * 4
    assert "bfloat16 compute, remat none, attention blocked" in said  # a CPU's compiler knows no other
    assert "1 x rtx4090-24gb (23.6 GiB each), mesh fsdp=1 tensor=1; ESTIMATE" in said
    for part in (
        "logra: DOES NOT FIT, 19.15 GiB too large; the largest part is the temporaries of the update (30.00 GiB)",
        "set loss.micro_batch=1",
        "set model.remat=full",
        "lower optimizer.rank=8",
        "use more than 1 GPU, or larger ones",
        "use optimizer.name=logra",
    ):
        assert part in said
    assert "4 answers per micro-batch" in said
    assert plan.main([*argv, "model.attention=auto", "loss.micro_batch=0", "loss.token_budget=20"]) == 0
    said = capsys.readouterr().out
    assert "20 tokens per GPU per micro-batch" in said
    assert "set loss.token_budget=16" in said
    assert "micro_batch=" not in said


def test_what_only_another_optimizer_refuses_is_a_note(settings, on_cpu, capsys, monkeypatch):
    def measure(config, *rest, **more):
        if config.optimizer.name == "logra":
            raise UserError(f"optimizer.rank={config.optimizer.rank} is too large")
        return Footprint(1, 1, 1, 1, 1, update=1, rollout=1, reference=1)

    monkeypatch.setattr("logra_jax.footprint.measure", measure)
    dense = [item for item in settings if not item.startswith(("optimizer.rank", "kl.probe"))]
    dense += ["kl.control=false", "optimizer.name=adamw", "optimizer.learning_rate=1e-4"]
    assert plan.main([*dense, "--json"]) == 0
    said = capsys.readouterr()
    assert list(json.loads(said.out)) == ["adamw", "galore", "lora"]
    assert "note: logra is left out: optimizer.rank=256 is too large" in said.err
    with pytest.raises(UserError, match=f"rank={RANK} is too large"):
        plan.main(settings)


def test_peak_counts_what_stays_during_the_rollout():
    footprint = Footprint(5, 3, 0, 0, 0, update=10, rollout=8, reference=2)
    assert footprint.peak == 8 + 3 + 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--gpu", "h1000"], "neither a file nor a known GPU (did you mean h100-80gb?); known are h100-80gb, h200"),
        (["--gpu", "a100"], "there are a100-80gb and a100-40gb"),
        (["--gpus", "0"], "--gpus 0: give at least 1"),
        (["--gpus", "3", "mesh.tensor=2"], "--gpus 3 is not a multiple of mesh.tensor=2: use --gpus 4"),
        (["--gpus", "8", "mesh.fsdp=4"], "uses 4: set mesh.fsdp=8, or --gpus 4"),
        (["--gpus", "3"], "mesh fsdp=3 does not divide embed_tokens/embedding: its embed dimension is 64; sizes"),
        (["--gpus", "8"], "rollout.prompts=4 cannot be split over mesh.fsdp=8 devices: use a multiple of 8, or mesh"),
        (["--gpus", "8", "rollout.prompts=8"], "loss.micro_batch=4 cannot be split over mesh.fsdp=8"),
        (["model.path="], "neither model.path nor model.preset is set"),
        (["rollout.max_new_tokens=2000"], "2006 tokens, but the model takes 1024"),
        (["model.preset=qwen3-4"], "model.preset='qwen3-4' is not known: did you mean qwen3-4b?"),
        (["model.preset=qwen3-4b"], "is not the model of model.preset=qwen3-4b: model_type qwen2 (preset: qwen3)"),
    ],
)
def test_bad_input(arguments, message, settings, on_cpu, capsys):
    with pytest.raises(SystemExit, match="2"):
        cli.run(lambda: plan.main([*settings, *arguments]))
    assert message in capsys.readouterr().err


def test_a_file_describes_a_gpu(tmp_path):
    file = tmp_path / "card.txtpb"
    file.write_text(GPUS["l4-24gb"].proto())
    assert find_gpu(str(file)) == ("NVIDIA L4", round(22.0 * GIB), GPUS["l4-24gb"].proto())
    file.write_text("nothing")
    with pytest.raises(UserError, match="has no device_memory_size"):
        find_gpu(str(file))


@pytest.mark.parametrize(
    ("text", "name"), [("H100", "h100-80gb"), ("rtx-4090", "rtx4090-24gb"), ("NVIDIA A100 40GB", "a100-40gb")]
)
def test_names_of_gpus(text, name):
    assert find_gpu(text).name == name


def test_description_of_a_gpu():
    proto = GPUS["a100-40gb"].proto()
    assert "cuda_compute_capability { major: 8 }" in proto
    assert "fpus_per_core: 64" in proto
    assert f"shared_memory_per_block_optin: {163 * 1024}" in proto
    assert "cuda_compute_capability { major: 9 feature_extension: ACCELERATED_FEATURES }" in GPUS["h100-80gb"].proto()


def test_the_other_optimizers():
    logra = load_config(None)
    adamw = with_optimizer(logra, "adamw")
    assert with_optimizer(logra, "logra") is logra
    assert (adamw.optimizer.learning_rate, adamw.optimizer.update_ratio, adamw.kl.control) == (1e-6, None, False)
    assert with_optimizer(adamw, "logra").optimizer.update_ratio == 6e-5
    assert with_optimizer(load_config(None, ["model.remat=projected"]), "adamw").model.remat == "full"
    assert with_optimizer(load_config(None, ["model.remat=offload"]), "adamw").model.remat == "offload"
    small = load_config(
        None, ["model.param_dtype=bfloat16", "optimizer.others=adamw", "optimizer.others_learning_rate=1e-6"]
    )
    for name in OPTIMIZERS:
        check(with_optimizer(small, name))
    lora = with_optimizer(small, "lora")
    assert (lora.optimizer.others, lora.model.param_dtype) == ("frozen", "float32")


@pytest.mark.parametrize("limit", [0, 1, 5, 6, 9])
def test_bisection(limit):
    tried = []
    fits = lambda value: tried.append(value) or value <= limit
    expected = max((value for value in (1, 2, 4, 6, 8) if value <= limit), default=None)
    assert plan.largest_fitting((1, 2, 4, 6, 8), fits) == expected
    assert len(tried) <= 3


def test_search_tries_what_the_run_allows():
    config = load_config(ROOT / "configs/paper/qwen2.5-math-1.5b.yaml", ["rollout.prompts=12"])

    def fits(changed):
        rows = changed.rollout.rows
        assert rows % changed.loss.micro_batch == 0
        assert changed.loss.micro_batch % 4 == 0
        return rows <= 36 and changed.rollout.max_new_tokens <= 2600 and changed.loss.micro_batch <= 4

    small = load_config(
        ROOT / "configs/paper/qwen2.5-math-1.5b.yaml", ["rollout.prompts=12", "rollout.max_new_tokens=9"]
    )
    shape = read_model_config(config)
    assert plan.search(small, 4, fits, shape) == {
        "loss.micro_batch": 4,
        "rollout.max_new_tokens": 2560,
        "rollout.generations": 3,
    }
    assert plan.search(config, 4, fits, shape)["loss.micro_batch"] is None
    budget = load_config(
        ROOT / "configs/paper/qwen2.5-math-1.5b.yaml",
        ["rollout.prompts=12", "loss.micro_batch=0", "loss.token_budget=4096", "rollout.max_new_tokens=976"],
    )
    fits = lambda changed: changed.loss.token_budget <= 5000 and changed.rollout.max_new_tokens <= 5000
    assert plan.search(budget, 4, fits, shape) == {
        "rollout.max_new_tokens": 4096 - 1024,
        "rollout.generations": 64,
        "loss.token_budget": 4000,
    }


def test_what_cannot_be_compiled_is_said_and_does_not_fit(settings, on_cpu, monkeypatch, capsys):
    def refuses(self):
        raise jax.errors.JaxRuntimeError("INTERNAL: no tile sizes\nmore")

    monkeypatch.setattr("jax.stages.Lowered.compile", refuses)
    with pytest.raises(UserError, match=r"cannot compile .*: INTERNAL: no tile sizes\. Another"):
        plan.main(["--gpus", "1", *settings])

    def fits(config):
        if config.loss.micro_batch == 2:
            raise UserError("no tiles")
        return config.loss.micro_batch < 2

    config = load_config(None, settings)
    assert plan.search(config, 1, fits, read_model_config(config))["loss.micro_batch"] == 1
    assert "counted as not fitting: no tiles" in capsys.readouterr().err


@pytest.mark.parametrize("size", ["1.5b", "7b"])
def test_the_recipe_of_the_paper(size):
    config = load_config(ROOT / f"configs/paper/qwen2.5-math-{size}.yaml")
    assert (config.rollout.rows, config.loss.importance_cap, config.optimizer.update_ratio) == (128, 2.0, 6e-5)
    longest = config.data.max_prompt_length + config.rollout.max_new_tokens
    assert longest == 4096 == read_model_config(config).max_position_embeddings
    assert (config.advantage.estimator, config.advantage.failure_reward) == ("running_baseline", -0.01)
    assert (config.eval.temperature, config.eval.top_p, config.eval.samples) == (0.7, 0.7, 4)
    assert read_model_config(config).hidden_size == {"1.5b": 1536, "7b": 3584}[size]


def test_the_recipe_for_24_gb():
    config = load_config(ROOT / "configs/qwen2.5-7b-24gb.yaml")
    assert (config.model.param_dtype, config.model.rounding, config.optimizer.rank) == ("bfloat16", "stochastic", 256)
    assert config.loss.micro_batch == 1
    assert config.rollout.rows >= 8
    assert config.data.max_prompt_length + config.rollout.max_new_tokens == 2048
    assert read_model_config(config).hidden_size == 3584


def test_training_refuses_a_preset_without_weights(tmp_path):
    from logra_jax.config import check_paths

    (tmp_path / "rows.jsonl").write_text("")
    config = load_config(
        ROOT / "configs/paper/qwen2.5-math-7b.yaml", [f"data.train={tmp_path / 'rows.jsonl'}", "data.eval=null"]
    )
    with pytest.raises(UserError, match=r"model.preset=qwen2.5-math-7b has no weights.*give its folder as model.path"):
        check_paths(config)


def test_presets_and_gpus_need_no_jax():
    code = "import sys, logra_jax.plan, logra_jax.models.presets; sys.exit('jax' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
