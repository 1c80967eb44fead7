"""The decoder against torch's float32 numbers, and against itself under every way of running it."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny import TINY

from logra_jax.errors import UserError
from logra_jax.models import CausalLM, load_hf
from logra_jax.models.decoder import project
from logra_jax.models.names import name_table

CONFIG = TINY.replace(
    model_type="qwen3",
    vocab_size=40,
    hidden_size=24,
    intermediate_size=32,
    head_dim=8,
    o_bias=True,
    qk_norm=True,
    initializer_range=0.2,
)
IDS = np.random.default_rng(0).integers(0, 40, (3, 10), dtype=np.int32)


def small(**changes):
    return CausalLM(CONFIG.replace(**changes), scan_unroll=1)


def log_softmax(logits):
    wide = np.asarray(logits, np.float64)
    top = wide.max(-1, keepdims=True)
    return wide - top - np.log(np.exp(wide - top).sum(-1, keepdims=True))


@pytest.mark.parametrize("side", ["right", "left"])
def test_logits_and_label_logprobs_are_those_of_torch(checkpoint, side):
    ids, mask = checkpoint.ref[f"{side}_input_ids"], checkpoint.ref[f"{side}_attention_mask"]
    logits = np.asarray(checkpoint.logits(checkpoint.params, ids, mask))
    assert logits.dtype == np.float32
    assert np.isfinite(logits).all()
    atol = checkpoint.tolerance[0]
    np.testing.assert_allclose(logits[mask == 1], checkpoint.ref[f"{side}_logits"][mask == 1], atol=atol, rtol=0)
    picked = np.take_along_axis(log_softmax(logits[:, :-1]), ids[:, 1:, None], axis=-1)[..., 0]
    real = checkpoint.ref[f"{side}_label_mask"] == 1
    expected = checkpoint.ref[f"{side}_label_logprobs"]
    np.testing.assert_allclose(picked[real], expected[real], atol=atol, rtol=0)


def test_hidden_states_of_every_layer_are_those_of_torch(checkpoint):
    """Layers past a depth are made idle by zero output kernels, so one program serves every depth."""
    ids, states = checkpoint.ref["short_input_ids"], checkpoint.ref["short_hidden_states"]
    scale = np.asarray(checkpoint.params["norm"]["scale"], np.float64) + checkpoint.model.config.zero_centered_norms
    layers = {path: name.layers for path, name in name_table(checkpoint.model.config).items()}
    run = jax.jit(checkpoint.model.hidden)
    for depth in range(len(states)):
        params = jax.tree.map(lambda x: x, checkpoint.params)
        for block, name in (("self_attn", "o_proj"), ("linear_attn", "out_proj"), ("mlp", "down_proj")):
            if block in params["layers"]:
                linear, numbers = params["layers"][block][name], layers[f"layers/{block}/{name}/kernel"]
                idle = (np.asarray(numbers) >= depth).reshape(*linear["kernel"].shape[:-2], 1, 1)
                linear["kernel"] = jnp.where(idle, 0.0, linear["kernel"])
        expected = states[depth].astype(np.float64)
        if depth < len(states) - 1:  # the last one is stored after the final norm, the others before
            mean = np.square(expected).mean(-1, keepdims=True)
            expected = scale * expected / np.sqrt(mean + checkpoint.model.config.rms_norm_eps)
        np.testing.assert_allclose(run(params, ids)[0], expected, atol=checkpoint.tolerance[0], rtol=0)


def test_gradients_are_those_of_torch(checkpoint):
    model, ref = checkpoint.model.replace(remat="full"), checkpoint.ref
    ids, mask = ref["right_input_ids"], ref["right_attention_mask"]
    labels = jnp.asarray(ref["right_label_mask"], jnp.float32)

    def loss(params):
        logprobs = jax.nn.log_softmax(model.logits(params, ids, mask)[:, :-1])
        picked = jnp.take_along_axis(logprobs, ids[:, 1:, None], axis=-1)[..., 0]
        return -(picked * labels).sum() / labels.sum()

    value, grads = jax.jit(jax.value_and_grad(loss))(checkpoint.params)
    np.testing.assert_allclose(value, ref["loss"], rtol=1e-5)
    by_name, table = {}, name_table(model.config)
    for path, names in model.weight_names().items():
        leaf = grads
        for key in path.split("/"):
            leaf = leaf[key]
        form = table[path]
        for name, row in zip(names, np.reshape(leaf, (len(names), *leaf.shape[len(form.stack) :])), strict=True):
            by_name[name] = np.asarray(form.to_file(row))
    norms, rtol = checkpoint.facts["grad_l2_norms"], checkpoint.tolerance[1]
    assert by_name.keys() == norms.keys()
    for name, norm in norms.items():
        np.testing.assert_allclose(np.linalg.norm(by_name[name]), norm, rtol=rtol, err_msg=name)
    stored = {key.removeprefix("grad/"): value for key, value in ref.items() if key.startswith("grad/")}
    assert stored or checkpoint.name == "tiny-qwen2-bf16"  # which stores the norms alone
    for name, expected in stored.items():
        np.testing.assert_allclose(by_name[name], expected, atol=rtol * np.abs(expected).max(), rtol=0, err_msg=name)


def test_cached_greedy_decoding_repeats_torch(checkpoint):
    model, ref = checkpoint.model, checkpoint.ref
    ids, mask = ref["left_input_ids"], ref["left_attention_mask"]
    expected = ref["greedy_tokens"]

    @jax.jit
    def step(params, cache, tokens, mask):
        hidden, cache = model.hidden(params, tokens, mask, cache=cache)
        return (hidden[:, -1].astype(jnp.float32) @ model.head(params)), cache

    cache = model.init_cache(len(ids), ids.shape[1] + expected.shape[1])
    tokens = ids
    for new in range(expected.shape[1]):
        logits, cache = step(checkpoint.params, cache, tokens, mask)
        np.testing.assert_allclose(logits, ref["greedy_step_logits"][:, new], atol=checkpoint.tolerance[0], rtol=0)
        np.testing.assert_array_equal(np.argmax(logits, -1), expected[:, new])
        tokens = jnp.argmax(logits, -1).astype(jnp.int32)[:, None]
        mask = jnp.ones_like(tokens)


def test_bfloat16_is_as_close_to_float32_as_torch_bfloat16_is(load_checkpoint):
    """Distance of distributions: mean KL(float32 || bfloat16) over real tokens, at most twice torch's own."""
    ref = load_checkpoint("tiny-qwen2-bf16").ref
    folder = load_checkpoint("tiny-qwen2-bf16").folder
    model, params = load_hf(folder, "bfloat16")
    assert {leaf.dtype for leaf in jax.tree.leaves(params)} == {jnp.dtype(jnp.bfloat16)}
    ids, mask = ref["right_input_ids"], ref["right_attention_mask"]
    assert jax.eval_shape(model.hidden, params, ids).dtype == jnp.bfloat16
    with np.load(folder / "reference_bf16_run.npz") as run:
        torch_logits = run["right_logits"]
    exact = log_softmax(ref["right_logits"][mask == 1])

    def kl(logits):
        return (np.exp(exact) * (exact - log_softmax(logits[mask == 1]))).sum(-1).mean()

    ours = np.asarray(jax.jit(model.logits)(params, ids, mask))
    assert ours.dtype == np.float32
    assert 0 < kl(ours) <= 2 * kl(torch_logits)


