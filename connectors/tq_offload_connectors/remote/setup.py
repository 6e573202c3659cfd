"""Start of compressed remote connectors: which are, what is refused, and how one is put together."""

from __future__ import annotations

from dataclasses import dataclass
from types import ModuleType
from typing import Any

from lmcache.v1.memory_management import MemoryFormat

from tq_offload.codec import TurboQuantCodec
from tq_offload.errors import BackendError, ConfigError
from tq_offload.integrations.lmcache.log import logger
from tq_offload.integrations.lmcache.settings import (
    EXTRA_PREFIX,
    GIB,
    SERDE_SETTINGS,
    TIER_SETTINGS,
    SerdeSettings,
    TierSettings,
    settings_from_serde,
    tier_settings,
)
from tq_offload_connectors.frame_store import FrameStore
from tq_offload_connectors.in_process.objects import ChunkObjects, heap_object
from tq_offload_connectors.in_process.plan import given_settings
from tq_offload_connectors.remote.loads import PrefixLoader
from tq_offload_connectors.remote.store import ConnectorStore
from tq_offload_connectors.remote.table import UNKNOWN, Handling, handling_of, innermost
from tq_offload_connectors.remote.view import CpuView, MetadataView
from tq_offload_connectors.tier import Tier

__all__ = ["install", "place_of"]

SERDE = "turboquant"
WRITERS = 4
PATH_SCHEMES = ("fs", "hf3fs")
MARGIN = 1 << 16  # a frame of another spec may be that much longer than the raw chunk


def install(module: ModuleType, *, active: bool = False) -> None:
    """Let LMCache's remote backend compress. Safe to call again.

    Args:
        module: `lmcache.v1.storage_backend.remote_backend`.
        active: Also where the configuration has LMCache's default serde `naive`; else only for `turboquant`.
    """
    current: Any = module.CreateConnector
    if hasattr(current, "tq_offload_original"):
        current.tq_offload_active |= active
        return
    create_serde: Any = module.CreateSerde

    def create_connector(
        url: str, loop: Any, local_cpu_backend: Any, config: Any = None, metadata: Any = None, plugin_name: Any = None
    ) -> Any:
        def create(cpu: Any, about: Any) -> Any:
            return current(url, loop, cpu, config, about, plugin_name=plugin_name)

        if not _wanted(config, create_connector.tq_offload_active):  # type: ignore[attr-defined]
            return create(local_cpu_backend, metadata)
        return _Setup(place_of(url), loop, local_cpu_backend, config, metadata).connect(create)

    def create_naive(serde_type: str, metadata: Any, config: Any) -> Any:
        return create_serde("naive" if serde_type == SERDE else serde_type, metadata, config)

    create_connector.tq_offload_original = current  # type: ignore[attr-defined]
    create_connector.tq_offload_active = active  # type: ignore[attr-defined]
    create_naive.tq_offload_original = create_serde  # type: ignore[attr-defined]
    module.CreateConnector = create_connector  # type: ignore[attr-defined]
    module.CreateSerde = create_naive  # type: ignore[attr-defined]


def _wanted(config: Any, active: bool) -> bool:
    serde = config.remote_serde
    if active and serde not in (SERDE, "naive", None):
        logger().info("TQ-Offload: remote: left alone, has its own serde %s", serde)
    return serde == SERDE or (active and serde in ("naive", None))


def place_of(url: str) -> str:
    """A URL without users, passwords and parameters."""
    scheme, _, rest = url.split("?", 1)[0].partition("://")
    if scheme not in PATH_SCHEMES:
        rest = ",".join(part.rpartition("@")[2] for part in rest.split(","))
    return f"{scheme}://{rest}"


