// What a block that makes the gradients of keys does, one after another: chunks and key heads.
//
// Needs CHUNK_LEN, PART_LEN beside what slots.cuh needs.
#pragma once
#include "slots.cuh"

// A chunk and key head.
struct Task {
    i64 q, k, u, dy, w, row;    // where its first token lies in the inputs, of the first head, and in rows of outputs
    i64 first_part;             // of factors
    int slot, key_head, steps;  // no steps: there is none left
};
// A block's tasks, one after another.
struct Tasks {
    const i64* cu_seqlens;
    i64 slots, key_heads, sequences, tokens;
    Strides of_q, of_k, of_u, of_dy, of_w;
    unsigned number = blockIdx.x;

    __device__ Task next() {
        for (; number < slots * key_heads; number += gridDim.x) {
            const unsigned slot = number / static_cast<unsigned>(key_heads);
            const Chunk chunk = chunk_of(cu_seqlens, slot, sequences, tokens);
            if (chunk.steps == 0) continue;
            const int key_head = number - slot * static_cast<unsigned>(key_heads);
            number += gridDim.x;
            const i64 first_part = first_checkpoint(cu_seqlens, chunk.sequence, chunk.span, PART_LEN);
            const i64 batch = chunk.span.batch, token = chunk.span.begin + chunk.token;
            const auto start = [&](Strides s) { return batch * s.batch + token * s.token; };
            return {start(of_q) + key_head * of_q.head, start(of_k) + key_head * of_k.head, start(of_u), start(of_dy),
                    start(of_w), batch * tokens + token, first_part + chunk.token / PART_LEN,
                    static_cast<int>(slot), key_head, chunk.steps};
        }
        return {};
    }
};
