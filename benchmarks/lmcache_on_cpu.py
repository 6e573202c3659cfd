"""vLLM's own LMCacheConnectorV1, made to work on CPU: `"kv_connector_module_path": "benchmarks.lmcache_on_cpu"`.

Importing this replaces one function, `lmcache.v1.gpu_connector.CreateGPUConnector`, which knows accelerators only.
vLLM imports it in the process that runs the model, before it creates the connector; all else is as in production.
"""

import lmcache.v1.gpu_connector
from vllm.distributed.kv_transfer.kv_connector.v1.lmcache_connector import LMCacheConnectorV1

from benchmarks.cpu_gpu_connector import create

__all__ = ["LMCacheConnectorV1"]

lmcache.v1.gpu_connector.CreateGPUConnector = create
