"""`python -m tq_offload.integrations.lmcache server ...`: LMCache's command line with TQ-Offload active.

The way in where LMCache has no entry point for plugins (0.5.3), and without setting `LMCACHE_SERDE`.
"""

from __future__ import annotations

import os
import sys

from tq_offload.integrations.lmcache.activation import activate_or_exit
from tq_offload.integrations.lmcache.settings import ENV_SERDE, REQUESTED


def main() -> None:
    """Activate, then hand over to LMCache."""
    os.environ.setdefault(ENV_SERDE, REQUESTED)
    activate_or_exit()
    from lmcache.cli.main import main as lmcache_main

    sys.argv[0] = "lmcache"
    lmcache_main()


if __name__ == "__main__":
    main()
