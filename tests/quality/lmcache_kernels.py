"""Run by `test_lmcache_port.py` under the interpreter of Triton: LMCache's kernels against the port."""

import sys

import torch
from lmcache.v1.distributed.serde.turboquant import decode_kernel, store_kernel
from lmcache.v1.distributed.serde.turboquant import turboquant as package

from benchmarks.quality import lmcache_codecs

TOKENS, HEADS, D = 32, 2, 64


def through_kernels(x: torch.Tensor, config: package.TurboQuantSerdeConfig) -> tuple[torch.Tensor, torch.Tensor]:
    """K and V fp16 [T, H, D] of one layer, stored and read back as `serialize` and `deserialize` do it."""
    turn, midpoints, table = package._make_tq_tensors_for_layer(config, 0, torch.device("cpu"))
    blocks = TOKENS // config.block_size
    cache = torch.zeros(blocks, config.block_size, HEADS, config.slot_size_aligned, dtype=torch.uint8)
    store_kernel.triton_turboquant_store(
        x, x, cache, package._make_slot_mapping(TOKENS, x.device), turn, midpoints, config.key_mse_bits,
        config.key_packed_size, config.value_quant_bits, config.key_fp8,
    )  # fmt: skip
    keys = torch.empty(1, HEADS, TOKENS, D, dtype=torch.float16)
    values, block_table = torch.empty_like(keys), package._make_block_table(blocks, x.device)
    decode_kernel._tq_full_dequant_kv[(TOKENS, HEADS)](
        cache, block_table, table, keys, values, *keys.stride()[:3], *values.stride()[:3], *cache.stride()[:3],
        block_table.stride(0), HEAD_DIM=D, BLOCK_SIZE=config.block_size, NUM_KV_HEADS=HEADS,
        MSE_BYTES=D * config.key_mse_bits // 8 or D, KPS=config.key_packed_size, VQB=config.value_quant_bits,
        VAL_DATA_BYTES=D * config.value_quant_bits // 8, MSE_BITS=config.key_mse_bits, KEY_FP8=int(config.key_fp8),
        BLOCK_D=D, NORM_CORRECTION=int(config.norm_correction), FP8_E4B15=0,
    )  # fmt: skip
    k, v = keys[0].transpose(0, 1), values[0].transpose(0, 1)
    return (k if config.key_fp8 else (k.float() @ turn.T).half()), v


def main() -> None:
    """Compare every preset given; fails at the first difference."""
    for module in (store_kernel, decode_kernel):
        module._use_fp8_e4b15 = lambda device=0: 0  # as on Hopper
    x = torch.randn(TOKENS, HEADS, D, generator=torch.Generator().manual_seed(5)).bfloat16()
    for preset in sys.argv[1:]:
        config = package.TurboQuantSerdeConfig(preset=preset, head_dim=D, skip_first_layers=0, skip_last_layers=0)
        keys, values = through_kernels(x, config)
        port_keys, port_values, _ = lmcache_codecs.turboquant(preset)(*[x.transpose(0, 1)[None].contiguous()] * 2)
        for found, port in ((keys, port_keys), (values, port_values)):
            torch.testing.assert_close(port[0].transpose(0, 1), found.to(torch.bfloat16), rtol=2**-7, atol=1e-3)
        sys.stdout.write(f"{preset} agrees\n")


if __name__ == "__main__":
    main()
