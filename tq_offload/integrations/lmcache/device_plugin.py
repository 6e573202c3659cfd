"""Entry point of the group `lmcache.device_plugins` (LMCache 0.5.4 and later): loaded by every `import lmcache`.

It describes no device. The group is the one hook that LMCache offers before it reads its configuration.
"""

from __future__ import annotations

from lmcache.v1.platform.base.device_spec import DeviceSpec

from tq_offload.integrations.lmcache.activation import activate_or_exit

__all__ = ["TurboQuantActivation"]


class TurboQuantActivation(DeviceSpec):
    """A device that is never available."""

    def __init__(self) -> None:
        super().__init__()
        activate_or_exit()

    @property
    def device_type(self) -> str:
        """No torch device has this name."""
        return "tq_offload"

    @property
    def backend_name(self) -> str:
        """LMCache requires the name of the entry point."""
        return "tq_offload"

    def is_available(self) -> bool:
        """Never."""
        return False
