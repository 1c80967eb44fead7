"""Reinforcement learning, one file per arrow of the loop in logra_jax/run.py ("answer", "response": a completion).

prompts, tasks, layouts, tokenizer      rows to learn from, and their token ids
engine                                  what draws answers: the sampler here (rollout, decoding, refill), or
                                        vLLM servers (vllm_engine, shared_engine; following keeps their weights)
ahead, dynamic_sampling                 answers drawn during the update before; groups that teach nothing replaced
reward, shared_grading                  their rewards, from workers that run grading: math_answer, math_equal,
                                        math_text and math_units for mathematics, verifier for Reasoning-Gym
advantage                               what a reward is compared with
batch, packing                          rows and passes
policy, loss, kl, update                log-probabilities, the loss, the divergence, the one jitted update
evaluate, intervals                     the same on held-out prompts, with confidence intervals
"""
