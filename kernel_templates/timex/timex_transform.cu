// TimeX by Fourier transforms, for rows whose length makes T^2 products too many. A transform is a block's, in
// registers and shared memory, from row to row: nothing but rows and spectra of filters goes through memory.
//
// A row of real numbers is a complex one of half the length, z[j] = k[2j] + i k[2j+1], of LENGTH >= T points, so that
// nothing comes round, and the second half of what goes in and comes out is of no interest. With z_h the same of the
// filter h[d] = w[c, T-1-d], capitals for transforms, and theta = pi f / LENGTH,
//
//     Y[f] = A[f] Z[f] + B[f] conj(Z[-f])    A = E - e^(-i theta) sin(theta) O    B = i e^(-i theta) cos(theta) O
//     E[f] = (Z_h[f] + conj(Z_h[-f])) / 2    O[f] = (Z_h[f] - conj(Z_h[-f])) / 2i
//
// where y[j] = out[2j] + i out[2j+1]. Correlations have conj(A) and -conj(B): gk is that of g with h, and gw[c, T-1-d]
// that of g with k at d, as k were the filter, summed over the batch: as a sum of spectra. A 1 / LENGTH is in A and B.
//
//   w        [channels, T]                    T_W    in        k, g  [batch, channels, T]  T_IO  in
//   factors  [channels, 2, LENGTH]  complex   out of timex_factors: A and B; in of timex_transform
//   out      [batch, channels, T]             T_IO   out
//   sums     [groups, channels, T]  fp32  out: gw of some rows each
//   scratch  [blocks, 3, LENGTH]  complex     of timex_transform_gradient: A and B of a row of k, and a sum of spectra
//
// Grids (channels), (channels * batch), (blocks). The rows of a channel follow each other: its factors are more than a
// multiprocessor holds and wait in L2. A block of the gradient takes one group of rows of a channel after another, so
// that its scratch waits there too.
//
// PAIRED: two tokens are read and written at once, which needs an even T and even strides and addresses.
//
// A transform is PASSES passes. In pass p the points are blocks of SIZE = LENGTH, LENGTH / RADIX .., and one of STRIDE
// = SIZE / RADIX threads' butterflies takes the points j, j + STRIDE, .. of a block, a thread ELEMENTS / RADIX of
// these: their transform of RADIX points, its q-th times e^(-2 pi i q j / SIZE), is point j of the q-th block of the
// next pass. So frequencies end with their digits reversed, where factors and spectra meet, and the inverse takes the
// same way back.
#include "types.cuh"

// Passes as few and radices as equal as 32 elements allow.
__device__ constexpr int log_of(int x) { return x <= 1 ? 0 : 1 + log_of(x / 2); }
constexpr int BITS = log_of(LENGTH), PASSES = ceil_div(BITS, 5), ELEMENTS = 1 << ceil_div(BITS, PASSES);
static_assert(LENGTH == 1 << BITS && LENGTH >= 1024, "length must be a power of two, 1024 at least");
static_assert(NUM_THREADS * ELEMENTS == LENGTH, "num_threads must be the transform's length over a thread's elements");
static_assert(SHARED_BYTES == LENGTH / 16 * 17 * 8, "shared_bytes is what the geometry says");

__device__ constexpr int radix(int pass) { return 1 << (BITS + PASSES - 1 - pass) / PASSES; }
__device__ constexpr int stride(int pass) { return pass < 0 ? LENGTH : stride(pass - 1) / radix(pass); }

using Complex = float2;
__device__ inline Complex operator+(Complex a, Complex b) { return {a.x + b.x, a.y + b.y}; }
__device__ inline Complex operator-(Complex a, Complex b) { return {a.x - b.x, a.y - b.y}; }
__device__ inline Complex operator*(Complex a, Complex b) {
    return {fmaf(a.x, b.x, -a.y * b.y), fmaf(a.x, b.y, a.y * b.x)};
}
__device__ inline Complex conjugate(Complex a) { return {a.x, -a.y}; }

