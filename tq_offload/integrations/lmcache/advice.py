"""What the start says about settings that may cost quality with the model that is served. Each line once a process."""

from __future__ import annotations

from functools import cache

from tq_offload.integrations.lmcache.log import logger
from tq_offload.integrations.lmcache.model_config import load_key_bias
from tq_offload.integrations.lmcache.settings import ENV_PREFIX
from tq_offload.spec import CodecSpec

__all__ = ["advise", "advise_model"]


def advise(spec: CodecSpec) -> None:
    """Warn of a spec that is risky whatever the model."""
    for risk in spec.risks():
        _warn(f"{risk}; `tq-offload check MODEL` measures it")


def advise_model(model_name: str, spec: CodecSpec) -> None:
    """Warn of a spec that may break this model: keys with biases, and nothing that takes care of them."""
    if spec.key_bits < 8 and not spec.key_outliers and model_name and load_key_bias(model_name):
        _warn(
            f"model {model_name!r} has biased keys (k_proj with a bias), which {spec.key_bits}-bit codes may not hold: "
            f"set {ENV_PREFIX}PRESET=turboquant_robust, or measure with `tq-offload check`"
        )


@cache
def _warn(message: str) -> None:
    logger().warning("TQ-Offload: %s", message)
