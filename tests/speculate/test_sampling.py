"""The target's token against sorting, exact probabilities and a hash written out, however the vocabulary is split."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.special
import scipy.stats
from jax.sharding import PartitionSpec as P

from jaxspec.mesh import AXES, MODEL_AXES, MeshShape, make_mesh
from jaxspec.speculate.sampling import (
    SamplingRows,
    _local_top_k,
    draft_scores,
    filter_threshold,
    gumbel_noise,
    largest_threshold,
    split_argmax,
    split_top_k,
    target_tokens,
)

LEAST_P_VALUE = 1e-4
# One to eight shards; over all axes too, as a tail that is spread over the stages has it.
SPLITS = [
    (MeshShape(1, 1, 1), MODEL_AXES),
    (MeshShape(1, 2, 1), MODEL_AXES),
    (MeshShape(1, 2, 2), MODEL_AXES),
    (MeshShape(2, 2, 1), AXES),
    (MeshShape(2, 2, 2), AXES),
]
SHARDED = pytest.mark.parametrize("split", SPLITS, ids=lambda split: f"{split[0]}-{'+'.join(split[1])}")
ONE_DEVICE = SPLITS[0]


@functools.cache
def jitted_tokens(split, vocab_size: int, is_greedy: bool = False):
    mesh, axes = split
    return jax.jit(
        jax.shard_map(
            lambda logits, positions, rows: target_tokens(
                logits, positions, rows, vocab_size=vocab_size, axes=axes, is_greedy=is_greedy
            ),
            mesh=make_mesh(mesh),
            in_specs=(P(None, None, axes), P(), P()),
            out_specs=P(),
            check_vma=False,
        )
    )


@functools.cache
def jitted_threshold(split):
    mesh, axes = split
    return jax.jit(
        jax.shard_map(
            functools.partial(filter_threshold, axes=axes),
            mesh=make_mesh(mesh),
            in_specs=(P(None, None, axes), P()),
            out_specs=P(),
            check_vma=False,
        )
    )


@functools.cache
def jitted_search(split):
    mesh, axes = split
    by_key = P(None, None, axes)
    return jax.jit(
        jax.shard_map(
            functools.partial(largest_threshold, axes=axes),
            mesh=make_mesh(mesh),
            in_specs=(by_key, by_key, P()),
            out_specs=P(),
            check_vma=False,
        )
    )


@functools.cache
def jitted_top_k(split, k: int):
    mesh, axes = split
    return jax.jit(
        jax.shard_map(
            lambda scores, ids: split_top_k(scores, ids, k, axes),
            mesh=make_mesh(mesh),
            in_specs=(P(None, axes), P(axes)),
            out_specs=P(),
            check_vma=False,
        )
    )


def make_rows(count: int, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0, seed: int = 0) -> SamplingRows:
    """Rows of different seeds; each parameter is one value or one a row."""

    def fill(value, dtype):
        return np.broadcast_to(np.asarray(value, dtype), (count,)).copy()

    return SamplingRows(
        temperature=fill(temperature, np.float32),
        top_p=fill(top_p, np.float32),
        min_p=fill(min_p, np.float32),
        top_k=fill(top_k, np.int32),
        seed=np.random.default_rng(seed).integers(0, 2**32, (count, 2), np.uint32),
    )


def kept_tokens(scaled: np.ndarray, top_k: int, top_p: float, min_p: float, margin: float) -> np.ndarray:
    """Which tokens of one row of log weights stay, by sorting, in float64.

    No cut of top-p or min-p may be nearer than `margin` to any token, so that rounding can't matter.
    """
    scaled = scaled.astype(np.float64)
    is_kept = np.ones(len(scaled), bool)
    if top_k > 0:
        is_kept &= scaled >= np.sort(scaled)[::-1][min(top_k, len(scaled)) - 1]
    if top_p < 1:
        candidates = np.sort(scaled[is_kept])[::-1]
        probabilities = np.exp(candidates - scaled.max()) / np.sum(np.exp(candidates - scaled.max()))
        reached = np.cumsum(probabilities)
        assert np.min(np.abs(reached[:-1] - top_p), initial=1.0) > margin
        is_kept &= scaled >= candidates[np.argmax(reached >= top_p)]
    if min_p > 0:
        ratios = np.exp(scaled - scaled.max())
        assert min_p == 1 or np.min(np.abs(ratios - min_p)) > margin
        is_kept &= ratios >= min_p
    return is_kept


FILTERS = {
    "none": {},
    "top_k_1": {"top_k": 1},
    "top_k_5": {"top_k": 5},
    "top_k_beyond_the_vocabulary": {"top_k": 1000},
    "top_p": {"top_p": 0.8},
    "top_p_tiny": {"top_p": 1e-6},
    "min_p": {"min_p": 0.1},
    "min_p_1": {"min_p": 1.0},
    "top_k_and_top_p": {"top_k": 6, "top_p": 0.7},
    "top_p_and_min_p": {"top_p": 0.9, "min_p": 0.03},
    "all": {"top_k": 12, "top_p": 0.9, "min_p": 0.06},
}


@SHARDED
def test_the_threshold_is_the_largest_key_at_which_the_sorted_weights_suffice(split):
    random = np.random.default_rng(0)
    keys = random.integers(0, 2**32, (20, 2, 16), np.uint32)
    keys[::2] = random.choice(keys[0, 0, :4], (10, 2, 16))  # many equal ones
    weights = random.integers(0, 10, keys.shape).astype(np.float32)  # sums are exact
    need = random.integers(1, 90, keys.shape[:2]).astype(np.float32)
    found = np.asarray(jitted_search(split)(keys, weights, need))
    for b, t in np.ndindex(need.shape):
        expected = 0
        for key in sorted(set(keys[b, t].tolist()), reverse=True):
            if np.sum(weights[b, t][keys[b, t] >= key]) >= need[b, t]:
                expected = key
                break
        assert found[b, t] == expected
    assert np.any(found == 0) and np.any(found != 0)


@pytest.mark.parametrize("parameters", FILTERS.values(), ids=FILTERS)
def test_filters_keep_what_sorting_keeps(parameters):
    batch, vocab = 60, 32
    scaled = 2 * np.random.default_rng(10).standard_normal((batch, 1, vocab)).astype(np.float32)
    scaled -= np.max(scaled, axis=-1, keepdims=True)
    rows = jax.tree.map(lambda x: x[:, None], make_rows(batch, **parameters))
    for split in (ONE_DEVICE, SPLITS[-1]):
        kept = scaled >= np.asarray(jitted_threshold(split)(scaled, rows))
        for b in range(batch):
            expected = kept_tokens(scaled[b, 0], **{"top_k": 0, "top_p": 1.0, "min_p": 0.0} | parameters, margin=1e-6)
            np.testing.assert_array_equal(kept[b, 0], expected)


def test_top_p_counts_the_mass_that_top_k_left():
    # Of 0.4 0.3 0.2 0.1 top-k leaves 4/7 and 3/7, so half of it is the first alone; without top-k that is 0.4 only.
    scaled = np.log(np.array([[[1.0, 3 / 4, 2 / 4, 1 / 4] + [1e-9] * 28]], np.float32))
    together = jax.tree.map(lambda x: x[:, None], make_rows(1, top_k=2, top_p=0.5))
    alone = jax.tree.map(lambda x: x[:, None], make_rows(1, top_p=0.5))
    assert np.sum(scaled >= np.asarray(jitted_threshold(ONE_DEVICE)(scaled, together))) == 1
    assert np.sum(scaled >= np.asarray(jitted_threshold(ONE_DEVICE)(scaled, alone))) == 2


@pytest.mark.parametrize("parameters", [{"top_k": 2}, {"top_p": 0.5}, {"min_p": 1.0}], ids=str)
def test_tokens_that_tie_at_the_cut_all_stay(parameters):
    scaled = np.full((1, 1, 32), -20, np.float32)
    scaled[..., [3, 8, 20]] = 0
    rows = jax.tree.map(lambda x: x[:, None], make_rows(1, **parameters))
    kept = scaled >= np.asarray(jitted_threshold(ONE_DEVICE)(scaled, rows))
    assert list(np.flatnonzero(kept)) == [3, 8, 20]


BATCH, NODES, PADDED_VOCAB, VOCAB = 64, 2, 56, 45


def draw_mixed_batch():
    """Rows with all kinds of parameters over a vocabulary whose last eighth is nothing but padding."""
    random = np.random.default_rng(2)
    logits = 3 * random.standard_normal((BATCH, NODES, PADDED_VOCAB)).astype(np.float32)
    logits[..., VOCAB:] = 1e9
    positions = random.integers(0, 5000, (BATCH, NODES)).astype(np.int32)
    rows = make_rows(
        BATCH,
        temperature=random.choice([0.0, 1e-3, 0.5, 1.0, 2.0, 100.0], BATCH),
        top_k=random.choice([-1, 0, 1, 7, 50, 1000], BATCH),
        top_p=random.choice([1.0, 0.95, 0.5, 1e-5], BATCH),
        min_p=random.choice([0.0, 0.05, 1.0], BATCH, p=[0.6, 0.3, 0.1]),
        seed=3,
    )
    return logits, positions, rows


@SHARDED
def test_tokens_are_the_same_however_the_vocabulary_is_split(split):
    inputs = draw_mixed_batch()
    expected = jitted_tokens(ONE_DEVICE, VOCAB)(*inputs)
    np.testing.assert_array_equal(jitted_tokens(split, VOCAB)(*inputs), expected)
    assert len(np.unique(expected)) > 20


@SHARDED
@pytest.mark.parametrize("is_greedy", [False, True], ids=["sampled", "greedy"])
def test_padded_ids_are_never_chosen(split, is_greedy):
    logits, positions, rows = draw_mixed_batch()
    for padding in (1e9, np.nan, np.inf):
        logits[..., VOCAB:] = padding
        tokens = jitted_tokens(split, VOCAB, is_greedy)(logits, positions, rows)
        assert np.all((np.asarray(tokens) >= 0) & (np.asarray(tokens) < VOCAB))


@SHARDED
@pytest.mark.parametrize("is_greedy", [False, True], ids=["mixed", "all_greedy"])
def test_a_temperature_of_zero_takes_the_largest_logit(split, is_greedy):
    logits, positions, rows = draw_mixed_batch()
    tokens = np.asarray(jitted_tokens(split, VOCAB, is_greedy)(logits, positions, rows))
    is_checked = np.ones(BATCH, bool) if is_greedy else rows.temperature == 0
    assert np.sum(is_checked) >= 5
    np.testing.assert_array_equal(tokens[is_checked], np.argmax(logits[is_checked, :, :VOCAB], axis=-1))


@SHARDED
@pytest.mark.parametrize("is_greedy", [False, True], ids=["mixed", "all_greedy"])
def test_of_equal_logits_the_lowest_id_is_taken(split, is_greedy):
    logits, positions, rows = draw_mixed_batch()
    rows.temperature[:] = 0
    logits[: BATCH // 2, :, :VOCAB] = np.round(logits[: BATCH // 2, :, :VOCAB] / 4)
    logits[BATCH // 2 :, :, :VOCAB] = 0.25
    tokens = np.asarray(jitted_tokens(split, VOCAB, is_greedy)(logits, positions, rows))
    np.testing.assert_array_equal(tokens, np.argmax(logits[..., :VOCAB], axis=-1))
    assert np.all(tokens[BATCH // 2 :] == 0)


@pytest.mark.parametrize(
    "parameters",
    [{"top_k": 1}, {"top_p": 1e-6}, {"min_p": 1.0}, {"temperature": 1e-3}, {"temperature": 100.0, "top_k": 1}],
    ids=str,
)
def test_parameters_that_leave_one_token_take_the_largest_logit(parameters):
    random = np.random.default_rng(4)
    # A step of at least 0.5 to the next: 500 at the least temperature, and no noise exceeds 23.
    logits = random.permuted(np.tile(np.arange(PADDED_VOCAB) / 2, (BATCH, NODES, 1)), axis=-1).astype(np.float32)
    _, positions, _ = draw_mixed_batch()
    tokens = jitted_tokens(ONE_DEVICE, VOCAB)(logits, positions, make_rows(BATCH, **parameters))
    np.testing.assert_array_equal(tokens, np.argmax(logits[..., :VOCAB], axis=-1))


@pytest.mark.parametrize("top_p", [1e-38, 1e-50])
def test_a_top_p_below_the_least_float_leaves_the_largest_logit(top_p):
    logits, positions, _ = draw_mixed_batch()
    tokens = jitted_tokens(ONE_DEVICE, VOCAB)(logits, positions, make_rows(BATCH, top_p=top_p))
    np.testing.assert_array_equal(tokens, np.argmax(logits[..., :VOCAB], axis=-1))


def test_logits_that_differ_by_a_constant_give_the_same_tokens():
    logits, positions, rows = draw_mixed_batch()
    logits = np.round(logits * 8) / 8  # so that the sum below is exact
    expected = jitted_tokens(ONE_DEVICE, VOCAB)(logits, positions, rows)
    np.testing.assert_array_equal(jitted_tokens(ONE_DEVICE, VOCAB)(logits - 1024, positions, rows), expected)


def test_a_token_depends_on_no_other_row():
    logits, positions, rows = draw_mixed_batch()
    expected = np.asarray(jitted_tokens(ONE_DEVICE, VOCAB)(logits, positions, rows))
    order = np.random.default_rng(5).permutation(BATCH)
    shuffled = jitted_tokens(ONE_DEVICE, VOCAB)(logits[order], positions[order], jax.tree.map(lambda x: x[order], rows))
    np.testing.assert_array_equal(shuffled, expected[order])


def threefry(key: tuple[int, int], counter: tuple[int, int]) -> int:
    """First word of Threefry-2x32 with 20 rounds (Salmon et al. 2011)."""
    mask = 2**32 - 1
    keys = [key[0], key[1], 0x1BD11BDA ^ key[0] ^ key[1]]
    x, y = (counter[0] + keys[0]) & mask, (counter[1] + keys[1]) & mask
    for step in range(20):
        rotation = (13, 15, 26, 6, 17, 29, 16, 24)[step % 8]
        x = (x + y) & mask
        y = (y << rotation | y >> (32 - rotation)) & mask ^ x
        if step % 4 == 3:
            turn = step // 4 + 1
            x, y = (x + keys[turn % 3]) & mask, (y + keys[(turn + 1) % 3] + turn) & mask
    return x


def test_the_hash_of_this_file_gives_the_published_answers():
    assert threefry((0, 0), (0, 0)) == 0x6B200159
    assert threefry((2**32 - 1,) * 2, (2**32 - 1,) * 2) == 0x1CB996FC


def test_noise_is_a_hash_of_seed_position_and_token_id():
    random = np.random.default_rng(6)
    seed = random.integers(0, 2**32, (6, 2), np.uint32)
    seed[0], seed[1] = 0, 2**32 - 1
    positions = random.integers(0, 2**20, 6).astype(np.int32)
    ids = np.array([0, 1, 2, 31999, 151935], np.int32)
    noise = np.asarray(gumbel_noise(seed, positions, ids))
    for row, column in np.ndindex(noise.shape):
        bits = threefry(tuple(seed[row].tolist()), (int(positions[row]), int(ids[column])))
        uniform = min((bits + 0.5) * 2.0**-32, 1 - 2.0**-24)
        # A uniform near 1 is rounded to 2^-24 in float32: the noise there is small and coarse.
        np.testing.assert_allclose(noise[row, column], -np.log(-np.log1p(-uniform)), rtol=1e-4, atol=1e-5)


@SHARDED
def test_every_shard_has_the_noise_of_its_own_ids(split):
    mesh, axes = split
    seed, position = np.array([[1, 2]], np.uint32), np.array([77], np.int32)
    ids = np.arange(64, dtype=np.int32)
    noise = jax.shard_map(
        gumbel_noise, mesh=make_mesh(mesh), in_specs=(P(), P(), P(axes)), out_specs=P(None, axes), check_vma=False
    )(seed, position, ids)
    np.testing.assert_array_equal(noise, gumbel_noise(seed, position, ids))
    shards = np.asarray(noise).reshape(mesh.size, -1)
    assert len(np.unique(shards, axis=0)) == mesh.size


def test_positions_and_seeds_have_different_noise():
    seed = np.array([[1, 2], [1, 2], [1, 3], [2, 2], [2, 1]], np.uint32)
    noise = np.asarray(gumbel_noise(seed, np.array([5, 6, 5, 5, 5]), np.arange(50)))
    assert len(np.unique(noise)) == noise.size


@pytest.mark.parametrize("axis", ["ids", "positions", "seeds"])
def test_noise_is_gumbel_along_ids_positions_and_seeds(axis):
    """100,000 values: Kolmogorov-Smirnov, and mean and variance within five standard errors."""
    count = 100_000
    index = np.arange(count)
    if axis == "ids":
        noise = gumbel_noise(np.array([[3, 4]], np.uint32), np.array([100]), index)
    elif axis == "positions":
        noise = gumbel_noise(np.tile(np.array([3, 4], np.uint32), (count, 1)), index, np.array([7]))
    else:
        noise = gumbel_noise(np.stack([index, index * 0], axis=1).astype(np.uint32), index * 0 + 9, np.array([7]))
    noise = np.asarray(noise, np.float64).ravel()
    assert len(noise) == count
    assert scipy.stats.kstest(noise, "gumbel_r").pvalue > LEAST_P_VALUE
    mean, variance = np.euler_gamma, np.pi**2 / 6
    assert abs(np.mean(noise) - mean) < 5 * np.sqrt(variance / count)
    # The fourth central moment is 27/5 of the variance squared.
    assert abs(np.var(noise) - variance) < 5 * variance * np.sqrt((27 / 5 - 1) / count)


def test_noise_of_neighbouring_ids_and_positions_is_uncorrelated():
    """40,000 pairs each; five standard errors."""
    noise = np.asarray(gumbel_noise(np.tile(np.array([3, 4], np.uint32), (200, 1)), np.arange(200), np.arange(201)))
    for first, second in ((noise[:, 1:], noise[:, :-1]), (noise[1:], noise[:-1])):
        correlation = np.corrcoef(first.ravel(), second.ravel())[0, 1]
        assert abs(correlation) < 5 / np.sqrt(first.size)


DRAWS = 20_000
# Probabilities at temperature 1, no two of them equal.
LOGITS = np.log(np.array([0.30, 0.21, 0.16, 0.12, 0.09, 0.06, 0.04, 0.02], np.float32))
DISTRIBUTIONS = {
    "plain": {},
    "cold": {"temperature": 0.6},
    "hot": {"temperature": 3.0},
    "hottest": {"temperature": 100.0},
    "top_k": {"top_k": 3},
    "top_p": {"top_p": 0.75},
    "min_p": {"min_p": 0.25},
    "top_k_and_top_p": {"top_k": 6, "top_p": 0.8},
    "hot_top_k_and_min_p": {"temperature": 2.0, "top_k": 7, "min_p": 0.5},
    "all": {"temperature": 1.5, "top_k": 7, "top_p": 0.9, "min_p": 0.3},
}


def exact_distribution(temperature=1.0, top_k=0, top_p=1.0, min_p=0.0) -> np.ndarray:
    scaled = (LOGITS.astype(np.float64) - LOGITS.max()) / temperature
    weights = np.where(kept_tokens(scaled, top_k, top_p, min_p, margin=1e-3), np.exp(scaled), 0)
    return weights / weights.sum()


def assert_drawn_from(tokens: np.ndarray, expected: np.ndarray) -> None:
    counts = np.bincount(tokens.ravel(), minlength=len(expected))
    assert not np.any(counts[expected == 0])
    is_possible = expected > 0
    result = scipy.stats.chisquare(counts[is_possible], tokens.size * expected[is_possible])
    assert result.pvalue > LEAST_P_VALUE


@pytest.mark.parametrize("parameters", DISTRIBUTIONS.values(), ids=DISTRIBUTIONS)
def test_tokens_over_many_seeds_follow_the_filtered_softmax(parameters):
    """20,000 seeds at one position, chi-squared."""
    # Ids are shuffled so that the order of the probabilities is not the order of the ids.
    order = np.random.default_rng(7).permutation(8)
    logits = np.tile(LOGITS[order], (DRAWS, 1, 1))
    tokens = jitted_tokens(ONE_DEVICE, 8)(logits, np.full((DRAWS, 1), 12), make_rows(DRAWS, **parameters))
    assert_drawn_from(np.asarray(tokens), exact_distribution(**parameters)[order])


def test_tokens_over_many_positions_of_one_seed_follow_the_softmax():
    """20,000 positions, chi-squared; the pairs of neighbours are independent too."""
    rows = jax.tree.map(lambda x: np.repeat(x[:1], DRAWS, axis=0), make_rows(DRAWS, seed=8))
    positions = np.arange(DRAWS)[:, None]
    tokens = np.asarray(jitted_tokens(ONE_DEVICE, 8)(np.tile(LOGITS, (DRAWS, 1, 1)), positions, rows)).ravel()
    expected = exact_distribution()
    assert_drawn_from(tokens, expected)
    assert_drawn_from(tokens[0::2] * 8 + tokens[1::2], np.outer(expected, expected).ravel())


def test_a_vocabulary_split_over_eight_devices_is_sampled_from_the_same_distribution():
    """20,000 seeds, one token a device, chi-squared."""
    parameters = DISTRIBUTIONS["all"]
    logits = np.tile(LOGITS, (DRAWS, 1, 1))
    tokens = jitted_tokens(SPLITS[-1], 8)(logits, np.full((DRAWS, 1), 12), make_rows(DRAWS, **parameters, seed=9))
    assert_drawn_from(np.asarray(tokens), exact_distribution(**parameters))


def test_filters_see_bfloat16_logits_as_float32():
    logits, positions, rows = draw_mixed_batch()
    narrow = jnp.asarray(logits, jnp.bfloat16)
    expected = jitted_tokens(ONE_DEVICE, VOCAB)(np.asarray(narrow, np.float32), positions, rows)
    np.testing.assert_array_equal(jitted_tokens(ONE_DEVICE, VOCAB)(narrow, positions, rows), expected)


TOP_K_VOCAB = 64
TOP_K_IDS = 3 * np.arange(TOP_K_VOCAB, dtype=np.int32) + 1


def draw_scores() -> np.ndarray:
    """Rows without ties, with many, with one score alone, with few or no finite ones; all with padding at the end."""
    random = np.random.default_rng(11)
    scores = 3 * random.standard_normal((50, TOP_K_VOCAB)).astype(np.float32)
    scores[10:20] = np.round(scores[10:20] / 3) + 0.0  # no -0, which ranks below 0
    scores[20:30] = 0.25
    scores[30:40][random.random((10, TOP_K_VOCAB)) < 0.8] = -np.inf
    scores[40:45, 1:] = -np.inf
    scores[45:47] = -np.inf
    scores[47:, random.integers(0, 50, 3)] = 60.0  # so large that its log-probability is rounded to 0
    scores[:, 60:] = -np.inf
    return scores


def slow_top_k(scores: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray]:
    """Ids and log-probabilities of one row by sorting, in float64; ids of -1 where no finite score is left."""
    best = np.argsort(-scores, kind="stable")[:k]
    best = best[np.isfinite(scores[best])]
    ids, log_probs = np.full(k, -1), np.full(k, -np.inf)
    ids[: len(best)] = TOP_K_IDS[best]
    log_probs[: len(best)] = scores[best] - scipy.special.logsumexp(scores.astype(np.float64)) if len(best) else 0
    return ids, log_probs


@SHARDED
@pytest.mark.parametrize("k", [1, 3, 16, 17, 40, 70])
def test_the_k_best_over_all_shards_are_those_of_sorting_with_their_log_probabilities(split, k):
    scores = draw_scores()
    ids, log_probs = (np.asarray(x) for x in jitted_top_k(split, k)(scores, TOP_K_IDS))
    assert ids.shape == log_probs.shape == (len(scores), k)
    assert np.all(log_probs <= 0)
    for row in range(len(scores)):
        expected_ids, expected_log_probs = slow_top_k(scores[row], k)
        np.testing.assert_array_equal(ids[row], expected_ids)
        np.testing.assert_allclose(log_probs[row], expected_log_probs, rtol=1e-5, atol=1e-5)


def test_scores_that_are_no_numbers_rank_no_token():
    scores = draw_scores()
    scores[:3, 7], scores[3, 50] = np.nan, np.inf
    ids, log_probs = (np.asarray(x) for x in jitted_top_k(SPLITS[2], 3)(scores, TOP_K_IDS))
    assert np.all(ids[:4] == -1) and np.all(log_probs[:4] == -np.inf)
    assert np.all(ids[4:20] >= 0) and not np.any(np.isnan(log_probs))


def test_children_are_found_without_a_sort_of_the_vocabulary():
    """A GPU sorts whatever more than 16 are wanted of, and takes as long for few as for 16."""
    vocab = 64_000
    for k in (2, 16, 40):
        text = jitted_top_k(SPLITS[2], k).lower(np.zeros((2, vocab), np.float32), np.arange(vocab)).as_text()
        sizes = [int(size) for size in re.findall(r"top_k\(.*k = \d+\) : tensor<2x(\d+)xf32>", text)]
        assert len(sizes) == 3 and max(sizes) < vocab / 4 / 10


@pytest.mark.parametrize("k", [2, 16, 40])
@pytest.mark.parametrize("vocab", [1025, 5000, 16_384])
def test_the_best_groups_of_a_long_vocabulary_hold_the_k_best(vocab, k):
    random = np.random.default_rng(vocab + k)
    scores = random.standard_normal((8, vocab)).astype(np.float32)
    scores[2:4] = np.round(scores[2:4]) + 0.0
    scores[4, 5:] = -np.inf
    scores[5, -100:] = np.sort(scores[5])[-100:]  # the best all in neighbouring groups
    scores[6] = 0.5
    values, places = (np.asarray(x) for x in jax.jit(_local_top_k, static_argnums=1)(scores, k))
    for row in range(len(scores)):
        expected = np.argsort(-scores[row], kind="stable")[:k]
        finite = np.isfinite(scores[row][expected])
        np.testing.assert_array_equal(places[row][finite], expected[finite])
        np.testing.assert_array_equal(values[row], scores[row][expected])


def test_a_shard_tells_all_that_it_has_found_in_one_collective():
    mesh, axes = SPLITS[2]

    def argmax(scores, ids):
        return split_argmax(scores, ids, axes)

    jitted_argmax = jax.jit(
        jax.shard_map(argmax, mesh=make_mesh(mesh), in_specs=(P(None, axes), P(axes)), out_specs=P(), check_vma=False)
    )
    for program in (jitted_argmax, jitted_top_k(SPLITS[2], 3), jitted_top_k(SPLITS[2], 40)):
        text = program.lower(draw_scores(), TOP_K_IDS).as_text()
        assert text.count("stablehlo.all_gather") == 1
        assert not re.search(r"stablehlo\.(all_reduce|all_to_all|collective)", text)


def test_a_draft_has_the_noise_that_the_target_has_at_the_same_seed_position_and_id():
    logits, positions, rows = draw_mixed_batch()
    rows = jax.tree.map(lambda x: np.repeat(x[:, None], NODES, axis=1), rows)
    ids = 700 * np.arange(PADDED_VOCAB, dtype=np.int32)
    scores = np.asarray(draft_scores(logits, ids, positions, rows))
    noisy = logits / np.maximum(rows.temperature, 1e-9)[..., None] + gumbel_noise(rows.seed, positions, ids)
    is_sampled = rows.temperature > 0
    np.testing.assert_allclose(scores[is_sampled], noisy[is_sampled], rtol=1e-6)
    np.testing.assert_array_equal(scores[~is_sampled], logits[~is_sampled])


@SHARDED
def test_the_best_token_of_a_draft_with_the_targets_logits_is_the_targets(split):
    logits, positions, rows = draw_mixed_batch()
    rows = make_rows(BATCH, temperature=np.where(rows.temperature < 0.1, 0, rows.temperature), seed=3)
    mesh, axes = split

    def best(logits, ids, positions, rows):
        logits = jnp.where(ids < VOCAB, logits, -jnp.inf)
        rows = jax.tree.map(lambda x: jnp.repeat(x[:, None], NODES, axis=1), rows)
        return split_top_k(draft_scores(logits, ids, positions, rows), ids, 1, axes)[0]

    drafted = jax.jit(
        jax.shard_map(
            best,
            mesh=make_mesh(mesh),
            in_specs=(P(None, None, axes), P(axes), P(), P()),
            out_specs=P(),
            check_vma=False,
        )
    )(logits, np.arange(PADDED_VOCAB), positions, rows)
    np.testing.assert_array_equal(drafted[..., 0], jitted_tokens(split, VOCAB)(logits, positions, rows))