def test_logits_keep_the_sums_of_bfloat16_products_in_float32():
    rng = np.random.default_rng(2)
    hidden, head = (jnp.asarray(rng.standard_normal(shape), jnp.bfloat16) for shape in ((1, 2, 64), (64, 5)))
    logits = project(hidden, head)
    assert logits.dtype == jnp.float32
    exact = np.asarray(hidden, np.float64) @ np.asarray(head, np.float64)
    np.testing.assert_allclose(logits, exact, atol=1e-5, rtol=0)


def test_parameter_dtype_and_compute_dtype_are_independent(load_checkpoint):
    folder = load_checkpoint("tiny-qwen2-bf16").folder
    ids = load_checkpoint("tiny-qwen2-bf16").ref["short_input_ids"]
    wide, wide_params = load_hf(folder, "float32", compute_dtype="bfloat16")
    narrow, narrow_params = load_hf(folder, "bfloat16", compute_dtype="bfloat16")
    assert wide_params["norm"]["scale"].dtype == jnp.float32
    # The stored weights are bfloat16, so widening them and casting at the point of use is exact.
    np.testing.assert_array_equal(jax.jit(wide.logits)(wide_params, ids), jax.jit(narrow.logits)(narrow_params, ids))


def test_loop_and_recomputation_change_nothing(random_params):
    model = small()
    params = random_params(model)

    def loss(params, model):
        return jnp.square(model.logits(params, IDS)).mean()

    run = jax.jit(jax.value_and_grad(loss), static_argnums=1)
    base, grads = run(params, model.replace(scan_unroll=None))
    for change in ({"scan_unroll": 1}, {"scan_unroll": 1, "remat": "full"}):
        other, other_grads = run(params, model.replace(**change))
        np.testing.assert_allclose(other, base, rtol=1e-6)
        for a, b in zip(jax.tree.leaves(grads), jax.tree.leaves(other_grads), strict=True):
            np.testing.assert_allclose(a, b, atol=1e-5 * np.abs(a).max(), rtol=0)


