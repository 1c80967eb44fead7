"""Policy sync to vLLM servers: a new policy travels as the factors and the seed of its update (arXiv 2610.06647).

    blob        one update as a checked file or message          client      one server: tokens, syncs, full reloads
    weights     applies it to a model's own tensors (torch)       server      starts one on this machine
    extension   the same inside vLLM's workers                    pool        several of them
    needs       what a run asks of a server                       keeper      ends it when the trainer is gone

Neither jax nor flax is imported anywhere in here, and torch only in `weights` and `extension`: workers have one
environment, the trainer another.
"""
