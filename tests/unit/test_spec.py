import pytest

from tq_offload.errors import ConfigError, TQOffloadError
from tq_offload.spec import PRESETS, SETTINGS, CodecSpec


def test_default_is_the_preset_turboquant() -> None:
    assert CodecSpec() == PRESETS["turboquant"] == CodecSpec.from_settings({})
    assert CodecSpec().describe() == "K4V4, means, least-squares scale"


def test_more_special_settings_win() -> None:
    spec = CodecSpec.from_settings({"preset": "turboquant_k8v4", "bits": "3", "value_bits": 5, "mean": "off"})
    assert (spec.key_bits, spec.value_bits, spec.mean) == (3, 5, False)


@pytest.mark.parametrize("name", PRESETS)
def test_presets_say_their_bits(name: str) -> None:
    spec = CodecSpec.preset(name)
    assert f"K{spec.key_bits}V{spec.value_bits}" in spec.describe()
    wanted = {"turboquant": (4, 4), "turboquant_k8v4": (8, 4), "turboquant_k3v4_nc": (3, 4), "turboquant_k8v8": (8, 8)}
    if name in wanted:
        assert (spec.key_bits, spec.value_bits) == wanted[name]
    if name.endswith("_nc"):
        assert spec.key_rule == spec.value_rule == "norm"


@pytest.mark.parametrize(
    ("settings", "shown"),
    [
        ({"bits": "9"}, "TQ_OFFLOAD_BITS"),
        ({"bits": 0}, "TQ_OFFLOAD_BITS"),
        ({"bits": "four"}, "TQ_OFFLOAD_BITS"),
        ({"bits": True}, "TQ_OFFLOAD_BITS"),
        ({"bits": 4.0}, "TQ_OFFLOAD_BITS"),
        ({"key_bits": "-1"}, "TQ_OFFLOAD_KEY_BITS"),
        ({"key_bits": "\u0664"}, "TQ_OFFLOAD_KEY_BITS"),
        ({"seed": 2**32}, "TQ_OFFLOAD_SEED"),
        ({"mean": "maybe"}, "TQ_OFFLOAD_MEAN"),
        ({"qjl": 2}, "TQ_OFFLOAD_QJL"),
        ({"fit_range": ""}, "TQ_OFFLOAD_FIT_RANGE"),
        ({"key_rule": "best"}, "TQ_OFFLOAD_KEY_RULE"),
        ({"preset": "turbo"}, "TQ_OFFLOAD_PRESET"),
        ({"protect_first": "-2"}, "TQ_OFFLOAD_PROTECT_FIRST"),
        ({"bit": 4}, "TQ_OFFLOAD_BIT"),
    ],
)
def test_an_error_names_setting_value_and_the_allowed(settings: dict[str, object], shown: str) -> None:
    with pytest.raises(ConfigError) as caught:
        CodecSpec.from_settings(settings, shown=lambda name: "TQ_OFFLOAD_" + name.upper())
    error = caught.value
    assert isinstance(error, (TQOffloadError, ValueError))
    assert error.setting == shown
    assert str(next(iter(settings.values()))) in str(error)
    assert error.allowed
    assert error.allowed in str(error)


def test_the_list_of_settings_is_complete() -> None:
    assert set(SETTINGS) == {
        "preset", "bits", "key_bits", "value_bits", "seed", "mean", "key_rule", "value_rule", "fit_range", "qjl",
        "key_outliers", "protect_first", "protect_last",
    }  # fmt: skip


def test_risky_specs_say_so() -> None:
    risky = {name for name, spec in PRESETS.items() if spec.risks()}
    assert risky == {"turboquant_3bit", "turboquant_3bit_nc", "turboquant_k3v4_nc"}
    assert "QJL" in CodecSpec(qjl=True).risks()[0]
    assert "1 or 2 bits" in CodecSpec(value_bits=2).risks()[0]


def test_outlier_channels_are_at_most_a_quarter() -> None:
    side = CodecSpec(key_outliers=8).side("K", 10)
    assert [side.outliers_of(dim) for dim in (1, 3, 16, 31, 32, 128)] == [0, 0, 4, 7, 8, 8]
    assert CodecSpec(key_outliers=8).side("V", 10).outliers == CodecSpec(key_outliers=8).side("K", 0).outliers == 0


def test_describe_names_what_differs() -> None:
    text = CodecSpec(3, 4, seed=7, mean=False, key_rule="unbiased", qjl=True, protect_first=1).describe()
    for part in ("K3V4", "unbiased K", "least-squares V", "QJL", "first 1 and last 0 layers raw", "seed 7"):
        assert part in text
    assert "means" not in text
