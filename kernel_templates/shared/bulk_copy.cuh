// Copies of contiguous bytes by the hardware (sm_90 and later): one thread asks for them, and a barrier in shared
// memory tells who waits that they are there. The blocks of a cluster may share a copy: each asks for a part of it, for
// all.
#pragma once
#include "mma.cuh"

// Counts arrivals and bytes; completes, again and again, when both that were expected are there.
struct CopyBarrier { unsigned long long word; };

__device__ inline void begin_barrier(CopyBarrier& barrier, int arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(&barrier)), "r"(arrivals) : "memory");
}
// After the first barriers have begun, before anyone else uses them.
__device__ inline void publish_barriers() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }

// Arrives and adds to the bytes that are waited for.
__device__ inline void expect_bytes(CopyBarrier& barrier, int bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(&barrier)), "r"(bytes)
                 : "memory");
}
// At the same barrier of one of a cluster's BLOCKS. Says only that the thread has read what it wanted: a fence of what
// it wrote, for the whole cluster, would cost more than the copy.
template <int BLOCKS> __device__ inline void arrive_at(CopyBarrier& barrier, int block) {
    if constexpr (BLOCKS == 1)
        asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address(&barrier)) : "memory");
    else
        asm volatile("{\n.reg .b32 there;\nmapa.shared::cluster.u32 there, %0, %1;\n"
                     "mbarrier.arrive.shared::cluster.b64 _, [there];\n}"
                     ::"r"(shared_address(&barrier)), "r"(block) : "memory");
}
// Completions are even and odd in turn, the first of them even.
__device__ inline void wait_for(CopyBarrier& barrier, int parity) {
    asm volatile("{\n.reg .pred done;\nAGAIN:\n"
                 "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n@!done bra AGAIN;\n}"
                 ::"r"(shared_address(&barrier)), "r"(parity) : "memory");
}

// Sizes and addresses are multiples of 16. With BLOCKS > 1 the bytes go to the same place in all blocks of the cluster.
template <int BLOCKS> __device__ inline void copy_bulk(void* target, const void* source, int bytes,
                                                       CopyBarrier& barrier) {
    if constexpr (BLOCKS == 1)
        asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];"
                     ::"r"(shared_address(target)), "l"(source), "r"(bytes), "r"(shared_address(&barrier)) : "memory");
    else
        asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster [%0], [%1], "
                     "%2, [%3], %4;"
                     ::"r"(shared_address(target)), "l"(source), "r"(bytes), "r"(shared_address(&barrier)),
                       "h"(static_cast<short>((1 << BLOCKS) - 1)) : "memory");
}
// The other way, a thread's copies in one batch.
__device__ inline void write_bulk(void* target, const void* source, int bytes) {
    asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;"
                 ::"l"(target), "r"(shared_address(source)), "r"(bytes) : "memory");
}
__device__ inline void end_writes() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }
// .. and until all but the last PENDING batches have read what they write.
template <int PENDING = 0> __device__ inline void wait_until_read() {
    asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(PENDING) : "memory");
}

__device__ inline int block_of_cluster() {
    int rank;
    asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    return rank;
}
__device__ inline void synchronize_cluster() {
    __syncwarp();
    asm volatile("barrier.cluster.arrive.aligned;\nbarrier.cluster.wait.aligned;" ::: "memory");
}
// Of some of a block's threads.
__device__ inline void synchronize_threads(int barrier, int threads) {
    asm volatile("bar.sync %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}
