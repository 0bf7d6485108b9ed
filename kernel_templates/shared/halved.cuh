// Launches for the places that were taken by halves, which are few: blocks look for them, and take one after another.
//
// Needs what mma.cuh needs.
#pragma once
#include "mma.cuh"

// Calls a copy of `visit` with the place of each of `items` that is flagged, of which a place has FLAGS. Every warp
// looks by itself, and all of a block find the same.
template <int FLAGS, typename PlaceOf, typename Visit>
__device__ inline void for_each_halved(const int* halved, i64 items, PlaceOf place_of, Visit visit) {
    for (i64 first = blockIdx.x; first < items; first += i64(32) * gridDim.x) {
        const i64 own = first + i64(lane_id()) * gridDim.x;
        bool wanted = false;
        if (own < items)
#pragma unroll
            for (int i = 0; i < FLAGS; ++i) wanted |= halved[place_of(own) * FLAGS + i] != 0;
        for (unsigned left = __ballot_sync(0xffffffffu, wanted); left != 0; left &= left - 1) {
            Visit once = visit;
            once(place_of(first + i64(__ffs(left) - 1) * gridDim.x));
            __syncthreads();  // nobody works on it any more
        }
    }
}
