"""What the codec does to a chunk: bits, rotation seed, means, scale rules, protected layers. Presets and parsing."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace

from tq_offload.errors import ConfigError
from tq_offload.values import boolean, choice, integer

__all__ = [
    "DEFAULT_PRESET",
    "MAX_OUTLIERS",
    "MEAN_MIN_TOKENS",
    "PRESETS",
    "SCALE_RULES",
    "SETTINGS",
    "CodecSpec",
    "SideSpec",
]

SCALE_RULES = ("lsq", "norm", "unbiased")
MEAN_MIN_TOKENS = 64  # below, the means would cost more than 0.25 bit an element; part of the wire format
DEFAULT_PRESET = "turboquant"

OUTLIER_BITS = 4  # of their coarse codes
MAX_OUTLIERS = 64  # channels of a vector; never more than a quarter of them

_MAX_SEED = 2**32 - 1
_MAX_PROTECTED = 1024


@dataclass(frozen=True)
class SideSpec:
    """What of a spec applies to the vectors of K or of V in a chunk."""

    bits: int
    rule: str
    mean: bool
    qjl: bool
    outliers: int

    def outliers_of(self, dim: int) -> int:
        """Channels of a vector of that many elements that are coded apart; part of the wire format."""
        return min(self.outliers, dim // 4)


@dataclass(frozen=True)
class CodecSpec:
    """An immutable, hashable description of the codec. It is written into every frame.

    Args:
        key_bits: Bits of a K code, 1..8.
        value_bits: Bits of a V code, 1..8.
        seed: Seed of the random signs, u32.
        mean: Take the chunk's mean off a vector where that shortens it (chunks of 64 tokens and more).
        key_rule: Scale rule of K: `lsq` (least squares), `norm` (norm correction), `unbiased` (inner products).
        value_rule: Scale rule of V.
        fit_range: Stretch the quantizer of a vector by its largest coordinate (`codebook.RANGE_FIT`).
        qjl: Add a 1-bit sketch of the residual of K (QJL, arXiv 2406.03482).
        key_outliers: Channels of K, those of highest energy in a chunk, layer and head, that get a coarse code of their
            own first; for models with biased keys. At most a quarter of head_dim is.
        protect_first: First layers of a chunk that are stored as they are.
        protect_last: Last layers likewise.

    Raises:
        ConfigError: A value out of range.
    """

    key_bits: int = 4
    value_bits: int = 4
    seed: int = 0
    mean: bool = True
    key_rule: str = "lsq"
    value_rule: str = "lsq"
    fit_range: bool = True
    qjl: bool = False
    key_outliers: int = 0
    protect_first: int = 0
    protect_last: int = 0

    def __post_init__(self) -> None:
        integer("key_bits", self.key_bits, 1, 8, typed=True)
        integer("value_bits", self.value_bits, 1, 8, typed=True)
        integer("seed", self.seed, 0, _MAX_SEED, typed=True)
        integer("key_outliers", self.key_outliers, 0, MAX_OUTLIERS, typed=True)
        integer("protect_first", self.protect_first, 0, _MAX_PROTECTED, typed=True)
        integer("protect_last", self.protect_last, 0, _MAX_PROTECTED, typed=True)
        for name in ("mean", "fit_range", "qjl"):
            if not isinstance(getattr(self, name), bool):
                raise ConfigError(name, getattr(self, name), "true, false")
        for name in ("key_rule", "value_rule"):
            choice(name, getattr(self, name), SCALE_RULES)

    @classmethod
    def preset(cls, name: str, *, setting: str = "preset") -> CodecSpec:
        """The preset of that name; `setting` is the name that an error shows.

        Raises:
            ConfigError: The name is not known.
        """
        if name not in PRESETS:
            raise ConfigError(setting, name, PRESETS)
        return PRESETS[name]

    @classmethod
    def from_settings(cls, settings: Mapping[str, object], *, shown: Callable[[str], str] = str) -> CodecSpec:
        """Build a spec from the settings of a user, strictly.

        Args:
            settings: `preset`, `bits` (both K and V) and the fields of this class, as text or as typed values. More
                special settings win: key_bits over bits over preset.
            shown: Maps a setting's name to the name that the user knows, for error messages.

        Raises:
            ConfigError: An unknown name or a value that is not allowed.
        """
        for name in settings:
            if name not in SETTINGS:
                raise ConfigError(shown(name), settings[name], "one of the settings " + ", ".join(map(shown, SETTINGS)))
        spec = cls.preset(str(settings.get("preset", DEFAULT_PRESET)), setting=shown("preset"))
        changes: dict[str, object] = {}
        if "bits" in settings:
            bits = integer(shown("bits"), settings["bits"], 1, 8)
            changes.update(key_bits=bits, value_bits=bits)
        for name, parse in _PARSERS.items():
            if name in settings:
                changes[name] = parse(shown(name), settings[name])
        return replace(spec, **changes)  # type: ignore[arg-type]

    def side(self, side: str, tokens: int) -> SideSpec:
        """How `K` or `V` of a chunk of that many tokens is coded; part of the wire format."""
        mean = self.mean and tokens >= MEAN_MIN_TOKENS
        if side == "K":
            return SideSpec(self.key_bits, self.key_rule, mean, self.qjl, self.key_outliers if tokens else 0)
        return SideSpec(self.value_bits, self.value_rule, mean, False, 0)

    def risks(self) -> tuple[str, ...]:
        """What about this spec may cost quality with any model, for people."""
        found = []
        if min(self.key_bits, self.value_bits) <= 2:
            found.append("codes of 1 or 2 bits lose much of K or V")
        elif self.key_bits == 3:
            found.append("keys of 3 bits cost several times the KL of 4 bits")
        if self.qjl and self.key_bits <= 4:
            found.append("the variance of QJL costs more than it gains at up to 4 bits")
        return tuple(found)

    def describe(self) -> str:
        """One line for people: `K4V4, means, least-squares scale`."""
        parts = [f"K{self.key_bits}V{self.value_bits}"]
        if self.mean:
            parts.append("means")
        rules = {"lsq": "least-squares", "norm": "norm-preserving", "unbiased": "unbiased"}
        if self.key_rule == self.value_rule:
            parts.append(f"{rules[self.key_rule]} scale")
        else:
            parts.append(f"{rules[self.key_rule]} K and {rules[self.value_rule]} V scale")
        if self.key_outliers:
            parts.append(f"{self.key_outliers} outlier channels of K")
        if self.qjl:
            parts.append("QJL")
        if self.protect_first or self.protect_last:
            parts.append(f"first {self.protect_first} and last {self.protect_last} layers raw")
        if self.seed:
            parts.append(f"seed {self.seed}")
        return ", ".join(parts)


_PARSERS: dict[str, Callable[[str, object], object]] = {
    "key_bits": lambda name, value: integer(name, value, 1, 8),
    "value_bits": lambda name, value: integer(name, value, 1, 8),
    "seed": lambda name, value: integer(name, value, 0, _MAX_SEED),
    "mean": boolean,
    "key_rule": lambda name, value: choice(name, value, SCALE_RULES),
    "value_rule": lambda name, value: choice(name, value, SCALE_RULES),
    "fit_range": boolean,
    "qjl": boolean,
    "key_outliers": lambda name, value: integer(name, value, 0, MAX_OUTLIERS),
    "protect_first": lambda name, value: integer(name, value, 0, _MAX_PROTECTED),
    "protect_last": lambda name, value: integer(name, value, 0, _MAX_PROTECTED),
}

SETTINGS = ("preset", "bits", *(f.name for f in fields(CodecSpec)))

# `nc` is the norm correction of vLLM and LMCache. Ours take off means as well, which costs 16 / T bits an element.
PRESETS: dict[str, CodecSpec] = {
    "turboquant": CodecSpec(),
    "turboquant_robust": CodecSpec(key_outliers=8),
    "turboquant_k4v3": CodecSpec(value_bits=3),
    "turboquant_3bit": CodecSpec(key_bits=3, value_bits=3, key_outliers=6),
    "turboquant_k8v4": CodecSpec(key_bits=8, value_bits=4),
    "turboquant_4bit_nc": CodecSpec(key_rule="norm", value_rule="norm"),
    "turboquant_k3v4_nc": CodecSpec(key_bits=3, value_bits=4, key_rule="norm", value_rule="norm"),
    "turboquant_3bit_nc": CodecSpec(key_bits=3, value_bits=3, key_rule="norm", value_rule="norm"),
    "turboquant_k8v8": CodecSpec(key_bits=8, value_bits=8),
}
