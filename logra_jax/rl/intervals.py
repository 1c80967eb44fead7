"""95 % confidence intervals of shares, where the answers to one prompt are no independent trials.

Prompts are taken for a random sample of all that could be asked, and answers to the same prompt for a cluster. With
h_i of n_i answers to prompt i right (or, with n_i = 1, a chance h_i in [0, 1]), the share p = sum h / sum n has the
clustered standard error (Miller, arXiv 2411.00640; the linearised variance of a ratio)

    e = sqrt(sum_i (h_i - p n_i)^2) / sum n

and as many answers as m = p (1 - p) / e^2 independent trials would have. The interval is Wilson's (J. Am. Stat. Assoc.
22, 1927) for m trials, as surveys do it (Franco et al., J. Surv. Stat. Methodol. 7, 2019). It stays within [0, 1], has
a width where all answers are right, and is Wilson's own, with m = n, where every prompt has one answer.
"""

import math
from collections.abc import Sequence

import numpy as np

Z = 1.959963984540054  # a normal variable is within +- Z of its mean in 95 % of all cases


def wilson(share: float, trials: float | int) -> tuple[float, float]:
    """Both ends of Wilson's interval: the x in [0, 1] with |share - x| <= Z sqrt(x (1 - x) / trials)."""
    middle = share + Z**2 / (2 * trials)
    half = Z * math.sqrt(share * (1 - share) / trials + (Z / (2 * trials)) ** 2)
    low, high = ((middle + side * half) / (1 + Z**2 / trials) for side in (-1, 1))
    return min(max(low, 0.0), share), max(min(high, 1.0), share)  # but for rounding, they are


def clustered_error(hits: np.ndarray, tries: np.ndarray) -> float:
    """e of the module's text, of hits and tries [N] by prompt."""
    total = tries.sum()
    return float(np.sqrt(np.sum((hits - hits.sum() / total * tries) ** 2)) / total)


def share_interval(hits: np.ndarray, tries: np.ndarray, answers: int | None = None) -> tuple[float, float]:
    """Interval of sum(hits) / sum(tries), both [N] by prompt, some of the tries above 0.

    answers: how many there are, where `tries` counts chances that were computed from them.
    """
    share, error = float(hits.sum() / tries.sum()), clustered_error(hits, tries)
    return _interval(share, error, int((tries > 0).sum()), int(tries.sum()) if answers is None else answers)


def mean_interval(groups: Sequence[tuple[np.ndarray, np.ndarray]]) -> tuple[float, float]:
    """Interval of the mean of the shares of groups of prompts, such as tasks; each as in `share_interval`.

    The groups are what they are, and only the prompts of each a random sample.
    """
    share = float(np.mean([hits.sum() / tries.sum() for hits, tries in groups]))
    error = float(np.linalg.norm([clustered_error(hits, tries) for hits, tries in groups])) / len(groups)
    prompts, answers = (sum(int(of(tries)) for _, tries in groups) for of in (np.count_nonzero, np.sum))
    return _interval(share, error, prompts, answers)


def _interval(share: float, error: float, prompts: int, answers: int) -> tuple[float, float]:
    """Wilson's, for as many trials as the standard error stands for, but for no more than there are answers.

    Where all are right, or all wrong, there is no error to tell from: the prompts are the trials.
    """
    spread = share * (1 - share)
    if spread <= 0:
        return wilson(share, prompts)
    return wilson(share, min(spread / error**2, answers) if error > 0 else answers)
