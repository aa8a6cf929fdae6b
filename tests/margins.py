"""How decisive the choices of a run were: a near tie may fall either way on another mesh, through rounding alone."""

import jax.numpy as jnp
import numpy as np
from models_on_mesh import full_logits

from jaxspec.engine.sequence import Sequence
from jaxspec.speculate.sampling import gumbel_noise


def smallest_margin(model: str, sequence: Sequence) -> float:
    """Least of: the gap between the two best scores, and the gaps at the edges of the filters, over all tokens.

    Scores are logits over the temperature; the edge of top-p is a gap in probability.
    """
    text = sequence.prompt + sequence.token_ids
    rows = full_logits(model, text)[len(sequence.prompt) - 1 : -1]
    return min(_margin(row, position, sequence) for position, row in enumerate(rows, start=len(sequence.prompt)))


def _margin(logits: np.ndarray, position: int, sequence: Sequence) -> float:
    params = sequence.params
    if params.is_greedy:
        second, first = np.sort(logits)[-2:]
        return float(first - second)
    scores = (logits - logits.max()).astype(np.float64) / params.temperature
    margins = []
    ordered = np.sort(scores)[::-1]
    if 0 < params.top_k < len(ordered):
        margins.append(ordered[params.top_k - 1] - ordered[params.top_k])
        scores = np.where(scores >= ordered[params.top_k - 1], scores, -np.inf)
        ordered = np.sort(scores)[::-1]
    if params.top_p < 1:
        mass = np.cumsum(np.exp(ordered)) / np.exp(ordered).sum()
        margins.append(np.abs(mass - params.top_p).min())
        scores = np.where(scores >= ordered[np.argmax(mass >= params.top_p)], scores, -np.inf)
    if params.min_p > 0:
        margins.append(np.abs(ordered[np.isfinite(ordered)] - np.log(params.min_p)).min())
        scores = np.where(scores >= np.log(params.min_p), scores, -np.inf)
    seed = jnp.array([sequence.seed & 0xFFFFFFFF, sequence.seed >> 32], jnp.uint32)
    noisy = np.sort(scores + np.asarray(gumbel_noise(seed[None], jnp.array([position]), jnp.arange(len(scores))))[0])
    return float(min([*margins, noisy[-1] - noisy[-2]]))
