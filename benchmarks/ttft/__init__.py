"""Time to first token from every tier, with the link to Redis at several rates; see `benchmarks.bench_ttft`."""
