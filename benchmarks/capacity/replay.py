"""A trace against a store that evicts: how many tokens of the prompts it has."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.capacity.trace import Request
from tq_offload_connectors.byte_store import ByteStore

__all__ = ["Replayed", "replay"]


@dataclass(frozen=True)
class Replayed:
    """What a replay found.

    Args:
        prompt_tokens: Tokens of all prompts.
        hit_tokens: Those of whole chunks that the store had, from the first token on without a gap.
        puts: Chunks stored.
        held, held_bytes: Chunks and bytes in the store at the end.
    """

    prompt_tokens: int
    hit_tokens: int
    puts: int
    held: int
    held_bytes: int

    @property
    def hit_rate(self) -> float:
        """Share of the prompts' tokens that need not be computed."""
        return self.hit_tokens / self.prompt_tokens


def replay(trace: Sequence[Request], store: ByteStore, value: memoryview, chunk_tokens: int = 256) -> Replayed:
    """Replay, as the backend does: look up the prefix, read it, store the rest, count all as used, the first one last.

    Every chunk is the same ``value``, which a store in memory keeps uncopied: the store counts its length for each key.
    """
    hit_tokens = puts = 0
    for request in trace:
        keys = request.chunks
        found = store.contains_prefix(keys)
        for key in keys[:found]:
            if store.get(key) is None:
                raise ValueError(f"{key} was there and is not any more")
        for key in keys[found:]:
            store.put(key, value, owned=True)
        store.touch(keys[::-1])
        hit_tokens += found * chunk_tokens
        puts += len(keys) - found
    usage = store.usage()
    return Replayed(sum(request.tokens for request in trace), hit_tokens, puts, usage.entries, usage.nbytes)
