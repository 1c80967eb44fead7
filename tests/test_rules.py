"""Rules between settings: what contradicts each other, and what would do nothing, is refused by name."""

import pytest

from logra_jax.config import load_config
from logra_jax.errors import UserError


@pytest.fixture
def write(tmp_path):
    """Writes a YAML file and returns its path."""

    def write_(text: str):
        (tmp_path / "run.yaml").write_text(text)
        return tmp_path / "run.yaml"

    return write_


@pytest.fixture
def minimal(write):
    return write("optimizer: {update_ratio: 6e-5}\ndata: {eval: held_out.jsonl}\n")


LORA = ["optimizer.name=lora", "optimizer.learning_rate=1e-4"]
VLLM = ["rollout.engine=vllm", "vllm.urls=[http://127.0.0.1:1]"]
TOGETHER = [
    (["rollout.generations=1"], ["rollout.generations=1", "advantage.estimator=grpo", "running_baseline"]),
    (["rollout.generations=1", "advantage.estimator=leave_one_out"], ["generations", "leave_one_out"]),
    (
        ["reward.overlong_tokens=9", "advantage.estimator=running_baseline", "advantage.failure_reward=-.01"],
        ["reward.overlong_tokens=9", "advantage.failure_reward=-0.01"],
    ),
    (
        ["loss.updates_per_batch=4", "steps=10", "eval.every=0", "checkpoint.every=7"],
        ["loss.updates_per_batch=4", "steps=10", "set steps=12 checkpoint.every=8"],
    ),
    (["vllm.arguments=[--swap-space,3]"], ["vllm.arguments=[--swap-space,3] has no effect with rollout.engine=jax"]),
    (["loss.micro_batch=48"], ["loss.micro_batch=48", "128 answers", "rollout.prompts=16"]),
    (["loss.micro_batch=256"], ["loss.micro_batch=256", "128 answers"]),
    (["loss.token_budget=4096", "loss.micro_batch=8"], ["loss.token_budget=4096 and loss.micro_batch=8 exclude"]),
    (["loss.token_budget=4096", "model.attention=cudnn"], ["model.attention=cudnn", "loss.token_budget=4096"]),
    (["loss.token_budget=2047"], ["loss.token_budget=2047", "rollout.max_new_tokens=1024 = 2048"]),
    (["rollout.slots=129"], ["rollout.slots=129", "128 answers"]),
    (["kl.probe_responses=129"], ["kl.probe_responses=129", "128 answers"]),
    (["kl.check_responses=129"], ["kl.check_responses=129", "128 answers"]),
    (["kl.check_responses=9"], ["kl.check_responses=9", "kl.probe_responses=8"]),
    (["optimizer.b1=0.9"], ["optimizer.b1=0.9", "optimizer.refresh=1"]),
    (
        ["optimizer.update_ratio=6e-5", "optimizer.learning_rate=1e-6"],
        ["optimizer.update_ratio=6e-05", "optimizer.learning_rate=1e-06"],
    ),
    (["optimizer.update_ratio=null"], ["optimizer.update_ratio", "optimizer.learning_rate"]),
    (["optimizer.name=adamw"], ["optimizer.learning_rate is required", "adamw"]),
    (["optimizer.name=lora", "optimizer.update_ratio=null"], ["optimizer.learning_rate is required", "lora"]),
    ([*LORA, "optimizer.update_ratio=1e-3"], ["optimizer.update_ratio=0.001", "no effect with optimizer.name=lora"]),
    ([*LORA, "optimizer.others=adamw"], ["optimizer.others=adamw", "targets alone"]),
    ([*LORA, "optimizer.others_learning_rate=1e-6"], ["no effect", "optimizer.name=lora"]),
    ([*LORA, "model.param_dtype=bfloat16"], ["model.param_dtype=bfloat16", "adapters are float32"]),
    (["optimizer.lora_alpha=16"], ["optimizer.lora_alpha=16", "no effect with optimizer.name=logra"]),
    (["model.rounding=residual"], ["model.rounding=residual", "no effect", "model.param_dtype=bfloat16"]),
    (
        ["model.remat=projected", "optimizer.name=adamw", "optimizer.learning_rate=1"],
        ["model.remat=projected", "optimizer.name=adamw", "model.remat=full"],
    ),
    (["model.attention=cudnn", "model.compute_dtype=float32"], ["model.attention=cudnn", "model.compute_dtype"]),
    (["optimizer.others=adamw"], ["optimizer.others_learning_rate"]),
    (["optimizer.others_learning_rate=1e-6"], ["no effect", "optimizer.others=frozen"]),
    (["rollout.engine=vllm"], ["rollout.engine=vllm has no servers", "vllm.urls", "vllm.python"]),
    (["rollout.engine=vllm", "vllm.python=p", "vllm.servers=2", "vllm.gpus=4"], ["vllm.gpus=4", "the 2 GPUs"]),
    (["rollout.engine=vllm", "vllm.urls=[127.0.0.1:8000]"], ["'127.0.0.1:8000'", "http://HOST:PORT"]),
    ([*VLLM, "data.eval=null", "rollout.slots=8"], ["rollout.slots=8", "no effect", "rollout.engine=jax"]),
    (["rollout.engine=vllm", "vllm.python=p", "vllm.arguments=[--port,18777]"], ["has --port", "set vllm.port"]),
    (["rollout.engine=vllm", "vllm.python=p", "vllm.arguments=[--served_model_name=a]"], ["has --served-model-name"]),
    ([*VLLM, "rollout.top_p=0.9"], ["rollout.top_p=0.9", "rollout.engine=vllm"]),
    ([*VLLM, "rollout.top_k=5"], ["rollout.top_k=5", "rollout.engine=vllm"]),
    ([*VLLM, "optimizer.distribution=gaussian"], ["distribution=gaussian", "rademacher", "vllm.full_every=1"]),
    ([*VLLM, "model.param_dtype=bfloat16"], ["model.rounding=null", "model.rounding=residual", "vllm.full_every=1"]),
    (["rollout.staleness=1", "loss.importance_cap=2"], ["rollout.staleness=1", "no effect", "rollout.engine=jax"]),
    ([*VLLM, "rollout.staleness=1"], ["rollout.staleness=1", "needs loss.importance_cap"]),
    (
        [*VLLM, "rollout.staleness=1", "loss.importance_cap=2", "loss.updates_per_batch=2", "steps=4", "eval.every=2"],
        ["rollout.staleness=1", "loss.updates_per_batch=2"],
    ),
    ([*VLLM, *LORA, "optimizer.update_ratio=null"], ["optimizer.name=lora", "vllm.full_every=1"]),
    (["optimizer.warmup=100"], ["optimizer.warmup=100", "steps=100"]),
    (["reward.kind=exact", "reward.pattern=#.*$"], ["reward.pattern", "needs a group"]),
    (["reward.kind=exact", "reward.pattern=("], ["reward.pattern", "not a regular expression"]),
]


