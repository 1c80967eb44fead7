import jax
import jax.numpy as jnp
import optax
import logra_jax as lj

x = jax.random.normal(jax.random.key(0), (256, 32))
y = jnp.argmax(x[:, :4], axis=-1)
params = {"hidden": jax.random.normal(jax.random.key(1), (32, 64)) / 6, "out": jnp.zeros((64, 4))}
logits = lambda params: jnp.tanh(x @ params["hidden"]) @ params["out"]
loss = lambda params: optax.softmax_cross_entropy_with_integer_labels(logits(params), y).mean()

spec = lj.SketchSpec(rank=8, targets=("hidden", "out"))  # regular expressions on weight names
tx = optax.chain(
    lj.sketch(spec), lj.scale_by_row_adam(preserve_norm=True), lj.scale_by_update_ratio(2e-2, spec),
    lj.scale_by_predicted_kl(budget=1e-2), lj.lift(spec),
)

@jax.jit
def step(params, state):
    count = lj.sketch_count(state)
    value, grads = lj.sketched_value_and_grad(loss, spec)(params, step=count)
    kl = lj.predict_kl(logits, params, spec, step=count, mask=jnp.ones(len(x)))
    updates, state = tx.update(grads, state, params, predict_kl=kl)
    return lj.apply_updates(params, updates), state, value

state = tx.init(params)
for i in range(101):
    params, state, value = step(params, state)
    print(f"{i}: loss {value:.4f}, alpha {lj.kl_link(state).alpha:.2f}")
