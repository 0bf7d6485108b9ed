// Which chunk a slot belongs to, for kernels that take all chunks at once.
//
// Needs CHUNK_LEN beside what sequence.cuh needs.
#pragma once
#include "sequence.cuh"

// The slot of a block among those of some chunks of every sequence, from `first_chunk` on; the grid's last extent is
// that of sequences. Of a launch for all slots it is 1, and the first chunk 0.
__device__ inline i64 slot_of(unsigned index, int first_chunk, i64 tokens) {
    const unsigned chunks = static_cast<unsigned>((tokens + CHUNK_LEN - 1) / CHUNK_LEN);
    return blockIdx.z * chunks + first_chunk + index;
}

// The same of those `chunks` of every sequence by their number among them.
__device__ inline i64 slot_of_part(i64 number, int chunks, int first_chunk, i64 tokens) {
    return number / chunks * ((tokens + CHUNK_LEN - 1) / CHUNK_LEN) + first_chunk + number % chunks;
}

// The chunk of a slot: slots are numbered as checkpoints are.
struct Chunk {
    Span span;
    i64 sequence, token;  // the first token, counted in the sequence
    int steps;  // none where the slot belongs to no chunk
};
__device__ inline Chunk chunk_of(const i64* cu_seqlens, i64 slot, i64 sequences, i64 tokens) {
    i64 sequence, index;
    if (cu_seqlens == nullptr) {
        // There are fewer blocks than 2^31, and a division of 64 bits is a long one.
        const unsigned chunks = static_cast<unsigned>((tokens + CHUNK_LEN - 1) / CHUNK_LEN), place = slot;
        sequence = place / chunks, index = place % chunks;
    } else {
        i64 last = sequences - 1;  // the last sequence whose first slot is not behind this one
        sequence = 0;
        while (sequence < last) {
            const i64 middle = (sequence + last + 1) / 2;
            const Span span = sequence_span(cu_seqlens, middle, tokens);
            if (first_checkpoint(cu_seqlens, middle, span, CHUNK_LEN) <= slot) sequence = middle;
            else last = middle - 1;
        }
        index = slot - first_checkpoint(cu_seqlens, sequence, sequence_span(cu_seqlens, sequence, tokens), CHUNK_LEN);
    }
    const Span span = sequence_span(cu_seqlens, sequence, tokens);
    const i64 token = index * CHUNK_LEN;
    return {span, sequence, token, static_cast<int>(max(min(span.length - token, i64(CHUNK_LEN)), i64(0)))};
}
