// TimeX by Fourier transforms, for rows whose length makes T^2 products too many. A transform is a block's, in registers
// and shared memory, from row to row: nothing but rows and spectra of filters goes through memory.
//
//     y = inverse(H z)    H the spectrum of h[d] = w[c, T-1-d]    z = k[b, c] + i k[b+1, c]
//
// Two rows of the batch are one complex row, since h is real: y is out[b, c] + i out[b+1, c]. Transforms have LENGTH
// >= 2 T points, so that nothing comes round, and the second half of what goes in and comes out is of no interest. The two
// share their rounding: each is as exact as the larger one allows. With g the gradient of out, correlations are products
// with conjugates:
//
//     gk = inverse(conj(H) z_g)        gh = Re inverse(sum over pairs of z_g conj(z_k))    gw[c, T-1-d] = gh[d]
//
//   w        [channels, T]         T_W    in        k, g  [batch, channels, T]  T_IO  in
//   spectra  [channels, LENGTH]  complex  out of timex_spectrum, divided by LENGTH; in of timex_transform
//   out      [batch, channels, T]  T_IO   out       sums  [groups, channels, T]  fp32  out: gw of some pairs each
//
// Grids (channels), (channels, pairs of rows), (channels, groups of pairs).
//
// A transform is PASSES passes. In pass p the points are blocks of SIZE = LENGTH, LENGTH / RADIX .., and one of STRIDE =
// SIZE / RADIX threads' butterflies takes the points j, j + STRIDE, .. of a block, a thread ELEMENTS / RADIX of these:
// their transform of RADIX points, its q-th times e^(-2 pi i q j / SIZE), is point j of the q-th block of the next pass. So
// frequencies end in an order of their own, which all spectra share, and the inverse takes the same way back.
#include "types.cuh"

// 2^BITS, with as few passes of equal radices as 32 elements allow, or 3 2^BITS, first 24 points and then up to 8.
constexpr bool HAS_THREE = LENGTH % 3 == 0;
__device__ constexpr int log_of(int x) { return x <= 1 ? 0 : 1 + log_of(x / 2); }
constexpr int BITS = log_of(HAS_THREE ? LENGTH / 3 : LENGTH);
constexpr int PASSES = HAS_THREE ? 1 + ceil_div(BITS - 3, 3) : ceil_div(BITS, 5);
constexpr int ELEMENTS = HAS_THREE ? 24 : 1 << ceil_div(BITS, PASSES);
static_assert(LENGTH == (HAS_THREE ? 3 : 1) << BITS && LENGTH >= 1024, "length must be 2^n or 3 2^n, 1024 at least");
static_assert(NUM_THREADS * ELEMENTS == LENGTH, "num_threads must be the transform's length over a thread's elements");
static_assert(SHARED_BYTES == LENGTH / 16 * 17 * 8, "shared_bytes is what the geometry says");

__device__ constexpr int radix(int pass) {
    if (HAS_THREE) return pass == 0 ? 24 : 1 << (BITS - 3 + PASSES - 1 - pass) / (PASSES - 1);
    return 1 << (BITS + PASSES - 1 - pass) / PASSES;
}
__device__ constexpr int stride(int pass) { return pass < 0 ? LENGTH : stride(pass - 1) / radix(pass); }

using Complex = float2;
__device__ inline Complex operator+(Complex a, Complex b) { return {a.x + b.x, a.y + b.y}; }
__device__ inline Complex operator-(Complex a, Complex b) { return {a.x - b.x, a.y - b.y}; }
__device__ inline Complex operator*(Complex a, Complex b) {
    return {fmaf(a.x, b.x, -a.y * b.y), fmaf(a.x, b.y, a.y * b.x)};
}
__device__ inline Complex conjugate(Complex a) { return {a.x, -a.y}; }

// ---- transforms of a thread's points ---------------------------------------------------------------------------

