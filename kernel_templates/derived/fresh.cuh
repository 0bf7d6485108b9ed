// Numbers that the compiler finds anew, and all that it makes of them: kept, they would not fit into registers.
#pragma once

__device__ inline int fresh(int number) {
    asm volatile("" : "+r"(number));
    return number;
}
