"""Cases for tests over many factors: a cover of all pairs of values, or with `--full` every combination."""

import itertools

import pytest


def parametrize(metafunc: pytest.Metafunc, factors: dict[str, list]) -> None:
    """Gives a test that takes `case` one dictionary a case; those of a mesh follow each other."""
    if "case" not in metafunc.fixturenames:
        return
    cases = all_cases(factors) if metafunc.config.getoption("--full") else pairwise_cover(factors)
    cases.sort(key=lambda case: (case["model"], case["mesh"]))
    metafunc.parametrize("case", cases, ids=["-".join(_name(value) for value in case.values()) for case in cases])


def _name(value: object) -> str:
    return getattr(value, "__name__", None) or str(value)


def pairwise_cover(factors: dict[str, list]) -> list[dict]:
    """Cases in which every pair of values of two factors meets, chosen greedily."""
    names = list(factors)
    pairs = {
        (a, i, b, j)
        for a, b in itertools.combinations(names, 2)
        for i in range(len(factors[a]))
        for j in range(len(factors[b]))
    }
    product = list(itertools.product(*(range(len(factors[name])) for name in names)))

    def covered(case):
        at = dict(zip(names, case, strict=True))
        return {(a, at[a], b, at[b]) for a, b in itertools.combinations(names, 2)}

    cases = []
    while pairs:
        best = max(product, key=lambda case: len(covered(case) & pairs))
        pairs -= covered(best)
        cases.append(best)
    return [{name: factors[name][i] for name, i in zip(names, case, strict=True)} for case in cases]


def all_cases(factors: dict[str, list]) -> list[dict]:
    return [dict(zip(factors, values, strict=True)) for values in itertools.product(*factors.values())]