// Of n parts of the circle, of which there are 24 or 32; constants once loops are unrolled.
template <int PARTS> __device__ constexpr float cosine(int n) {
    constexpr float of_32[9] = {1.0f, 0.98078528040323044913f, 0.92387953251128675613f, 0.83146961230254523708f,
                                0.70710678118654752440f, 0.55557023301960222474f, 0.38268343236508977173f,
                                0.19509032201612826785f, 0.0f};
    constexpr float of_24[7] = {1.0f, 0.96592582628906828675f, 0.86602540378443864676f, 0.70710678118654752440f, 0.5f,
                                0.25881904510252076235f, 0.0f};
    const int near = n <= PARTS / 2 ? n : PARTS - n, of_quarter = near <= PARTS / 4 ? near : PARTS / 2 - near;
    const float x = PARTS == 24 ? of_24[of_quarter] : of_32[of_quarter];
    return near <= PARTS / 4 ? x : -x;
}
// a e^(-2 pi i n / PARTS), or the other way.
template <bool INVERSE, int PARTS> __device__ inline Complex turned(Complex a, int n) {
    if (n == 0) return a;
    if (n == PARTS / 4) return INVERSE ? Complex{-a.y, a.x} : Complex{a.y, -a.x};
    const float c = cosine<PARTS>(n), sine = cosine<PARTS>((n + 3 * PARTS / 4) % PARTS), s = INVERSE ? -sine : sine;
    return {fmaf(a.x, c, a.y * s), fmaf(a.y, c, -a.x * s)};
}
// Of blocks of SIZE among COUNT points; frequencies come out with their bits reversed.
template <bool INVERSE, int SIZE, int COUNT> __device__ inline void split_in_two(Complex (&x)[COUNT]) {
    constexpr int HALF = SIZE / 2;
#pragma unroll
    for (int i = 0; i < COUNT / 2; ++i) {
        const int low = i / HALF * SIZE + i % HALF;
        const Complex a = x[low], b = x[low + HALF];
        x[low] = a + b, x[low + HALF] = turned<INVERSE, 32>(a - b, i % HALF * (32 / SIZE));
    }
    if constexpr (HALF > 1) split_in_two<INVERSE, HALF>(x);
}
// Of 24 points three blocks of eight, of every third frequency each.
template <bool INVERSE> __device__ inline void split_in_three(Complex (&x)[24]) {
    constexpr float HALF_ROOT = INVERSE ? -0.86602540378443864676f : 0.86602540378443864676f;
#pragma unroll
    for (int i = 0; i < 8; ++i) {
        const Complex a = x[i], sum = x[i + 8] + x[i + 16], difference = x[i + 8] - x[i + 16];
        const Complex middle = {fmaf(-0.5f, sum.x, a.x), fmaf(-0.5f, sum.y, a.y)};
        const Complex turn = {HALF_ROOT * difference.y, -HALF_ROOT * difference.x};
        x[i] = a + sum;
        x[i + 8] = turned<INVERSE, 24>(middle + turn, i);
        x[i + 16] = turned<INVERSE, 24>(middle - turn, 2 * i);
    }
}
__device__ constexpr int reversed(int i, int bits) {
    return bits == 0 ? 0 : (i & 1) << (bits - 1) | reversed(i >> 1, bits - 1);
}
template <bool INVERSE, int RADIX> __device__ inline void transform_points(Complex* x) {
    Complex points[RADIX];
#pragma unroll
    for (int i = 0; i < RADIX; ++i) points[i] = x[i];
    if constexpr (RADIX == 24) split_in_three<INVERSE>(points), split_in_two<INVERSE, 8>(points);
    else split_in_two<INVERSE, RADIX>(points);
#pragma unroll
    for (int i = 0; i < RADIX; ++i)
        x[i] = points[RADIX == 24 ? i % 3 * 8 + reversed(i / 3, 3) : reversed(i, log_of(RADIX))];
}

// ---- passes ----------------------------------------------------------------------------------------------------

// A thread's butterflies in a pass are as far from each other as all threads' points: they begin in blocks of their own,
// at the same point.
template <int PASS> struct Butterflies {
    static constexpr int RADIX = radix(PASS), STRIDE = stride(PASS);
    static_assert(NUM_THREADS % STRIDE == 0, "a pass has threads for whole blocks");

    __device__ static int point() { return threadIdx.x % STRIDE; }
    __device__ static int place() { return threadIdx.x / STRIDE * (STRIDE * RADIX) + point(); }  // of the first element
    __device__ static constexpr int offset(int element) {
        return element / RADIX * (NUM_THREADS * RADIX) + element % RADIX * STRIDE;
    }
};