// Of n parts of the circle, of which there are 32; constants once loops are unrolled.
__device__ constexpr float cosine(int n) {
    constexpr float of_quarter[9] = {1.0f, 0.98078528040323044913f, 0.92387953251128675613f, 0.83146961230254523708f,
                                     0.70710678118654752440f, 0.55557023301960222474f, 0.38268343236508977173f,
                                     0.19509032201612826785f, 0.0f};
    const int near = n <= 16 ? n : 32 - n;
    return near <= 8 ? of_quarter[near] : -of_quarter[16 - near];
}
// a e^(-2 pi i n / 32), or the other way.
template <bool INVERSE> __device__ inline Complex turned(Complex a, int n) {
    if (n == 0) return a;
    if (n == 8) return INVERSE ? Complex{-a.y, a.x} : Complex{a.y, -a.x};
    const float c = cosine(n), sine = cosine((n + 24) % 32), s = INVERSE ? -sine : sine;
    return {fmaf(a.x, c, a.y * s), fmaf(a.y, c, -a.x * s)};
}
// Of blocks of SIZE among COUNT points; frequencies come out with their bits reversed.
template <bool INVERSE, int SIZE, int COUNT> __device__ inline void split_in_two(Complex (&x)[COUNT]) {
    constexpr int HALF = SIZE / 2;
#pragma unroll
    for (int i = 0; i < COUNT / 2; ++i) {
        const int low = i / HALF * SIZE + i % HALF;
        const Complex a = x[low], b = x[low + HALF];
        x[low] = a + b, x[low + HALF] = turned<INVERSE>(a - b, i % HALF * (32 / SIZE));
    }
    if constexpr (HALF > 1) split_in_two<INVERSE, HALF>(x);
}
__device__ constexpr int reversed(int i, int bits) {
    return bits == 0 ? 0 : (i & 1) << (bits - 1) | reversed(i >> 1, bits - 1);
}
template <bool INVERSE, int RADIX> __device__ inline void transform_points(Complex* x) {
    Complex points[RADIX];
#pragma unroll
    for (int i = 0; i < RADIX; ++i) points[i] = x[i];
    split_in_two<INVERSE, RADIX>(points);
#pragma unroll
    for (int i = 0; i < RADIX; ++i) x[i] = points[reversed(i, log_of(RADIX))];
}

// A thread's butterflies in a pass are as far from each other as all threads' points: they begin in blocks of their
// own, at the same point.
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

// Places in shared memory: one of 16 is left out, so that 16 threads meet different banks in every pass. An element is
// a constant away from the thread's first one, as the lowest four bits never carry.
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

