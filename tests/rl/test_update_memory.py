"""What the compiled update keeps beside its arguments: no second copy of a stack, no whole logits, no whole scores."""

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from logra_jax import optim
from logra_jax.mesh import batch_sharding, make_mesh, shardings
from logra_jax.models import CausalLM, ModelConfig, layers
from logra_jax.rl import loss
from logra_jax.rl.batch import Batch
from logra_jax.rl.loss import LossSettings
from logra_jax.rl.packing import Packing
from logra_jax.rl.policy import Policy
from logra_jax.rl.update import TrainState, make_update

DEVICES, FLOAT = 8, 4


def compiled_temporaries(*, prompt, new, rank=4, probe=DEVICES, packed=False, **sizes):
    """Bytes per device of a compiled LoGRA update, probe included: micro-batches of one row per device.

    packed: of up to 2 rows per device, and as many as the lengths of the answers ask for.
    """
    config = {
        "model_type": "qwen2", "rms_norm_eps": 1e-6, "rope_theta": 1e4, "max_position_embeddings": 4096,
        "tie_word_embeddings": False, "hidden_act": "silu",
    }  # fmt: skip
    mesh = make_mesh(DEVICES, 1)
    model = CausalLM(ModelConfig.from_hf(config | sizes, where="test"), remat="full", scan_unroll=1, mesh=mesh)
    shapes = model.abstract_params()
    params = jax.tree.map(
        lambda leaf, place: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=place),
        shapes,
        shardings(mesh, model.logical_axes(), shapes),
    )
    spec = optim.SketchSpec(rank=rank, names=model.weight_names())
    train, frozen = spec.split(params)
    tx = optim.logra(spec, update_ratio=1e-4, preserve_norm=True, kl_budget=1e-4)
    whole, rows = NamedSharding(mesh, PartitionSpec()), batch_sharding(mesh)
    places = TrainState(jax.tree.map(lambda leaf: leaf.sharding, train), optim.state_shardings(tx, train), whole)
    state = jax.eval_shape(lambda train: TrainState(train, tx.init(train), jnp.zeros(())), train)
    state = jax.tree.map(lambda leaf, at: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=at), state, places)
    count = max(2 * DEVICES, probe)

    def array(shape, dtype, place=rows):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=place)

    batch = Batch(
        tokens=array((count, prompt + new), jnp.int32),
        prompt_lengths=array((count,), jnp.int32),
        lengths=array((count,), jnp.int32),
        stopped=array((count,), jnp.bool_),
        valid=array((count,), jnp.bool_),
        advantages=array((count,), jnp.float32),
        rollout_logprobs=array((count, new), jnp.float32),
        probe=array((probe,), jnp.int32, whole),
        check=array((), jnp.bool_, whole),
    )
    if packed:
        slots = array((2, DEVICES, prompt + new - 1), jnp.int32, NamedSharding(mesh, PartitionSpec(None, "fsdp")))
        batch = batch._replace(packing=Packing(slots, array((), jnp.int32, whole)))
    policy = Policy(model, sizes["vocab_size"], 1.0, prompt)
    update = make_update(policy, tx, spec, LossSettings(), micro_batch=DEVICES, state_shardings=places)
    memory = update.lower(state, frozen, batch).compile().memory_analysis()
    trained = sum(leaf.size for leaf in jax.tree.leaves(train)) * FLOAT // DEVICES
    assert memory.alias_size_in_bytes >= trained  # the new weights lie where the old ones did
    return memory.temp_size_in_bytes


def test_weights_are_never_held_twice():
    """A deep, narrow model: its stacks are larger than everything else together. In packed rows, whose passes are a
    loop of another kind."""
    depth, width, mlp = 512, 128, 512
    found = compiled_temporaries(
        prompt=8, new=8, vocab_size=64, hidden_size=width, intermediate_size=mlp, num_hidden_layers=depth,
        num_attention_heads=2, num_key_value_heads=1, packed=True,
    )  # fmt: skip
    assert found < depth * width * mlp * FLOAT / DEVICES


def test_weights_of_hybrid_models_are_never_held_twice():
    """A layer that is cut out of its stack before the remat policy is kept for the backward pass, and so are all."""
    depth, width, mlp = 256, 128, 512
    kinds = ["linear_attention"] * 3 + ["full_attention"]
    found = compiled_temporaries(
        prompt=8, new=8, vocab_size=64, hidden_size=width, intermediate_size=mlp, num_hidden_layers=depth,
        num_attention_heads=2, num_key_value_heads=1, head_dim=16, model_type="qwen3_5_text",
        layer_types=kinds * (depth // 4), linear_conv_kernel_dim=4, linear_key_head_dim=8, linear_value_head_dim=8,
        linear_num_key_heads=1, linear_num_value_heads=2,
        rope_parameters={"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5},
    )  # fmt: skip
    assert found < depth * width * mlp * FLOAT / DEVICES


def test_neither_logits_nor_scores_exist_for_all_tokens(monkeypatch):
    """A long row and a large vocabulary: one row's logits, or scores of all heads, are larger than the rest."""
    monkeypatch.setattr(loss, "CHUNK_ELEMENTS", 2**20)
    monkeypatch.setattr(layers, "QUERY_BLOCK", 128)
    prompt, new, vocab, heads = 768, 256, 32768, 8
    found = compiled_temporaries(
        prompt=prompt, new=new, vocab_size=vocab, hidden_size=64, intermediate_size=64, num_hidden_layers=2,
        num_attention_heads=heads, num_key_value_heads=heads,
    )  # fmt: skip
    assert new * vocab == heads * (prompt + new) ** 2
    assert found < new * vocab * FLOAT


def test_the_probe_takes_turns_as_the_gradient_does():
    """Eight rows per device: the MLP's values and tangents of all of them at once are larger than the rest."""
    prompt, new, mlp = 8, 248, 512
    found = compiled_temporaries(
        prompt=prompt, new=new, probe=8 * DEVICES, vocab_size=64, hidden_size=64, intermediate_size=mlp,
        num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1,
    )  # fmt: skip
    assert found < 8 * (prompt + new) * mlp * 2 * FLOAT