// The q-th of each RADIX elements times e^(-2 pi i q j / SIZE), or the other way.
template <bool INVERSE, int PASS> __device__ inline void turn_points(Complex (&x)[ELEMENTS]) {
    using Here = Butterflies<PASS>;
    int j = Here::point();
    asm volatile("" : "+r"(j));  // worked out anew in each transform, and not kept in registers from one to the next
    const auto factor = [&](int power) -> Complex {
        float s, c;
        sincospif(static_cast<float>(power * j) * (2.0f / (Here::STRIDE * Here::RADIX)), &s, &c);
        return {c, INVERSE ? s : -s};
    };
    const auto turn = [&](int q, Complex by) {
#pragma unroll
        for (int i = q; i < ELEMENTS; i += Here::RADIX) x[i] = x[i] * by;
    };
    Complex first[4], high;  // the factor to the powers of 1, 2, 3 and of multiples of 4
    first[1] = factor(1), first[2] = first[1] * first[1], first[3] = first[2] * first[1];
    const Complex step = Here::RADIX > 4 ? factor(4) : Complex{};
    turn(1, first[1]);
    if constexpr (Here::RADIX > 2) turn(2, first[2]), turn(3, first[3]);
#pragma unroll
    for (int q = 4; q < Here::RADIX; q += 4) {
        high = q == 4 ? step : q == 16 ? factor(16) : high * step;
        turn(q, high);
#pragma unroll
        for (int i = 1; i < 4; ++i) turn(q + i, high * first[i]);
    }
}

// Places in shared memory: one of 16 is left out, so that 16 threads meet different banks in every pass. An element is a
// constant away from the thread's first one, as the lowest four bits never carry.
__device__ inline int padded(int place) { return place + place / 16; }

// From the places of one pass to those of another.
template <int FROM, int TO> __device__ inline void exchange(Complex (&x)[ELEMENTS]) {
    extern __shared__ __align__(16) Complex shared[];
    Complex* const from = shared + padded(Butterflies<FROM>::place());
    const Complex* const to = shared + padded(Butterflies<TO>::place());
    __syncthreads();  // nobody reads what was there any more
#pragma unroll
    for (int i = 0; i < ELEMENTS; ++i) {
        constexpr auto offset = Butterflies<FROM>::offset;
        from[offset(i) + offset(i) / 16] = x[i];
    }
    __syncthreads();  // all points are there
#pragma unroll
    for (int i = 0; i < ELEMENTS; ++i) {
        constexpr auto offset = Butterflies<TO>::offset;
        x[i] = to[offset(i) + offset(i) / 16];
    }
}

template <int PASS = 0> __device__ inline void transform(Complex (&x)[ELEMENTS]) {
    using Here = Butterflies<PASS>;
#pragma unroll
    for (int i = 0; i < ELEMENTS; i += Here::RADIX) transform_points<false, Here::RADIX>(x + i);
    if constexpr (Here::STRIDE > 1) turn_points<false, PASS>(x);
    if constexpr (PASS + 1 < PASSES) exchange<PASS, PASS + 1>(x), transform<PASS + 1>(x);
}
template <int PASS = PASSES - 1> __device__ inline void transform_back(Complex (&x)[ELEMENTS]) {
    using Here = Butterflies<PASS>;
    if constexpr (Here::STRIDE > 1) turn_points<true, PASS>(x);
#pragma unroll
    for (int i = 0; i < ELEMENTS; i += Here::RADIX) transform_points<true, Here::RADIX>(x + i);
    if constexpr (PASS > 0) exchange<PASS, PASS - 1>(x), transform_back<PASS - 1>(x);
}

// ---- rows ------------------------------------------------------------------------------------------------------

// visit(element, token) for the points of the first pass that may be tokens: those of the first half.
template <typename Visit> __device__ inline void for_tokens(int tokens, Visit visit) {
    using First = Butterflies<0>;
    static_assert(First::RADIX == ELEMENTS, "threads have one butterfly in the first pass");
#pragma unroll
    for (int i = 0; i < ELEMENTS / 2; ++i) {
        const int token = First::place() + First::offset(i);
        if (token < tokens) visit(i, token);
    }
}
__device__ inline void clear(Complex (&x)[ELEMENTS]) {
#pragma unroll
    for (int i = 0; i < ELEMENTS; ++i) x[i] = {0.0f, 0.0f};
}
// A row, and the one `row_stride` behind it, if there is one.
template <typename T>
__device__ inline void load_rows(Complex (&x)[ELEMENTS], const T* row, i64 row_stride, bool has_second, int tokens) {
    clear(x);
    for_tokens(tokens, [&](int i, int token) { x[i].x = to_float(row[token]); });
    if (has_second) for_tokens(tokens, [&](int i, int token) { x[i].y = to_float(row[row_stride + token]); });
}