@pytest.mark.parametrize(("overrides", "parts"), TOGETHER)
def test_settings_that_contradict_each_other(minimal, overrides, parts):
    with pytest.raises(UserError) as error:
        load_config(minimal, overrides)
    for part in parts:
        assert part in str(error.value)


@pytest.mark.parametrize(
    "more",
    [
        ["model.param_dtype=bfloat16", "model.rounding=residual"],
        [*LORA, "optimizer.update_ratio=null", "vllm.full_every=1"],
        ["optimizer.distribution=gaussian", "vllm.full_every=1"],
    ],
)
def test_what_servers_can_follow(minimal, more):
    assert load_config(minimal, [*VLLM, *more]).vllm.urls == ("http://127.0.0.1:1",)


def test_one_generation_is_fine_with_a_running_baseline(minimal):
    overrides = ["rollout.generations=1", "advantage.estimator=running_baseline"]
    assert load_config(minimal, overrides).rollout.rows == 16


# What each update rule is made of: README, "Train your own" and "The update".
ANY = {"b2=0.9", "eps=1e-6", "weight_decay=0.1", "max_grad_norm=1", "warmup=2", "targets=[q_proj]"}
OF = {
    "logra": {"rank=8", "sketch_seed=1", "distribution=gaussian", "refresh=0", "preserve_norm=false", "others=adamw"},
    "adamw": {"others=adamw"},
    "row_adam": set(),
    "galore": {"rank=8", "projection_interval=10", "galore_scale=1", "others=adamw"},
    "lora": {"rank=8", "sketch_seed=1", "lora_alpha=16"},
}


