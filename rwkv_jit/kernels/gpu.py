"""What a GPU offers to a kernel, by its architecture."""

from __future__ import annotations

from typing import NamedTuple

from rwkv_jit.kernels.errors import UnsupportedConfigError

TENSOR_CORES = 80  # the first with mma.sync of bfloat16 and cp.async
_SHARED_OF_BLOCK = 1024  # bytes that the system keeps for each block


class Gpu(NamedTuple):
    """A device that kernels are chosen and compiled for."""

    arch: str  # empty where there is none, for tensors without memory, as of FakeTensorMode
    # Architectures whose stored kernels serve it too: those for its kind alone, like sm_90a.
    compatible: tuple[str, ...] = ()
    multiprocessors: int | None = None  # None where a call is traced, or kernels are compiled for any such GPU

    @property
    def number(self) -> int:
        """Return 90 for sm_90, sm_90a and compute_90."""
        if not self.arch:
            raise UnsupportedConfigError(
                "arch: there is no GPU, whose architecture decides about the kernels; set RWKVJIT_ARCH, e.g. to sm_90"
            )
        return int(self.arch.split("_")[1].rstrip("a"))

    @property
    def has_tensor_cores(self) -> bool:
        """Return whether it has the products that the chunked kernels take."""
        return self.number >= TENSOR_CORES

    @property
    def has_warp_groups(self) -> bool:
        """Return whether four warps can multiply together, which code for sm_90a alone can ask for."""
        return self.number == 90 and self.arch.startswith("sm_")

    @property
    def shared_per_multiprocessor(self) -> int:
        """Return the bytes of shared memory of a multiprocessor."""
        if self.number in (80, 87):
            return 164 * 1024
        return 228 * 1024 if 90 <= self.number < 120 else 100 * 1024  # the least there is, where it is not known

    @property
    def shared_limit(self) -> int:
        """Return the bytes of shared memory that a block may have."""
        return self.shared_per_multiprocessor - _SHARED_OF_BLOCK

    @property
    def many_threads(self) -> int:
        """Return the threads of an SM that registers allow: fewer on sm_100, where 128 for a thread spill."""
        return 384 if 100 <= self.number < 120 else 512

    def resident_blocks(self, threads: int, most_threads: int, shared_bytes: int) -> int:
        """Return how many blocks an SM has room for: registers for `most_threads`, or shared memory for fewer."""
        of_shared = self.shared_per_multiprocessor // (shared_bytes + _SHARED_OF_BLOCK)
        return max(1, min(most_threads // threads, of_shared))

    def has_room(self, blocks: int, shared_bytes: int) -> bool:
        """Return whether a multiprocessor has shared memory for so many blocks."""
        fits_all = blocks * (shared_bytes + _SHARED_OF_BLOCK) <= self.shared_per_multiprocessor
        return shared_bytes <= self.shared_limit and fits_all