extern "C" __global__ void __launch_bounds__(NUM_THREADS, BLOCKS_PER_SM) timex_spectrum(
    const T_W* __restrict__ w, Complex* __restrict__ spectra, i64 w_stride, int tokens) {
    const T_W* const row = w + blockIdx.x * w_stride;
    Complex x[ELEMENTS];
    clear(x);
    for_tokens(tokens, [&](int i, int token) { x[i].x = to_float(row[tokens - 1 - token]); });
    transform(x);
    spectra += i64(blockIdx.x) * LENGTH + threadIdx.x;
#pragma unroll
    for (int i = 0; i < ELEMENTS; ++i) spectra[i * NUM_THREADS] = {x[i].x / LENGTH, x[i].y / LENGTH};
}

extern "C" __global__ void __launch_bounds__(NUM_THREADS, BLOCKS_PER_SM) timex_transform(
    const T_IO* __restrict__ k, const Complex* __restrict__ spectra, T_IO* __restrict__ out, i64 k_batch_stride,
    i64 k_stride, i64 batch, i64 channels, int tokens, float eps, int conjugates) {
    const i64 channel = blockIdx.x, row = i64(blockIdx.y) * 2;
    const bool has_second = row + 1 < batch;
    Complex x[ELEMENTS];
    load_rows(x, k + row * k_batch_stride + channel * k_stride, k_batch_stride, has_second, tokens);
    transform(x);
    spectra += channel * LENGTH + threadIdx.x;
    const float sign = conjugates ? -1.0f : 1.0f;
#pragma unroll
    for (int i = 0; i < ELEMENTS; ++i) {
        const Complex h = load_early<Complex>(spectra + i * NUM_THREADS);
        x[i] = x[i] * Complex{h.x, sign * h.y};
    }
    transform_back(x);
    T_IO* const first = out + (row * channels + channel) * tokens;
    T_IO* const second = first + channels * tokens;
    for_tokens(tokens, [&](int i, int token) {
        first[token] = from_float<T_IO>(x[i].x + eps);
        if (has_second) second[token] = from_float<T_IO>(x[i].y + eps);
    });
}

extern "C" __global__ void __launch_bounds__(NUM_THREADS, BLOCKS_PER_SM) timex_transform_gradient(
    const T_IO* __restrict__ g, const T_IO* __restrict__ k, Complex* __restrict__ spectra, float* __restrict__ sums,
    i64 g_batch_stride, i64 g_stride, i64 k_batch_stride, i64 k_stride, i64 batch, i64 channels, i64 group_rows,
    int tokens) {
    const i64 channel = blockIdx.x, begin = blockIdx.y * group_rows, end = min(begin + group_rows, batch);
    g += channel * g_stride, k += channel * k_stride;
    const i64 place = blockIdx.y * channels + channel;
    Complex* const of_g = spectra + place * LENGTH + threadIdx.x;  // which this thread alone writes and reads
    float sum[ELEMENTS] = {};
    for (i64 row = begin; row < end; row += 2) {
        const bool has_second = row + 1 < end;
        Complex x[ELEMENTS];
        load_rows(x, g + row * g_batch_stride, g_batch_stride, has_second, tokens);
        transform(x);
#pragma unroll
        for (int i = 0; i < ELEMENTS; ++i) of_g[i * NUM_THREADS] = x[i];
        load_rows(x, k + row * k_batch_stride, k_batch_stride, has_second, tokens);
        transform(x);
#pragma unroll
        for (int i = 0; i < ELEMENTS; ++i) x[i] = load_early<Complex>(of_g + i * NUM_THREADS) * conjugate(x[i]);
        transform_back(x);
        for_tokens(tokens, [&](int i, int) { sum[i] += x[i].x; });
    }
    sums += place * tokens;
    for_tokens(tokens, [&](int i, int token) { sums[tokens - 1 - token] = sum[i] / LENGTH; });
}