@dataclass
class _Setup:
    """Puts one connector together."""

    place: str
    loop: Any
    local_cpu_backend: Any
    config: Any
    metadata: Any

    def connect(self, create: Any) -> Any:
        """The wrapped connector. What LMCache's own raises, a server that is down above all, is raised as it is."""
        try:
            serde, tiers = _settings(self.config)
            self._check_config()
            codec = TurboQuantCodec(serde.spec, backend=serde.backend, threads=serde.threads)
        except (ConfigError, BackendError) as error:
            raise SystemExit(f"TQ-Offload: cannot start: {error}") from error
        objects = ChunkObjects(self.config, self.metadata, self.local_cpu_backend, serde)
        nbytes, raw_bytes = _sizes(codec, objects, self.metadata)
        about = MetadataView(self.metadata, nbytes)
        cpu = CpuView(self.local_cpu_backend, self.config, about, max(nbytes, raw_bytes) + MARGIN)
        timed = create(cpu, about)
        handling = self._handling(timed)
        raw = innermost(timed.getWrappedConnector())
        cpu.use_pool = handling.needs_pool(bool(getattr(raw, "save_chunk_meta", True)))
        store = ConnectorStore(timed, timed.getWrappedConnector(), self.loop, cpu, handling, self.place)
        frames = self._frames(codec, store, serde, tiers)
        self._announce(type(raw).__name__, handling, f"compressed, turboquant {serde.spec.describe()}")
        from tq_offload_connectors.remote.connector import CompressedConnector

        loader = PrefixLoader(timed, frames, objects, nbytes, handling.asks_first)
        return CompressedConnector(timed, frames, store, objects, loader, self.metadata.model_name)

    def _check_config(self) -> None:
        if self.config.use_layerwise:
            raise ConfigError(
                "use_layerwise",
                True,
                "false with a compressed remote tier: LMCache has no way to hear that a layer could not be loaded, and "
                "would use what is not there",
            )
        if self.config.enable_blending:
            raise ConfigError("enable_blending", True, "false: frames do not keep the positions that blending needs")

    def _handling(self, timed: Any) -> Handling:
        handling = handling_of(innermost(timed.getWrappedConnector()))
        if handling.refused:
            error = ConfigError("remote_url", self.place, handling.refused)
            raise SystemExit(f"TQ-Offload: cannot start: {error}")
        return handling

    def _frames(
        self, codec: TurboQuantCodec, store: ConnectorStore, serde: SerdeSettings, tiers: TierSettings
    ) -> FrameStore:
        queue_gb = tiers.queue_gb or float(self.config.max_local_cpu_size) / 2
        tier = Tier("remote", store, remote=True, writers=WRITERS, queue_bytes=max(1, int(tiers.write_queue_gb * GIB)))
        return FrameStore(
            codec, [tier], workers=serde.workers, queue_bytes=max(1, int(queue_gb * GIB)), repair=serde.repair
        )

    def _announce(self, name: str, handling: Handling, how: str) -> None:
        logger().info("TQ-Offload: remote %s (%s): %s", self.place, name, how)
        if handling is UNKNOWN:
            logger().warning(
                "TQ-Offload: remote %s: %s is no connector of LMCache's: it must give objects back with the length "
                "that they were stored with; what does not come back whole is a miss",
                self.place,
                name,
            )
        elif handling.length == "lost":
            logger().warning("TQ-Offload: remote %s: %s %s", self.place, name, handling.note)
        if handling.length == "fixed" and self.config.save_unfull_chunk:
            logger().info("TQ-Offload: remote %s: partial chunks are padded to the size of a full one", self.place)


def _settings(config: Any) -> tuple[SerdeSettings, TierSettings]:
    given = given_settings(config)
    codec = {name: value for name, value in given.items() if name in SERDE_SETTINGS}
    serde = settings_from_serde(codec, prefix=EXTRA_PREFIX)
    return serde, tier_settings({name: value for name, value in given.items() if name in TIER_SETTINGS})


def _sizes(codec: TurboQuantCodec, objects: ChunkObjects, metadata: Any) -> tuple[int, int]:
    """Bytes of a full chunk: as a frame, and raw."""
    full = heap_object(metadata.get_shapes(), metadata.get_dtypes(), MemoryFormat.KV_2LTD)
    layout, _ = objects.source(full, None)
    return codec.frame_size(layout), layout.nbytes
