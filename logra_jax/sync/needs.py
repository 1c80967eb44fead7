"""What a run asks of a server, held against what the server says of itself: before anything is trained."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from logra_jax.errors import UserError
from logra_jax.sync.client import Client

TESTED = "0.32"  # releases of vLLM that sync was tried with
# Of a config.json: what makes another model of the same tensors, or tensors of other shapes.
SIZES = (
    "model_type", "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
    "num_key_value_heads", "head_dim", "rms_norm_eps",
)  # fmt: skip


@dataclass(frozen=True)
class Needs:
    """Of all servers of a run.

    Args:
      prompt, answer: most tokens of each.
      answers: to one prompt.
      model: the trainer's `config.json`.
    """

    prompt: int
    answer: int
    answers: int
    model: Mapping[str, Any]

    def check(self, client: Client) -> str:
        """The version of the server's vLLM.

        Raises:
          UserError: it does not answer, was not started for this, serves another model, or takes too little.
        """
        longest, facts = client.longest(), client.describe()
        if longest < self.prompt + self.answer:
            raise UserError(
                f"{client.url} takes {longest} tokens (--max-model-len), and the longest prompt and answer have "
                f"{self.prompt} + {self.answer}: start it with {self.prompt + self.answer}, or lower "
                "rollout.max_new_tokens or data.max_prompt_length"
            )
        if facts["max_num_seqs"] < self.answers:
            raise UserError(
                f"{client.url} answers {facts['max_num_seqs']} times at once (--max-num-seqs), and a prompt is asked "
                f"for {self.answers} answers: start it with {self.answers}, or lower rollout.generations"
            )
        # vLLM takes a seeded request's noise back after a piece of its prompt; generators of a CPU cannot, and it ends.
        if facts["cpu"] and 0 < facts["piece"] < facts["max_num_seqs"] * self.prompt:
            raise UserError(
                f"{client.url} runs on a CPU and may process a prompt in pieces, upon which vLLM fails: start it with "
                "--no-enable-chunked-prefill (vllm.arguments)"
            )
        if facts["cpu"] and "linear_num_key_heads" in self.model:
            raise UserError(
                f"{client.url} runs on a CPU, where vLLM {TESTED} fails at the first request for a hybrid model: serve "
                "it on GPUs, or set rollout.engine=jax"
            )
        served = facts["model"]
        here, there = _theta(self.model), _theta(served)
        other = [
            f"{name} {served[name]}, not {self.model[name]}" for name in SIZES if _differ(self.model, served, name)
        ]
        if other or (here and there and here != there):
            other = other or [f"rope_theta {there}, not {here}"]
            raise UserError(f"{client.url} serves another model, of {'; '.join(other)}: start it with the one to train")
        return str(facts["vllm"])


def _differ(one: Mapping[str, Any], other: Mapping[str, Any], name: str) -> bool:
    """Whether both say something of it, and not the same."""
    return None not in (one.get(name), other.get(name)) and one[name] != other[name]


def _theta(config: Mapping[str, Any]) -> Any:
    return (config.get("rope_parameters") or config).get("rope_theta")


def tested(version: str) -> bool:
    """Whether sync was tried with this release of vLLM."""
    return version.split(".")[:2] == TESTED.split(".")
