"""The benchmarks' machinery: rank groups, rounds, parts, report."""
