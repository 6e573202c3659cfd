"""A seeded trace of conversations: prompts that grow turn by turn, on system prompts and contexts that are shared.

A prompt is a system prompt (shared by all its users), the user's context (shared by all of that user's conversations:
a profile, a repository, a document), then the turns so far: the user's messages and the answers. Users are drawn by a
Zipf law, conversations begin as a Poisson process, and a user thinks before the next turn, so conversations interleave.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

__all__ = ["Request", "TraceSettings", "make_trace"]


@dataclass(frozen=True)
class TraceSettings:
    """What the trace is made of; lengths in tokens, lognormal ones by median and sigma, times in seconds.

    Args:
        conversations: How many begin.
        users, zipf: Number of users, and the exponent of how often each begins a conversation.
        systems: Lengths of the system prompts; a user has one of them, the first ones more often.
        context, context_sigma: The user's context.
        message, message_sigma, answer, answer_sigma: A message and an answer.
        turns: Mean number of turns, geometric.
        arrivals: Mean time between beginnings.
        think, think_sigma: Time from one request to the next of a conversation.
        max_tokens: A conversation ends before its prompt is longer.
    """

    conversations: int = 2000
    users: int = 500
    zipf: float = 1.1
    systems: tuple[int, ...] = (1800, 900, 3000, 600)
    context: float = 2000.0
    context_sigma: float = 0.8
    message: float = 120.0
    message_sigma: float = 1.0
    answer: float = 350.0
    answer_sigma: float = 0.6
    turns: float = 5.0
    arrivals: float = 5.0
    think: float = 60.0
    think_sigma: float = 1.5
    max_tokens: int = 32768
    seed: int = 6


@dataclass(frozen=True)
class Request:
    """One turn.

    Args:
        at: Seconds since the beginning.
        user, conversation, turn: Numbers.
        tokens: Length of the prompt.
        chunks: Keys of its full chunks, in order; equal keys are equal tokens after equal prefixes.
    """

    at: float
    user: int
    conversation: int
    turn: int
    tokens: int
    chunks: tuple[str, ...]


def make_trace(settings: TraceSettings, chunk_tokens: int = 256) -> list[Request]:
    """The requests in the order of their time; the same settings make the same trace."""
    draw = np.random.Generator(np.random.PCG64(settings.seed))
    weights = 1.0 / np.arange(1, settings.users + 1) ** settings.zipf
    owners = draw.choice(settings.users, size=settings.conversations, p=weights / weights.sum())
    system_weights = 1.0 / np.arange(1, len(settings.systems) + 1)
    systems = draw.choice(len(settings.systems), size=settings.users, p=system_weights / system_weights.sum())
    contexts = _lengths(draw, settings.context, settings.context_sigma, settings.users)
    begins = np.cumsum(draw.exponential(settings.arrivals, settings.conversations))
    turns = draw.geometric(1.0 / settings.turns, settings.conversations)
    queue: list[tuple[float, int, Request]] = []
    for number, (user, at, count) in enumerate(zip(owners, begins, turns, strict=True)):
        system, context = int(systems[user]), int(contexts[user])
        shared = [(f"s{system}", settings.systems[system]), (f"u{user}", settings.systems[system] + context)]
        messages = _lengths(draw, settings.message, settings.message_sigma, int(count))
        answers = _lengths(draw, settings.answer, settings.answer_sigma, int(count))
        pauses = draw.lognormal(np.log(settings.think), settings.think_sigma, int(count))
        tokens, when = shared[-1][1], float(at)
        for turn in range(int(count)):
            tokens += int(messages[turn])
            if tokens > settings.max_tokens:
                break
            chunks = chunk_keys([*shared, (f"c{number}", tokens)], chunk_tokens)
            request = Request(when, int(user), number, turn, tokens, chunks)
            heapq.heappush(queue, (when, len(queue), request))
            tokens += int(answers[turn])
            when += float(pauses[turn])
    return [heapq.heappop(queue)[2] for _ in range(len(queue))]


def chunk_keys(parts: Sequence[tuple[str, int]], chunk_tokens: int) -> tuple[str, ...]:
    """Keys of the full chunks of a prompt.

    Args:
        parts: Name of what every part of the prompt is shared by, and the token at which the part ends.
        chunk_tokens: Tokens of a chunk.

    Returns:
        For each chunk the name of the part that its last token lies in, and its number: with that name everything
        before it is given, too.
    """
    keys, part = [], 0
    for number in range(parts[-1][1] // chunk_tokens):
        end = (number + 1) * chunk_tokens
        while parts[part][1] < end:
            part += 1
        keys.append(f"{parts[part][0]}/{number}")
    return tuple(keys)


def _lengths(draw: np.random.Generator, median: float, sigma: float, count: int) -> np.ndarray:
    return np.maximum(1, draw.lognormal(np.log(median), sigma, count)).astype(np.int64)
