// Order statistics over n rows, column by column, by the compare-exchange networks of network.py.
//
// One vector of columns of all rows at a time: a comparator is one vector minimum and one maximum. Built in two ways:
//   as it is                the network is a table that is read while sorting: for any n
//   with -DROWS=n -DNETWORK=...   the network is straight-line code and the rows stay in registers: for one (n, ranks)
// Every operation is that of the PyTorch version in sorting.py, in the same order and without contraction, so that all
// give the same bits. Nothing is needed but GCC's or Clang's vector extensions.

#include <cstdint>
#include <cstring>
#include <vector>

namespace {

constexpr int MOST = 128;    // rows
constexpr int BYTES = 64;    // of a vector; also of a cache line
constexpr int AHEAD = 1024;  // bytes of each row that are fetched before their turn: hardware follows few streams

#define INLINE inline __attribute__((always_inline))
#ifdef ROWS
#define UNROLL _Pragma("GCC unroll 128")
#else
#define UNROLL
#endif
#define UNROLL4 _Pragma("GCC unroll 4")

struct BFloat16 {
    uint16_t bits;
};

template <typename C>
struct Vectors;
template <>
struct Vectors<float> {
    typedef float V __attribute__((vector_size(BYTES)));
    static constexpr int LANES = BYTES / 4;
};
template <>
struct Vectors<double> {
    typedef double V __attribute__((vector_size(BYTES)));
    static constexpr int LANES = BYTES / 8;
};

struct Comparator {  // as network.Comparator
    int32_t low, high, wants_low, wants_high;
};

// What is asked for: the mean of the sorted wires lo .. hi-1 (of two with `halves`: half of each) or, if `keep` is not 0,
// the mean of that many values nearest to it.
struct Job {
    int n, lo, hi, halves, keep;
    const Comparator* network;
    int comparators;
};

template <typename V, typename C>
INLINE V load(const C* from, C) {
    V out;
    std::memcpy(&out, from, sizeof(V));
    return out;
}
template <typename V>
INLINE V load(const BFloat16* from, float) {
    uint32_t wide[BYTES / 4];
    for (int k = 0; k < BYTES / 4; ++k) wide[k] = uint32_t(from[k].bits) << 16;
    V out;
    std::memcpy(&out, wide, sizeof(V));
    return out;
}

template <typename V>
INLINE void compare(V& a, V& b) {
    const V x = a, y = b;
    a = y < x ? y : x;
    b = y < x ? x : y;
}
template <typename V>
INLINE void lower(V& a, const V& b) {
    a = b < a ? b : a;
}
template <typename V>
INLINE void raise(const V& a, V& b) {
    b = b < a ? a : b;
}

template <typename V>
INLINE void sort(V* w, const Job& job) {
#ifdef NETWORK
#define BOTH(i, j) compare(w[i], w[j]);
#define LOW(i, j) lower(w[i], w[j]);
#define HIGH(i, j) raise(w[i], w[j]);
    NETWORK
#else
    for (int c = 0; c < job.comparators; ++c) {
        const Comparator one = job.network[c];
        if (one.wants_low && one.wants_high) compare(w[one.low], w[one.high]);
        else if (one.wants_low) lower(w[one.low], w[one.high]);
        else raise(w[one.low], w[one.high]);
    }
#endif
}

template <typename V, typename C>
INLINE V mean(const V* w, int lo, int hi, bool halves, C) {
    if (hi - lo == 2 && halves) return w[lo] * C(0.5) + w[lo + 1] * C(0.5);
    V out = w[lo];
    UNROLL for (int i = lo + 1; i < hi; ++i) out += w[i];
    return hi - lo > 1 ? out / C(hi - lo) : out;
}

// The window of `keep` sorted values moves up while the value that it gains is nearer than the one that it loses.
template <typename V, typename C>
INLINE V nearest(V* w, const V& centre, const Job& job, C zero) {
    UNROLL for (int lost = 0; lost < job.n - job.keep; ++lost) {
        const V loses = w[lost], gains = w[lost + job.keep];
        V& kept = w[lost % job.keep];
        kept = centre - loses > gains - centre ? gains : kept;
    }
    return mean(w, 0, job.keep, false, zero);
}

INLINE void fetch(const void* from) {
    __builtin_prefetch(reinterpret_cast<const void*>(reinterpret_cast<uintptr_t>(from) + AHEAD));
}

template <typename T, typename C>
INLINE typename Vectors<C>::V one_vector(const T* rows, int64_t stride, const Job& job) {
    typedef typename Vectors<C>::V V;
#ifdef ROWS
    V w[ROWS];
#else
    V w[MOST];
#endif
    UNROLL for (int i = 0; i < job.n; ++i) {
        fetch(rows + i * stride);
        w[i] = load<V>(rows + i * stride, C(0));
    }
    sort(w, job);
    const V centre = mean(w, job.lo, job.hi, job.halves, C(0));
    return job.keep ? nearest(w, centre, job, C(0)) : centre;
}

// The last columns, in a copy that is as wide as a vector.
template <typename T, int LANES>
void pad(const T* rows, int64_t stride, int n, int64_t width, T (*to)[LANES]) {
    std::memset(to, 0, sizeof(T) * LANES * n);
    for (int i = 0; i < n; ++i) std::memcpy(to[i], rows + i * stride, sizeof(T) * width);
}

template <typename T, typename C>
void reduce(const T* rows, int64_t stride, int64_t columns, const Job job, C* out) {
    constexpr int LANES = Vectors<C>::LANES;
    int64_t k = 0;
    for (; k + LANES <= columns; k += LANES) {
        const auto found = one_vector<T, C>(rows + k, stride, job);
        std::memcpy(out + k, &found, BYTES);
    }
    if (k < columns) {
        T last[MOST][LANES];
        pad(rows + k, stride, job.n, columns - k, last);
        const auto found = one_vector<T, C>(last[0], LANES, job);
        std::memcpy(out + k, &found, sizeof(C) * (columns - k));
    }
}

INLINE void narrow(const float* from, int64_t columns, float* to) { std::memcpy(to, from, sizeof(float) * columns); }
INLINE void narrow(const double* from, int64_t columns, double* to) { std::memcpy(to, from, sizeof(double) * columns); }
INLINE void narrow(const float* from, int64_t columns, BFloat16* to) {  // to nearest, ties to even, as PyTorch
    for (int64_t k = 0; k < columns; ++k) {
        uint32_t bits;
        std::memcpy(&bits, from + k, 4);
        const uint32_t rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
        to[k].bits = (bits & 0x7fffffff) > 0x7f800000 ? uint16_t(0x7fc0) : uint16_t(rounded);
    }
}

// Rows minus their median, and the median.
template <typename T, typename C>
void centre(const T* rows, int64_t stride, int64_t columns, const Job job, C* out, int64_t out_stride, C* median) {
    typedef typename Vectors<C>::V V;
    constexpr int LANES = Vectors<C>::LANES;
    int64_t k = 0;
    for (; k + LANES <= columns; k += LANES) {
        const V middle = one_vector<T, C>(rows + k, stride, job);
        for (int i = 0; i < job.n; ++i) {
            const V offset = load<V>(rows + i * stride + k, C(0)) - middle;
            std::memcpy(out + i * out_stride + k, &offset, BYTES);
        }
        std::memcpy(median + k, &middle, BYTES);
    }
    if (k < columns) {
        T last[MOST][LANES];
        pad(rows + k, stride, job.n, columns - k, last);
        const V middle = one_vector<T, C>(last[0], LANES, job);
        for (int i = 0; i < job.n; ++i) {
            const V offset = load<V>(last[i], C(0)) - middle;
            std::memcpy(out + i * out_stride + k, &offset, sizeof(C) * (columns - k));
        }
        std::memcpy(median + k, &middle, sizeof(C) * (columns - k));
    }
}

#if defined(__GNUC__) && !defined(__clang__)
#define CONTRACT __attribute__((noinline, optimize("fp-contract=fast")))
#else
#define CONTRACT __attribute__((noinline))
#endif

constexpr int TILE = 512;  // columns

// All inner products of the rows minus their median, and of the median, which comes last: summed in the compute type
// over a tile, then in float64, in eight partial sums for each product, which are added up at the end.
typedef double Wide __attribute__((vector_size(BYTES)));
constexpr int PARTIAL = BYTES / 8;

INLINE Wide wide(const Vectors<double>::V& part) { return part; }
INLINE Wide wide(const Vectors<float>::V& part) {
    typedef float Half __attribute__((vector_size(BYTES / 2)));
    Half halves[2];
    std::memcpy(halves, &part, BYTES);
    return __builtin_convertvector(halves[0], Wide) + __builtin_convertvector(halves[1], Wide);
}

struct Products {
    int size;
    std::vector<double> sums;
    explicit Products(int size) : size(size), sums(size_t(size) * size * PARTIAL, 0.0) {}
    template <typename V>
    INLINE void add(int i, int j, const V& part) {
        double* to = sums.data() + (size_t(i) * size + j) * PARTIAL;
        Wide sum;
        std::memcpy(&sum, to, BYTES);
        sum += wide(part);
        std::memcpy(to, &sum, BYTES);
    }
};

// Of up to four rows from `first` on among themselves and with the median.
template <typename C>
CONTRACT void add_own(const C* tile, const C* median, int first, int width, Products& products) {
    typedef typename Vectors<C>::V V;
    constexpr int LANES = Vectors<C>::LANES;
    const int n = products.size - 1;
    const C* a = tile + first * TILE;
    V sums[4][4] = {}, with_median[4] = {};
#ifdef __clang__
#pragma clang fp contract(fast)
#endif
    for (int k = 0; k < width; k += LANES) {
        V x[4], m;
        std::memcpy(&m, median + k, BYTES);
        UNROLL4 for (int i = 0; i < 4; ++i) {
            std::memcpy(&x[i], a + i * TILE + k, BYTES);
            with_median[i] += x[i] * m;
        }
        UNROLL4 for (int i = 0; i < 4; ++i) UNROLL4 for (int j = i; j < 4; ++j) sums[i][j] += x[i] * x[j];
    }
    for (int i = 0; i < 4 && first + i < n; ++i) {
        products.add(first + i, n, with_median[i]);
        for (int j = i; j < 4 && first + j < n; ++j) products.add(first + i, first + j, sums[i][j]);
    }
}

// Of four rows from `first` on and up to four from `second` on.
template <typename C>
CONTRACT void add_mutual(const C* tile, int first, int second, int width, Products& products) {
    typedef typename Vectors<C>::V V;
    constexpr int LANES = Vectors<C>::LANES;
    const int n = products.size - 1;
    const C *a = tile + first * TILE, *b = tile + second * TILE;
    V sums[4][4] = {};
#ifdef __clang__
#pragma clang fp contract(fast)
#endif
    for (int k = 0; k < width; k += LANES) {
        V x[4], y[4];
        UNROLL4 for (int i = 0; i < 4; ++i) std::memcpy(&x[i], a + i * TILE + k, BYTES);
        UNROLL4 for (int i = 0; i < 4; ++i) std::memcpy(&y[i], b + i * TILE + k, BYTES);
        UNROLL4 for (int i = 0; i < 4; ++i) UNROLL4 for (int j = 0; j < 4; ++j) sums[i][j] += x[i] * y[j];
    }
    for (int i = 0; i < 4; ++i)
        for (int j = 0; j < 4 && second + j < n; ++j) products.add(first + i, second + j, sums[i][j]);
}

template <typename C>
CONTRACT void add_square(const C* median, int width, Products& products) {
    typedef typename Vectors<C>::V V;
    V sum = {};
#ifdef __clang__
#pragma clang fp contract(fast)
#endif
    for (int k = 0; k < width; k += Vectors<C>::LANES) {
        V m;
        std::memcpy(&m, median + k, BYTES);
        sum += m * m;
    }
    products.add(products.size - 1, products.size - 1, sum);
}

template <typename T, typename C>
void gram(const T* rows, int64_t stride, int64_t columns, const Job job, double* total) {
    const int n = job.n, padded = (n + 3) / 4 * 4, size = n + 1;
    std::vector<C> tile(size_t(padded + 1) * TILE, C(0));
    C* median = tile.data() + size_t(padded) * TILE;
    Products products(size);
    for (int64_t k = 0; k < columns; k += TILE) {
        const int width = columns - k < TILE ? int(columns - k) : TILE;
        if (width < TILE) tile.assign(tile.size(), C(0));
        centre(rows + k, stride, width, job, tile.data(), TILE, median);
        for (int first = 0; first < n; first += 4) {
            add_own(tile.data(), median, first, width, products);
            for (int second = first + 4; second < n; second += 4)
                add_mutual(tile.data(), first, second, width, products);
        }
        add_square(median, width, products);
    }
    for (int i = 0; i < size; ++i)
        for (int j = i; j < size; ++j)
            for (int k = 0; k < PARTIAL; ++k)
                total[i * size + j] += products.sums[(size_t(i) * size + j) * PARTIAL + k];
}

INLINE float widened(float x) { return x; }
INLINE double widened(double x) { return x; }
INLINE float widened(BFloat16 x) {
    const uint32_t bits = uint32_t(x.bits) << 16;
    float out;
    std::memcpy(&out, &bits, 4);
    return out;
}

// Squared differences to one row: summed in the compute type over a tile, lane by lane, then in float64.
template <typename T, typename C>
CONTRACT void squares(const T* rows, int64_t stride, int n, int64_t columns, const C* from, double* sums) {
    typedef typename Vectors<C>::V V;
    constexpr int LANES = Vectors<C>::LANES;
#ifdef __clang__
#pragma clang fp contract(fast)
#endif
    for (int i = 0; i < n; ++i) {
        const T* row = rows + i * stride;
        double total = 0;
        for (int64_t start = 0; start < columns; start += TILE) {
            const int64_t stop = columns - start < TILE ? columns : start + TILE;
            V lanes[4] = {};
            int64_t k = start;
            for (; k + 4 * LANES <= stop; k += 4 * LANES)
                UNROLL4 for (int j = 0; j < 4; ++j) {
                    const V d = load<V>(row + k + j * LANES, C(0)) - load<V>(from + k + j * LANES, C(0));
                    lanes[j] += d * d;
                }
            const V all = (lanes[0] + lanes[1]) + (lanes[2] + lanes[3]);
            for (int j = 0; j < LANES; ++j) total += double(all[j]);
            for (; k < stop; ++k) {
                const C d = widened(row[k]) - from[k];
                total += double(d * d);
            }
        }
        sums[i] += total;
    }
}

// Both in one pass: a tile of the rows is in the cache when its distances are taken.
constexpr int WIDE = 2048;  // columns

template <typename T, typename C>
void reduce_into(const T* rows, int64_t stride, int64_t columns, const Job job, T* out, double* sums) {
    C found[WIDE];
    for (int64_t k = 0; k < columns; k += WIDE) {
        const int64_t width = columns - k < WIDE ? columns - k : WIDE;
        reduce(rows + k, stride, width, job, found);
        squares(rows + k, stride, job.n, width, found, sums);
        narrow(found, width, out + k);
    }
}

// Weighted sum of the rows; those without weight are not read.
template <typename T, typename C, int VECTORS>
CONTRACT void mix_columns(const T* rows, int64_t stride, int n, const C* weights, C* out) {
    typedef typename Vectors<C>::V V;
    constexpr int LANES = Vectors<C>::LANES;
#ifdef __clang__
#pragma clang fp contract(fast)
#endif
    V sums[VECTORS] = {};
    for (int i = 0; i < n; ++i) {
        if (weights[i] == C(0)) continue;
        const T* row = rows + i * stride;
        UNROLL4 for (int j = 0; j < VECTORS; ++j) {
            fetch(row + j * LANES);
            sums[j] += load<V>(row + j * LANES, C(0)) * weights[i];
        }
    }
    std::memcpy(out, sums, sizeof(sums));
}

template <typename T, typename C>
void mix(const T* rows, int64_t stride, int n, int64_t columns, const C* weights, T* out) {
    constexpr int LANES = Vectors<C>::LANES, STEP = 4 * LANES;
    C found[STEP];
    int64_t k = 0;
    for (; k + STEP <= columns; k += STEP) {
        mix_columns<T, C, 4>(rows + k, stride, n, weights, found);
        narrow(found, STEP, out + k);
    }
    for (; k < columns; k += LANES) {
        T last[MOST][LANES];
        const int64_t width = columns - k < LANES ? columns - k : LANES;
        pad(rows + k, stride, n, width, last);
        mix_columns<T, C, 1>(last[0], LANES, n, weights, found);
        narrow(found, width, out + k);
    }
}

// No exponent has all bits set.
template <typename T, typename U>
bool finite(const T* row, int64_t columns, U exponent) {
    U found = 0;
    for (int64_t k = 0; k < columns; ++k) {
        U bits;
        std::memcpy(&bits, row + k, sizeof(U));
        found |= U((bits & exponent) == exponent);
    }
    return !found;
}
INLINE bool finite(const float* row, int64_t columns) { return finite(row, columns, uint32_t(0x7f800000)); }
INLINE bool finite(const BFloat16* row, int64_t columns) { return finite(row, columns, uint16_t(0x7f80)); }
INLINE bool finite(const double* row, int64_t columns) { return finite(row, columns, uint64_t(0x7ff0000000000000)); }

#ifdef ROWS
constexpr Job FIXED{ROWS, LO, HI, HALVES, KEEP, nullptr, 0};
#define JOB FIXED
#else
#define JOB \
    Job { n, lo, hi, halves, keep, static_cast<const Comparator*>(network), comparators }
#endif

#define FOR_TYPES(CALL)                          \
    switch (type) {                              \
        case 0: CALL(float, float); return 0;    \
        case 1: CALL(BFloat16, float); return 0; \
        case 2: CALL(double, double); return 0;  \
        default: return 1;                       \
    }

}  // namespace

