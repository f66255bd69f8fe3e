"""Tests of the benchmarks."""


def test_overtaken_fraction_matches_definition() -> None:
    import limiter as benchmark

    runs = [(0.0, 0.5), (0.001, 0.2), (0.01, 0.3), (0.4, 0.45), (0.9, 1.0)]
    assert benchmark.overtaken(runs) == 1 / 5
    by_definition = sum(any(other[0] > run[0] + 0.002 and other[1] < run[1] for other in runs) for run in runs)
    assert benchmark.overtaken(runs) == by_definition / len(runs)
