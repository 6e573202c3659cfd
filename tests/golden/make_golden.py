"""Make the golden frames of wire format v1. Run by hand, never by a test; see docs/wire-format.md.

While v1 is a draft the files may be made anew, in a commit that says so; afterwards never.

usage: PYTHONPATH=.:tests python tests/golden/make_golden.py
"""

from __future__ import annotations

import json
from pathlib import Path

from golden_cases import CASES, make_case

from tq_offload.codec import TurboQuantCodec

HERE = Path(__file__).parent


def main() -> None:
    """Write one frame a case and the digest of the values that it decodes to."""
    decoded = {}
    for name in CASES:
        case = make_case(name)
        codec = TurboQuantCodec(case.spec, "reference")
        frame = codec.encode(case.tensors, case.layout, key=case.key, model=case.model)
        (HERE / f"{name}.tqkv").write_bytes(frame)
        decoded[name] = [case.digest_of(t) for t in codec.decode(frame)]
        print(f"{name}: {len(frame)} bytes")
    (HERE / "decoded.json").write_text(json.dumps(decoded, indent=1) + "\n")


if __name__ == "__main__":
    main()
