"""Parts of bench_capacity: filling a budget, a trace of conversations, its replay, report."""
