"""Where weights lie while the built-in sampler is at work: sums by hand, and what is compiled in which layout."""

from functools import partial
from types import SimpleNamespace

import jax
import pytest
from tiny import TINY

from logra_jax import footprint, plan
from logra_jax.build import read_model_config
from logra_jax.config import load_config
from logra_jax.errors import UserError
from logra_jax.mesh import make_mesh
from logra_jax.models import CausalLM
from logra_jax.sampling import bytes_moved, copy_bytes, evaluation, groups, sampled_here

# TINY: 3 layers, hidden 16, 4 heads of 4 with 2 of keys and values, MLP 24, vocabulary 32.
MATRICES = 3 * (16 * 16 + 2 * 16 * 8 + 16 * 16 + 3 * 16 * 24)
OTHERS = 3 * (2 * 16 + 16 + 2 * 8)  # norms and biases
PROMPT, ANSWER, PROMPTS, SAMPLES = 8, 40, 4, 2


def settings(*more):
    return load_config(
        None,
        [
            "model.compute_dtype=bfloat16",
            f"data.max_prompt_length={PROMPT}",
            f"rollout.max_new_tokens={ANSWER}",
            f"rollout.prompts={PROMPTS}",
            f"rollout.generations={SAMPLES}",
            "kl.probe_responses=2",
            "kl.check_every=0",
            *more,
        ],
    )


def test_bytes_that_reach_a_device():
    """8 devices: of each weight 7/8 for each of 1 + 40 passes; or once a half, and sums of 4 groups of 2 devices."""
    mesh, asked = make_mesh(8, 1), sampled_here(settings(), 8)
    weights = 2 * (MATRICES + OTHERS)
    assert bytes_moved(settings(), TINY, mesh, asked) == 41 * weights * 7 / 8
    tokens = (PROMPTS * PROMPT + PROMPTS * SAMPLES * ANSWER) / 4
    sums = 3 * 2 * tokens * 2 * 16 * (2 * 1 / 2)
    assert bytes_moved(settings(), TINY, mesh, asked, 2) == weights / 2 + sums
    refilled = settings("rollout.slots=3")  # 8 rows on 3 slots take three times as many turns
    assert bytes_moved(refilled, TINY, mesh, asked) == 3 * 41 * weights * 7 / 8


def test_the_layout_that_is_chosen():
    mesh = make_mesh(8, 1)
    assert groups(settings(), TINY, mesh) == [2, 0]
    # One token of many long prompts: to add up their vectors costs more than to bring the weights.
    short = ["rollout.max_new_tokens=1", "data.max_prompt_length=60", "rollout.prompts=64"]
    assert groups(settings(*short), TINY, mesh) == [0]
    assert groups(settings(*short, "rollout.layout=tensor"), TINY, mesh) == [2]
    assert groups(settings("rollout.layout=train"), TINY, mesh) == [0]
    four = TINY.replace(num_key_value_heads=4)
    assert groups(settings(), four, mesh)[0] == 4
    assert groups(settings("mesh.tensor=2"), four, make_mesh(4, 2))[0] == 4
    for where in (make_mesh(1, 1), make_mesh(1, 2)):
        assert groups(settings(), TINY, where) == [0]
        with pytest.raises(UserError, match=r"rollout.layout=tensor: \d device\(s\) .* no other layout"):
            groups(settings("rollout.layout=tensor"), TINY, where)


def test_bytes_of_the_copy():
    """bfloat16; embedding and head as well, halves of each on every device."""
    model = CausalLM(TINY, "bfloat16", mesh=make_mesh(8, 1))
    assert copy_bytes(model, 2) == 2 * (MATRICES + 2 * 32 * 16) // 2


def test_what_is_sampled_here():
    vllm = ["rollout.engine=vllm", "vllm.urls=[http://h:1]"]
    assert sampled_here(settings(), 2) == (PROMPTS, SAMPLES, 1.0, 1.0, 0)
    assert sampled_here(settings(*vllm, "data.eval=null"), 2) is None
    held_out = [*vllm, "data.eval=rows.jsonl"]
    assert sampled_here(settings(*held_out), 2) == (8, 1, 0.0, 1.0, 0)  # as many answers as an update has, greedy
    assert sampled_here(settings(*held_out, "eval.max_prompts=5"), 4) == (8, 1, 0.0, 1.0, 0)
    several = settings(*held_out, "eval.samples=3", "eval.temperature=0.7", "eval.top_p=0.9")
    assert sampled_here(several, 2) == (2, 3, 0.7, 0.9, 0)
    assert evaluation(settings(*held_out), 2, 3).prompts == 4


@pytest.fixture
def compiled(monkeypatch):
    """Programs of known sizes instead of the compiler's; the layouts of rollouts that were asked for."""
    asked = []

    def program(size):
        names = ("argument", "output", "alias", "temp")
        sizes = {f"{name}_size_in_bytes": size * (name == "temp") for name in names}
        return SimpleNamespace(memory_analysis=lambda: SimpleNamespace(**sizes))

    def rollout(self, group):
        asked.append(group)
        return program(900 if group else 500)

    monkeypatch.setattr(footprint.Parts, "update", lambda self: program(600))
    monkeypatch.setattr(footprint.Parts, "rollout", rollout)
    return asked


@pytest.mark.parametrize(
    ("room", "layout", "rollout", "tried"),
    [
        (None, "auto", 900, [2]),
        (900, "auto", 900, [2]),
        (899, "auto", 500, [2, 0]),
        (899, "tensor", 900, [2]),
        (899, "train", 500, [0]),
    ],
)
def test_a_copy_that_does_not_fit_is_not_made(compiled, fixtures, room, layout, rollout, tried):
    """room: bytes beside the optimizer state."""
    more = [f"model.path={fixtures / 'tiny-qwen2-tied'}", "optimizer.rank=8", f"rollout.layout={layout}"]
    config = settings(*more)
    measure = partial(footprint.measure, config, read_model_config(config), 320, jax.devices()[:2])
    found = measure(room=room and room + measure(rollout=False).optimizer)
    assert compiled == tried
    assert (found.rollout, found.group, found.copy > 0) == (rollout, tried[-1], tried[-1] > 0)


def test_servers_have_their_own_memory(compiled, fixtures, capsys, monkeypatch):
    monkeypatch.setattr(plan, "has_compiler", lambda: False)
    argv = [
        f"model.path={fixtures / 'tiny-qwen2-tied'}", "optimizer.rank=8", "optimizer.update_ratio=1e-3",
        "model.compute_dtype=float32", "data.max_prompt_length=6", "rollout.max_new_tokens=10", "rollout.prompts=4",
        "rollout.generations=2", "kl.probe_responses=2", "kl.check_every=0", "steps=4", "rollout.engine=vllm",
        "vllm.urls=[http://h:1]", "vllm.full_every=1",
    ]  # fmt: skip
    assert plan.main(argv) == 0
    said = capsys.readouterr().out
    assert "their memory is their own: the rollout is that of the evaluation, 8 prompts x 1 answers" in said
    assert compiled
    compiled.clear()
    assert plan.main([*argv, "data.eval=null"]) == 0
    said = capsys.readouterr().out
    assert "their memory is their own: nothing is sampled here" in said
    assert not compiled
