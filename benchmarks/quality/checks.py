"""What `--check` holds ours to. All figures are of one run, head_dim 64, bits as stored."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from benchmarks.quality.measure import BiasedModel, Score
from benchmarks.quality.methods import LMCACHE_4BIT, PLAIN_3, PLAIN_4

__all__ = ["Check", "checks"]

ROBUST = "turboquant_robust"


@dataclass(frozen=True)
class Check:
    """`what` is compared, with the figures; `met` says how it came out."""

    number: int
    what: str
    met: bool


def checks(scores: list[Score], models: list[BiasedModel]) -> list[Check]:
    """All of them, in order."""
    by_name = {score.name: score for score in scores}
    return [*_clean(scores, by_name), *_biased(models)]


def _best(scores: list[Score], bits: float) -> Score | None:
    fit = [s for s in scores if s.family == "ours" and s.bits <= bits]
    return min(fit, key=lambda s: s.kl, default=None)


def _below(number: int, score: Score | None, bits: float, bound: float, other: Score) -> Check:
    what = f"best of ours at <= {bits:.2f} bits: KL <= {bound:g}x {other.name}"
    if score is None:
        return Check(number, f"{what}: there is none", False)
    ratio = score.kl / other.kl
    found = f"{score.name} at {score.bits:.3f} bits, {score.kl:.5f} against {other.kl:.5f}: {ratio:.3f}x"
    return Check(number, f"{what}: {found}", ratio <= bound)


def _clean(scores: list[Score], by_name: dict[str, Score]) -> Iterator[Check]:
    plain = by_name[PLAIN_4]
    best = _best(scores, 4.32)
    yield _below(1, best, 4.32, 0.62, plain)
    yield _below(1, best, 4.32, 0.75, by_name[LMCACHE_4BIT])
    error = best.attention_mean if best else float("nan")
    yield Check(1, f"its attention-output error <= 0.062: {error:.4f}", error <= 0.062)
    yield _below(2, _best(scores, 4.60), 4.60, 0.40, plain)
    yield _below(3, _best(scores, 3.85), 3.85, 1.0, plain)
    limit = by_name[PLAIN_3].bits + 0.3
    yield _below(5, _best(scores, limit), limit, 0.5, by_name[PLAIN_3])


def _biased(models: list[BiasedModel]) -> Iterator[Check]:
    by_name = {model.variant: {s.name: s for s in model.scores} for model in models}
    lost, worst = [], 0.0
    for kind in ("low, 20x", "turning, 20x"):
        rows = by_name.get(kind, {})
        if ROBUST not in rows:
            yield Check(4, f"{kind}: {ROBUST} was not run", False)
            continue
        ours = rows[ROBUST]
        what = f"{kind}: {ROBUST}, KL <= 0.012, perplexity within 2 %, <= 4.85 bits"
        found = f"{ours.kl:.5f}, {ours.perplexity:+.2%}, {ours.bits:.3f}"
        met = ours.kl <= 0.012 and abs(ours.perplexity) <= 0.02 and ours.bits <= 4.85
        yield Check(4, f"{what}: {found}", met)
        lost.append(f"{kind} {rows[PLAIN_4].perplexity:+.1%}")
        worst = max(worst, rows[PLAIN_4].perplexity)
    yield Check(4, f"{PLAIN_4} loses more than 50 % of perplexity there: {'; '.join(lost)}", worst > 0.5)
