"""Add golden frames of wire format v1 for new cases. Run by hand, never by a test; see docs/wire-format.md.

v1 is frozen: a frame that is there is never written again, and a case that would change one is an error.

usage: PYTHONPATH=.:tests python tests/golden/make_golden.py
"""

from __future__ import annotations

import json
from pathlib import Path

from golden_cases import CASES, make_case

from tq_offload.codec import TurboQuantCodec

HERE = Path(__file__).parent


def main() -> None:
    """Write one frame for each new case, and the digest of the values that it decodes to."""
    decoded = json.loads((HERE / "decoded.json").read_text())
    for name in CASES:
        path = HERE / f"{name}.tqkv"
        case = make_case(name)
        codec = TurboQuantCodec(case.spec, "reference")
        frame = codec.encode(case.tensors, case.layout, key=case.key, model=case.model)
        if path.exists() and path.read_bytes() != frame:
            raise SystemExit(f"{name}: the frame would change; v1 is frozen: write a new format, or mend the codec")
        path.write_bytes(frame)
        decoded[name] = [case.digest_of(t) for t in codec.decode(frame)]
        print(f"{name}: {len(frame)} bytes")
    (HERE / "decoded.json").write_text(json.dumps(decoded, indent=1) + "\n")


if __name__ == "__main__":
    main()