@pytest.mark.parametrize("setting", sorted(ANY.union(*OF.values())))
@pytest.mark.parametrize("name", OF)
def test_an_optimizer_takes_the_settings_that_it_uses(name, setting, write):
    path = write(f"optimizer: {{name: {name}, learning_rate: 1e-3}}\n")
    if setting in ANY | OF[name]:
        load_config(path, [f"optimizer.{setting}"])
    else:
        with pytest.raises(UserError, match=rf"optimizer\.{setting.split('=')[0]}=.* optimizer\.name={name}"):
            load_config(path, [f"optimizer.{setting}"])


# (setting, choices beside which it does nothing, choices beside which it does something)
CHOICES = [
    ("optimizer.others_learning_rate=1e-5", "optimizer.others=frozen", "optimizer.others=adamw"),
    ("optimizer.final_fraction=0.5", "optimizer.schedule=constant", "optimizer.schedule=cosine"),
    ("model.rounding=residual", "model.param_dtype=float32", "model.param_dtype=bfloat16"),
    ("reward.pattern=(7)", "reward.kind=my:function", "reward.kind=exact"),
    ("reward.workers=4", "reward.kind=exact", "reward.kind=math"),
    ("reward.timeout_s=1", "reward.kind=exact", "reward.kind=my:function"),
    ("advantage.normalize_std=false", "advantage.estimator=leave_one_out", "advantage.estimator=grpo"),
    ("advantage.eps=1e-3", "advantage.normalize_std=false", "advantage.normalize_std=true"),
    ("advantage.eps=1e-3", "advantage.estimator=running_baseline", "advantage.estimator=grpo"),
    ("advantage.failure_reward=-1", "advantage.estimator=grpo", "advantage.estimator=running_baseline"),
    ("advantage.baseline_weight=0.5", "advantage.estimator=leave_one_out", "advantage.estimator=running_baseline"),
    ("loss.clip_low=0.2", "loss.updates_per_batch=1", "loss.updates_per_batch=2"),
    ("loss.clip_high=0.2", "loss.updates_per_batch=1", "loss.updates_per_batch=2"),
    *((f"kl.{key}", "kl.control=false", "kl.control=true")
      for key in ("budget_start=1e-3", "budget_end=1e-3", "budget_steps=9", "alpha_max=1", "mismatch=false")),
    *((f"kl.{key}", "kl.control=false kl.check_every=0", choice)
      for key in ("probe_responses=9", "probe_tokens=99")
      for choice in ("kl.check_every=0", "kl.control=false")),
    ("kl.check_responses=4", "kl.check_every=0", "kl.check_every=1"),
    *((key, "data.eval=null", "data.eval=other.jsonl")
      for key in ("eval.every=2", "eval.before=false", "eval.max_prompts=2", "eval.temperature=1", "log.samples=3",
                  "checkpoint.keep_best=false")),
    *((key, "eval.temperature=0", "eval.temperature=0.5") for key in ("eval.samples=4", "eval.top_p=0.9")),
    ("log.project=mine", "log.wandb=off", "log.wandb=offline"),
    *((f"vllm.{key}", "rollout.engine=jax", "rollout.engine=vllm vllm.python=python")
      for key in ("timeout_s=9", "folder=shared", "full_every=2", "drift_every=2")),
    *((f"vllm.{key}", "rollout.engine=vllm vllm.urls=[http://a:1]", "rollout.engine=vllm vllm.python=python")
      for key in ("servers=2", "tensor_parallel=2", "dtype=float32", "arguments=[--enforce-eager]", "start_s=9",
                  "gpus=4")),
]  # fmt: skip