def test_short_stacks_are_unrolled_on_a_cpu(random_params):
    """The default leaves no loop in the program of 3 layers, and one in that of 9."""
    for layers, loops in ((3, 0), (9, 1)):
        model = small(num_hidden_layers=layers).replace(scan_unroll=None)
        text = jax.jit(model.hidden).lower(model.abstract_params(), IDS).as_text()
        assert text.count("stablehlo.while") == loops


def test_full_remat_keeps_no_activation_inside_a_layer(random_params):
    """The MLP's wide activations are residuals of the backward pass without remat, and none are with it."""
    model = small(intermediate_size=37)
    params = random_params(model)

    def saved(model):
        _, pullback = jax.eval_shape(lambda p: jax.vjp(lambda q: model.logits(q, IDS).sum(), p), params)
        return [x.shape for x in jax.tree.leaves(pullback) if 37 in x.shape and 10 in x.shape]

    assert saved(model)
    assert not saved(model.replace(remat="full"))


def test_cache_in_pieces_gives_the_logits_of_one_forward(random_params):
    """Prompts of 4, 2 and 3 tokens, left-padded; pieces of width 4, 3, 1 with a hole of padding in a row."""
    model = small()
    params = random_params(model)
    mask = np.ones((3, 8), np.int32)
    mask[1, :2] = 0
    mask[2, :1] = 0
    mask[0, 5] = 0
    whole = np.asarray(jax.jit(model.logits)(params, IDS[:, :8], mask))
    run = jax.jit(model.hidden)
    cache = model.init_cache(3, 9)
    pieces = []
    for start, end in ((0, 4), (4, 7), (7, 8)):
        hidden, cache = run(params, IDS[:, start:end], mask[:, start:end], cache=cache)
        pieces.append(hidden @ model.head(params))
    real = mask == 1
    np.testing.assert_allclose(np.concatenate(pieces, 1)[real], whole[real], atol=1e-5, rtol=0)
    np.testing.assert_array_equal(cache.lengths, mask.sum(1))
    np.testing.assert_array_equal(cache.valid[:, :8], real)
    assert not cache.valid[:, 8:].any()
    assert cache.slot == 8


def test_no_token_sees_a_later_one_or_padding(random_params):
    model = small()
    params = random_params(model)
    mask = np.ones((3, 10), np.int32)
    mask[:, :3] = 0
    run = jax.jit(model.logits)
    base = np.asarray(run(params, IDS, mask))
    changed = IDS.copy()
    changed[:, 7] = (changed[:, 7] + 1) % 40
    changed[:, 0] = (changed[:, 0] + 1) % 40
    other = np.asarray(run(params, changed, mask))
    np.testing.assert_array_equal(other[:, 3:7], base[:, 3:7])
    assert (np.abs(other[:, 7:] - base[:, 7:]).max(-1) > 1e-4).all()


