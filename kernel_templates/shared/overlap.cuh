// Two launches of a stream side by side (sm_90 and later): the second begins when every block of the first has let it,
// or is done, and takes the room that they leave. It waits by itself for what it reads of the first.
//
// Where the second is launched like any other, or the GPU is older, it begins behind the first, and waits for nothing.
#pragma once
#include "types.cuh"

// Lets the next launch begin, once every block of this one has said so.
__device__ inline void let_next_launch_begin() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// Where a launch beside this one has written: it is not read from there by way of the cache for constants, which knows
// nothing of such writes.
template <typename T> __device__ inline T* written_meanwhile(T* place) {
    asm volatile("" : "+l"(place)::"memory");
    return place;
}

// Waits until the launch before is done, and returns where it wrote: nothing is read from there any sooner.
template <typename T> __device__ inline T* after_previous_launch(T* written) {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" : "+l"(written)::"memory");
#endif
    return written;
}

// For the end of blocks of which few wait for the launch before: this launch is not done before that one, so that who
// waits for one waits for both.
__device__ inline void end_behind_previous_launch() {
#if __CUDA_ARCH__ >= 900
    if (blockIdx.x == gridDim.x - 1 && blockIdx.y == gridDim.y - 1) asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// The pieces of work that blocks of the first launch leave to the second, in the order in which they do. `board` is
// zeros before: how many blocks are done, how many pieces they have left, and each of these with 1 added.

// For one thread of a block that is done, behind a barrier of all that have written. A function that is called, so that
// the loop before it keeps its registers.
__device__ __noinline__ void report(int* board, bool leaves_work, i64 piece) {
    __threadfence();
    if (leaves_work) {
        volatile int* const place = board + 2 + atomicAdd(board + 1, 1);
        *place = static_cast<int>(piece) + 1;
        __threadfence();
    }
    atomicAdd(board, 1);
}

// Waits for the piece of a place, from 0 on; -1 where all of `blocks` are done and have not left as many.
__device__ inline i64 left_piece(const int* board, i64 place, i64 blocks) {
    const auto read = [](const int* from) {
        int x;
        asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(x) : "l"(from) : "memory");
        return x;
    };
    for (int wait = 100;; wait = min_of(2 * wait, 2000)) {
        const bool is_last_look = read(board) == blocks;
        const int piece = read(board + 2 + place);
        if (piece > 0 || is_last_look) return piece - 1;
        __nanosleep(wait);
    }
}