// visit(element, the point -f, f) for the points f of the last pass. To turn a frequency's sign, each of its digits
// turns, but for zeros in front.
template <typename Visit> __device__ inline void with_mirrored(const Complex (&x)[ELEMENTS], Visit visit) {
    extern __shared__ __align__(16) Complex shared[];
    using Last = Butterflies<PASSES - 1>;
    Complex* const from = shared + padded(Last::place());
    __syncthreads();  // nobody reads what was there any more
#pragma unroll
    for (int i = 0; i < ELEMENTS; ++i) from[Last::offset(i) + Last::offset(i) / 16] = x[i];
    __syncthreads();  // all points are there
#pragma unroll
    for (int first = 0; first < ELEMENTS; first += Last::RADIX) {
        const int block = threadIdx.x + first / Last::RADIX * NUM_THREADS;
        int rest = block, mirrored = 0, frequency = 0;
        bool is_zero = true;
#pragma unroll
        for (int pass = 0; pass + 1 < PASSES; ++pass) {
            const int unit = stride(pass) / Last::RADIX, digit = rest / unit;
            mirrored += (is_zero ? (radix(pass) - digit) % radix(pass) : radix(pass) - 1 - digit) * unit;
            frequency += digit * (LENGTH / stride(pass - 1));
            is_zero = is_zero && digit == 0, rest %= unit;
        }
        const Complex* const to = shared + padded(mirrored * Last::RADIX);
#pragma unroll
        for (int q = 0; q < Last::RADIX; ++q) {
            const int turned = Last::RADIX - 1 - q, of_zero = (Last::RADIX - q) % Last::RADIX;
            const Complex there = to[is_zero ? of_zero + of_zero / 16 : turned + turned / 16];
            visit(first + q, there, frequency + q * (LENGTH / Last::RADIX));
        }
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

// Two tokens, of which the second may be none.
template <typename T> struct alignas(2 * sizeof(T)) Pair { T x, y; };

// visit(element, token, whether there is a next one) for the points of the first pass that have tokens.
template <typename Visit> __device__ inline void for_tokens(int tokens, Visit visit) {
    using First = Butterflies<0>;
    static_assert(First::RADIX == ELEMENTS, "threads have one butterfly in the first pass");
#pragma unroll
    for (int i = 0; i < ELEMENTS / 2; ++i) {
        const int token = 2 * (First::place() + First::offset(i));
        if (token < tokens) visit(i, token, PAIRED || token + 1 < tokens);
    }
}
// The transform of a row, or with BACKWARDS of one from its last token to its first.
template <bool BACKWARDS = false, typename T>
__device__ inline void transform_row(Complex (&x)[ELEMENTS], const T* row, int tokens) {
#pragma unroll
    for (int i = 0; i < ELEMENTS; ++i) x[i] = {0.0f, 0.0f};
    for_tokens(tokens, [&](int i, int token, bool has_next) {
        if constexpr (PAIRED) {
            const auto pair = *reinterpret_cast<const Pair<T>*>(row + (BACKWARDS ? tokens - 2 - token : token));
            x[i] = {to_float(BACKWARDS ? pair.y : pair.x), to_float(BACKWARDS ? pair.x : pair.y)};
        } else {
            x[i].x = to_float(row[BACKWARDS ? tokens - 1 - token : token]);
            if (has_next) x[i].y = to_float(row[BACKWARDS ? tokens - 2 - token : token + 1]);
        }
    });
    transform(x);
}
// A row of what x is, plus a constant; or with BACKWARDS from its last token to its first.
template <bool BACKWARDS = false, typename T>
__device__ inline void write_row(const Complex (&x)[ELEMENTS], T* row, int tokens, float plus) {
    for_tokens(tokens, [&](int i, int token, bool has_next) {
        const T first = from_float<T>(x[i].x + plus), second = from_float<T>(x[i].y + plus);
        if constexpr (PAIRED) {
            const Pair<T> pair = {BACKWARDS ? second : first, BACKWARDS ? first : second};
            *reinterpret_cast<Pair<T>*>(row + (BACKWARDS ? tokens - 2 - token : token)) = pair;
        } else {
            row[BACKWARDS ? tokens - 1 - token : token] = first;
            if (has_next) row[BACKWARDS ? tokens - 2 - token : token + 1] = second;
        }
    });
}
// A and B of a filter whose transform is x; of its correlation with CONJUGATES.
template <bool CONJUGATES> __device__ inline void write_factors(const Complex (&x)[ELEMENTS], Complex* factors) {
    with_mirrored(x, [&](int i, Complex there, int frequency) {
        const Complex even = {x[i].x + there.x, x[i].y - there.y}, odd = {x[i].y + there.y, there.x - x[i].x};
        float s, c;
        sincospif(frequency * (1.0f / LENGTH), &s, &c);
        const Complex turned_odd = odd * Complex{c, -s};
        const Complex a = {fmaf(-s, turned_odd.x, even.x), fmaf(-s, turned_odd.y, even.y)};
        const Complex b = {-c * turned_odd.y, c * turned_odd.x};
        constexpr float SCALE = 0.5f / LENGTH;
        factors[i * NUM_THREADS] = {SCALE * a.x, CONJUGATES ? -SCALE * a.y : SCALE * a.y};
        factors[LENGTH + i * NUM_THREADS] = {CONJUGATES ? -SCALE * b.x : SCALE * b.x, SCALE * b.y};
    });
}
// A x + B conj(the point -f); with `conjugates` conj(A) x - conj(B) ..
__device__ inline void multiply(Complex (&x)[ELEMENTS], const Complex* factors, bool conjugates) {
    const float sign = conjugates ? -1.0f : 1.0f;
    with_mirrored(x, [&](int i, Complex there, int) {
        const Complex a = load_early<Complex>(factors + i * NUM_THREADS);
        const Complex b = load_early<Complex>(factors + LENGTH + i * NUM_THREADS);
        x[i] = x[i] * Complex{a.x, sign * a.y} + conjugate(there) * Complex{sign * b.x, b.y};
    });
}

extern "C" __global__ void __launch_bounds__(NUM_THREADS, BLOCKS_PER_SM) timex_factors(
    const T_W* __restrict__ w, Complex* __restrict__ factors, i64 w_stride, int tokens) {
    Complex x[ELEMENTS];
    transform_row<true>(x, w + blockIdx.x * w_stride, tokens);
    write_factors<false>(x, factors + i64(blockIdx.x) * (2 * LENGTH) + threadIdx.x);
}

extern "C" __global__ void __launch_bounds__(NUM_THREADS, BLOCKS_PER_SM) timex_transform(
    const T_IO* __restrict__ k, const Complex* __restrict__ factors, T_IO* __restrict__ out, i64 k_batch_stride,
    i64 k_stride, int batch, int channels, int tokens, float eps, int conjugates) {
    const i64 channel = blockIdx.x / batch, row = blockIdx.x % batch;
    Complex x[ELEMENTS];
    transform_row(x, k + row * k_batch_stride + channel * k_stride, tokens);
    multiply(x, factors + channel * (2 * LENGTH) + threadIdx.x, conjugates);
    transform_back(x);
    write_row(x, out + (row * channels + channel) * tokens, tokens, eps);
}

extern "C" __global__ void __launch_bounds__(NUM_THREADS, GRADIENT_BLOCKS_PER_SM) timex_transform_gradient(
    const T_IO* __restrict__ g, const T_IO* __restrict__ k, Complex* __restrict__ scratch, float* __restrict__ sums,
    i64 g_batch_stride, i64 g_stride, i64 k_batch_stride, i64 k_stride, int batch, int channels, int group_rows,
    int groups, int tokens) {
    scratch += i64(blockIdx.x) * (3 * LENGTH) + threadIdx.x;
    for (i64 item = blockIdx.x; item < i64(channels) * groups; item += gridDim.x) {
        const i64 channel = item / groups, group = item % groups;
        const i64 begin = group * group_rows, end = min(begin + group_rows, i64(batch));
        Complex x[ELEMENTS];
        // A thread alone writes and reads its part of the scratch; sums in registers would leave too few of them.
        for (i64 row = begin; row < end; ++row) {
            transform_row(x, k + row * k_batch_stride + channel * k_stride, tokens);
            write_factors<true>(x, scratch);
            transform_row(x, g + row * g_batch_stride + channel * g_stride, tokens);
            multiply(x, scratch, false);
            Complex* const sum = scratch + 2 * LENGTH;
#pragma unroll
            for (int i = 0; i < ELEMENTS; ++i) {
                if (row > begin) x[i] = x[i] + load_early<Complex>(sum + i * NUM_THREADS);
                if (row + 1 < end) sum[i * NUM_THREADS] = x[i];
            }
        }
        transform_back(x);
        write_row<true>(x, sums + (group * channels + channel) * tokens, tokens, 0.0f);
    }
}