def test_a_row_of_padding_alone_is_finite_forward_and_backward(random_params):
    model = small()
    params = random_params(model)
    mask = np.ones((3, 10), np.int32)
    mask[1] = 0

    def loss(params):
        logits = model.logits(params, IDS, mask)
        return (logits * mask[..., None].astype(np.float32)).sum(), logits

    grads, logits = jax.jit(jax.grad(loss, has_aux=True))(params)
    assert np.isfinite(logits).all()
    assert all(np.isfinite(g).all() for g in jax.tree.leaves(grads))


def test_a_cache_that_is_too_short_is_refused(random_params):
    model = small()
    params = random_params(model)
    with pytest.raises(ValueError, match="10 new tokens do not fit a cache of 9 slots"):
        model.hidden(params, IDS, cache=model.init_cache(3, 9))


def test_equal_handles_share_one_program(random_params):
    model, same = small(), small()
    params = random_params(model)
    logits = jax.jit(CausalLM.logits, static_argnums=0)
    np.testing.assert_array_equal(logits(model, params, IDS), logits(same, params, IDS))
    assert logits._cache_size() == 1
    assert model.replace(remat="full") != model


@pytest.mark.parametrize(
    ("field", "value"),
    [("compute_dtype", "float16"), ("remat", "some"), ("attention", "flash"), ("scan_unroll", 0)],
)
def test_settings_out_of_range_are_named(field, value):
    with pytest.raises(UserError, match=f"{field} is {value!r}"):
        CausalLM(CONFIG, **{field: value})


def test_init_params_has_the_announced_shapes_and_statistics():
    model = small(vocab_size=400)
    params = model.init_params(jax.random.key(3), "bfloat16")
    shapes = jax.tree.map(lambda x: (x.shape, x.dtype), params)
    assert shapes == jax.tree.map(lambda x: (x.shape, x.dtype), model.abstract_params("bfloat16"))
    assert (params["norm"]["scale"] == 1).all()
    assert (params["layers"]["self_attn"]["o_proj"]["bias"] == 0).all()
    for leaf in (params["embed_tokens"]["embedding"], params["lm_head"]["kernel"]):
        np.testing.assert_allclose(np.std(np.asarray(leaf, np.float32)), 0.2, rtol=0.05)
    assert not np.array_equal(params["embed_tokens"]["embedding"].T, params["lm_head"]["kernel"])
    again = model.init_params(jax.random.key(3), "bfloat16")
    assert jax.tree.all(jax.tree.map(lambda a, b: bool((a == b).all()), params, again))


def test_axes_and_names_cover_every_parameter():
    for config in (CONFIG, CONFIG.replace(tie_word_embeddings=True, qk_norm=False, mlp_bias=True)):
        model = CausalLM(config)
        flat, _ = jax.tree.flatten_with_path(model.abstract_params())
        paths = {"/".join(k.key for k in path): leaf.shape for path, leaf in flat}
        assert paths.keys() == model.weight_names().keys()
        axes, _ = jax.tree.flatten_with_path(model.logical_axes(), is_leaf=lambda x: isinstance(x, tuple))
        for path, names in axes:
            assert len(names) == len(paths["/".join(k.key for k in path)])
            assert (names[0] == "layers") == (path[0].key == "layers")
    names = CausalLM(CONFIG).weight_names()
    assert names["layers/mlp/up_proj/kernel"] == tuple(f"model.layers.{i}.mlp.up_proj.weight" for i in range(3))
    assert names["norm/scale"] == ("model.norm.weight",)
    assert names["lm_head/kernel"] == ("lm_head.weight",)


def test_a_module_parameter_that_the_table_lacks_would_show(load_checkpoint):
    """Every tensor of the checkpoint is named exactly once over all leaves."""
    for name in ("tiny-qwen2-tied", "tiny-qwen3", "tiny-llama", "tiny-qwen3_5-text"):
        known = load_checkpoint(name)
        listed = [n for names in known.model.weight_names().values() for n in names]
        assert len(listed) == len(set(listed))
        assert set(listed) == set(json.loads((known.folder / "reference.json").read_text())["grad_l2_norms"])
