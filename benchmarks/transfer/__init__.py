"""Parts of bench_transfer: chunks, the places they go to, the ways they go there, rounds, report."""
