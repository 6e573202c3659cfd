"""The GPU backend: Triton kernels over streams of device tensors; under TRITON_INTERPRET=1 the device is the CPU.

`steps` holds what is done to a tile of vectors, `stream_kernels` the kernels, `launch` their launches over tensors on a
device, `backend` the `Backend` over arrays of the host. Frames for chunks on a device: `tq_offload.kernels.device`.
triton is imported when a stream is first coded, not on import.
"""

from tq_offload.kernels.triton.backend import TritonBackend

__all__ = ["TritonBackend"]
