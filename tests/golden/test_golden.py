"""Golden frames pin wire format v1: every backend writes these bytes and reads these values."""

import json
from pathlib import Path

import pytest
from golden_cases import CASES, make_case

from tq_offload.codec import TurboQuantCodec

HERE = Path(__file__).parent


@pytest.mark.parametrize("name", CASES)
def test_encoding_writes_the_golden_bytes(backend: str, name: str) -> None:
    case = make_case(name)
    frame = TurboQuantCodec(case.spec, backend).encode(case.tensors, case.layout, key=case.key, model=case.model)
    assert bytes(frame) == (HERE / f"{name}.tqkv").read_bytes()


@pytest.mark.parametrize("name", CASES)
def test_decoding_gives_the_golden_values(backend: str, name: str) -> None:
    case = make_case(name)
    frame = (HERE / f"{name}.tqkv").read_bytes()
    decoded = TurboQuantCodec(backend=backend).decode(frame, key=case.key, model=case.model)
    assert [case.digest_of(t) for t in decoded] == json.loads((HERE / "decoded.json").read_text())[name]


def test_no_golden_file_is_left_over_or_missing() -> None:
    assert {p.stem for p in HERE.glob("*.tqkv")} == set(CASES) == set(json.loads((HERE / "decoded.json").read_text()))
