"""Parts of bench_growth: what is measured, its times in rounds, its memory in a process of its own, fits, report."""
