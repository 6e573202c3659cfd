"""The trace of conversations and its replay: the same seed, the same trace; hits are what the store serves."""

from __future__ import annotations

import itertools
from dataclasses import replace

from benchmarks.capacity.replay import replay
from benchmarks.capacity.trace import Request, TraceSettings, chunk_keys, make_trace
from tq_offload_connectors.memory import MemoryStore

SETTINGS = TraceSettings(conversations=60, users=20)


def test_the_same_settings_make_the_same_trace_and_another_seed_another() -> None:
    assert make_trace(SETTINGS) == make_trace(SETTINGS)
    assert make_trace(SETTINGS) != make_trace(replace(SETTINGS, seed=7))


def test_requests_come_in_the_order_of_time_and_conversations_interleave() -> None:
    trace = make_trace(SETTINGS)
    assert all(a.at <= b.at for a, b in itertools.pairwise(trace))
    assert any(a.conversation != b.conversation and b.turn for a, b in itertools.pairwise(trace))


def test_a_turn_extends_the_prompt_before_it() -> None:
    last: dict[int, Request] = {}
    for request in make_trace(SETTINGS):
        before = last.get(request.conversation)
        assert request.turn == (0 if before is None else before.turn + 1)
        if before is not None:
            assert request.tokens > before.tokens
            assert request.chunks[: len(before.chunks)] == before.chunks
        assert len(request.chunks) == request.tokens // 256
        last[request.conversation] = request


def test_answers_are_part_of_the_next_prompt() -> None:
    short, long = (make_trace(replace(SETTINGS, answer=answer)) for answer in (1.0, 1000.0))
    grown = {(one.conversation, one.turn): one.tokens for one in long}
    pairs = [(one, grown[one.conversation, one.turn]) for one in short if (one.conversation, one.turn) in grown]
    assert all((tokens > one.tokens) if one.turn else (tokens == one.tokens) for one, tokens in pairs)
    assert any(one.turn for one, _ in pairs)


def test_a_chunk_is_shared_only_by_those_who_share_everything_before_its_end() -> None:
    assert chunk_keys([("s", 512), ("u", 700), ("c", 1300)], 256) == ("s/0", "s/1", "c/2", "c/3", "c/4")
    assert chunk_keys([("s", 511), ("u", 768), ("c", 769)], 256) == ("s/0", "u/1", "u/2")
    assert chunk_keys([("s", 100)], 256) == ()


def test_no_user_has_two_contexts() -> None:
    owners: dict[str, set[int]] = {}
    for request in make_trace(SETTINGS):
        for key in request.chunks:
            owners.setdefault(key, set()).add(request.user)
    assert all(len(users) == 1 for key, users in owners.items() if not key.startswith("s"))
    assert any(len(users) > 1 for key, users in owners.items() if key.startswith("s"))


def test_hits_are_whole_chunks_of_the_prefix() -> None:
    value = memoryview(bytes(10))
    trace = [
        Request(0, 0, 0, 0, 700, ("a", "b")),
        Request(1, 0, 0, 1, 1000, ("a", "b", "c")),
        Request(2, 0, 1, 0, 600, ("a", "x")),
    ]
    found = replay(trace, MemoryStore(1000), value)
    assert (found.prompt_tokens, found.hit_tokens) == (2300, 3 * 256)
    assert (found.puts, found.held, found.held_bytes) == (4, 4, 40)


def test_the_end_of_a_prompt_is_evicted_before_its_beginning() -> None:
    value = memoryview(bytes(10))
    trace = [
        Request(0, 0, 0, 0, 768, ("a", "b", "c")),
        Request(1, 0, 1, 0, 256, ("x",)),
        Request(2, 0, 0, 1, 768, ("a", "b", "c")),
    ]
    assert replay(trace, MemoryStore(30), value).hit_tokens == 2 * 256


def test_smaller_values_find_more_in_the_same_budget() -> None:
    trace = make_trace(SETTINGS)
    rates = [replay(trace, MemoryStore(20000), memoryview(bytes(size))).hit_rate for size in (400, 100)]
    assert 0 < rates[0] < rates[1] < 1