// type: 0 float32, 1 bfloat16 (computed and returned in float32), 2 float64. All return 0, or 1 for an unknown type.
extern "C" {

int ds_byzantine_reduce(int type, const void* rows, int64_t stride, int n, int64_t columns, const void* network,
                        int comparators, int lo, int hi, int halves, int keep, void* out) {
#define CALL(T, C) reduce(static_cast<const T*>(rows), stride, columns, JOB, static_cast<C*>(out))
    FOR_TYPES(CALL)
#undef CALL
}

int ds_byzantine_reduce_into(int type, const void* rows, int64_t stride, int n, int64_t columns, const void* network,
                             int comparators, int lo, int hi, int halves, int keep, void* out, double* sums) {
#define CALL(T, C) reduce_into<T, C>(static_cast<const T*>(rows), stride, columns, JOB, static_cast<T*>(out), sums)
    FOR_TYPES(CALL)
#undef CALL
}

int ds_byzantine_gram(int type, const void* rows, int64_t stride, int n, int64_t columns, const void* network,
                      int comparators, int lo, int hi, int halves, int keep, double* total) {
#define CALL(T, C) gram<T, C>(static_cast<const T*>(rows), stride, columns, JOB, total)
    FOR_TYPES(CALL)
#undef CALL
}

int ds_byzantine_squares(int type, const void* rows, int64_t stride, int n, int64_t columns, const void* from,
                         double* sums) {
#define CALL(T, C) squares(static_cast<const T*>(rows), stride, n, columns, static_cast<const C*>(from), sums)
    FOR_TYPES(CALL)
#undef CALL
}

int ds_byzantine_mix(int type, const void* rows, int64_t stride, int n, int64_t columns, const void* weights, void* out) {
#define CALL(T, C) \
    mix<T, C>(static_cast<const T*>(rows), stride, n, columns, static_cast<const C*>(weights), static_cast<T*>(out))
    FOR_TYPES(CALL)
#undef CALL
}

int ds_byzantine_finite(int type, const void* rows, int64_t stride, int n, int64_t columns, uint8_t* flags) {
#define CALL(T, C) \
    for (int i = 0; i < n; ++i) flags[i] = finite(static_cast<const T*>(rows) + i * stride, columns)
    FOR_TYPES(CALL)
#undef CALL
}
}