@pytest.mark.parametrize(("setting", "without", "beside"), CHOICES)
def test_an_option_that_does_nothing_is_an_error(setting, without, beside, minimal):
    load_config(minimal, [setting, *beside.split(), "optimizer.learning_rate=1e-3", "optimizer.update_ratio=null"])
    with pytest.raises(UserError, match="no effect") as error:
        load_config(minimal, [setting, *without.split()])
    assert str(error.value).startswith(f"{setting.split('=')[0]}=")
    for choice in without.split():
        assert choice in str(error.value)


def test_the_command_line_replaces_a_choice_of_the_file(write):
    """What the file set for its own choice is at its default again; what the command line set itself is refused."""
    text = "optimizer: {rank: 16, update_ratio: 1e-3, preserve_norm: true, b2: 0.9}\nkl: {budget_start: 1e-3}\n"
    other = ["optimizer.name=adamw", "optimizer.learning_rate=1e-4", "kl.control=false"]
    config = load_config(write(text), other)
    optimizer = config.optimizer
    assert (optimizer.rank, optimizer.update_ratio, optimizer.preserve_norm, optimizer.b2) == (256, None, None, 0.9)
    assert config.kl.budget_start == 2e-4
    for setting in ("optimizer.rank=16", "kl.budget_start=1e-3"):
        with pytest.raises(UserError, match=f"{setting.split('=')[0]}=.* no effect"):
            load_config(write(text), [*other, setting])


@pytest.mark.parametrize(
    ("file", "override", "now"),
    [
        ("optimizer: {update_ratio: 6e-5}", "optimizer.learning_rate=1e-4", (None, 1e-4, 0, 0)),
        ("optimizer: {learning_rate: 1e-4}", "optimizer.update_ratio=6e-5", (6e-5, None, 0, 0)),
        ("optimizer: {update_ratio: 6e-5}\nloss: {micro_batch: 4}", "loss.token_budget=9999", (6e-5, None, 0, 9999)),
        ("optimizer: {update_ratio: 6e-5}\nloss: {token_budget: 9999}", "loss.micro_batch=0", (6e-5, None, 0, 9999)),
    ],
)
def test_the_command_line_says_a_thing_the_other_way(write, file, override, now):
    config = load_config(write(file), [override])
    optimizer, loss = config.optimizer, config.loss
    assert (optimizer.update_ratio, optimizer.learning_rate, loss.micro_batch, loss.token_budget) == now


@pytest.mark.parametrize("before", [[], ["optimizer.update_ratio=6e-5"]])
def test_one_place_may_not_say_a_thing_both_ways(write, before):
    file = write("optimizer: {learning_rate: 1e-4}" if before else "optimizer: {update_ratio: 6e-5, learning_rate: 1}")
    with pytest.raises(UserError, match="exclude each other"):
        load_config(file, [*before, "optimizer.learning_rate=1e-4"] if before else [])


def test_a_file_may_not_contradict_itself(write):
    text = "optimizer: {name: adamw, learning_rate: 1e-4, rank: 16}\n"
    with pytest.raises(UserError, match=r"optimizer\.rank=16 has no effect with optimizer\.name=adamw"):
        load_config(write(text))
    assert load_config(write(text), ["optimizer.name=lora"]).optimizer.rank == 16


def test_commands_of_the_readme_start_from_the_demo():
    for name in ("adamw", "row_adam", "lora", "galore"):
        more = ["kl.control=false", "kl.check_every=0"]
        config = load_config(None, [f"optimizer.name={name}", "optimizer.learning_rate=1e-4", *more])
        assert config.optimizer.rank == (16 if name in ("lora", "galore") else 256)
