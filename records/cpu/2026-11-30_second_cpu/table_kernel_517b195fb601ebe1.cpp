// What the CPU does to the rows of the n-gram table. Tensor operations would move each temporary through memory; this reads and
// writes each row once. It is optional: train_gpt.py compiles it when a run starts (TableKernel), and without a compiler, or this
// file, its NgramTable does the same with the tensor operations that stand beside each call, which are the rule.
//
// Every function takes its thread's share [first, last): of the tokens to read, of the rows of the gradient (each sums its reads
// in their order, so that nothing depends on the number of threads), of the rows to update. ROW is float32 or bfloat16.
#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>
using i64 = int64_t;
struct bfloat16 { uint16_t bits; };
using float32 = float;
static inline float widen(float x) { return x; }
static inline float widen(bfloat16 x) { uint32_t bits = uint32_t(x.bits) << 16; float y; std::memcpy(&y, &bits, 4); return y; }
static inline void store(float* to, float x) { *to = x; }
static inline void store(bfloat16* to, float x) {  // rounds to nearest even
    uint32_t bits; std::memcpy(&bits, &x, 4);
    to->bits = x == x ? (bits + 0x7fff + (bits >> 16 & 1)) >> 16 : 0x7fc0;
}
template <class T> static inline void prefetch(const T* row, i64 dim) {  // so that its one or two pages are looked up early
    __builtin_prefetch(row), __builtin_prefetch(row + dim - 1);
}

extern "C" void read(i64 first, i64 last, i64 orders, i64 tokens, i64 dim, const ROW* rows, const int8_t* pool, const i64* at,
                     const i64* signs, float* out) {
    for (i64 t = first; t < last; t++) for (i64 k = t; k < orders * tokens; k += tokens) {
        if (t + 2 < last) prefetch(rows + at[k + 2] * dim, dim);
        const ROW* row = rows + at[k] * dim;
        const int8_t* sign = pool + signs[k] * dim;
        float* sum = out + t * dim;
        if (k == t) for (i64 d = 0; d < dim; d++) sum[d] = widen(row[d]) * sign[d];
        else for (i64 d = 0; d < dim; d++) sum[d] += widen(row[d]) * sign[d];
    }
}

extern "C" void add_grad(i64 first, i64 last, i64 orders, i64 tokens, i64 dim, i64 fresh, float* grads, const float* read_grad,
                         const int8_t* pool, const i64* slots, const i64* signs) {
    std::vector<i64> ends(last - first + 1), reads;  // a counting sort: the reads of row first + i end up at [ends[i - 1], ends[i])
    auto mine = [&](i64 k) { return first <= slots[k] && slots[k] < last; };
    for (i64 k = 0; k < orders * tokens; k++) if (mine(k)) ends[slots[k] - first + 1]++;
    for (i64 i = 0; i < last - first; i++) ends[i + 1] += ends[i];
    reads.resize(ends.back());
    for (i64 k = 0; k < orders * tokens; k++) if (mine(k)) reads[ends[slots[k] - first]++] = k;
    for (i64 i = 0, r = 0; i < last - first; i++) {
        float* grad = grads + (first + i) * dim;
        bool assign = fresh;
        for (; r < ends[i]; r++, assign = false) {
            if (r + 2 < ends.back()) prefetch(read_grad + reads[r + 2] % tokens * dim, dim);
            const float* g = read_grad + reads[r] % tokens * dim;
            const int8_t* sign = pool + signs[reads[r]] * dim;
            if (assign) for (i64 d = 0; d < dim; d++) grad[d] = g[d] * sign[d];
            else for (i64 d = 0; d < dim; d++) grad[d] += g[d] * sign[d];
        }
        if (assign) std::memset(grad, 0, dim * sizeof(float));
    }
}

extern "C" void update(i64 first, i64 last, i64 dim, i64 by_row, i64 number, float step_size, float beta2, float eps, float decay,
                       ROW* rows, const i64* ids, const float* grads, float* second, int32_t* touched) {
    for (i64 i = first; i < last; i++) {
        if (i64 ahead = i + 2; ahead < last)
            prefetch(rows + ids[ahead] * dim, dim), __builtin_prefetch(second + ids[ahead]), __builtin_prefetch(touched + ids[ahead]);
        ROW* row = rows + ids[i] * dim;
        const float* g = grads + i * dim;
        float owed = std::pow(beta2, float(number - touched[ids[i]])), square = 0, size;
        touched[ids[i]] = number;
        if (by_row) {
            #pragma omp simd reduction(+ : square)
            for (i64 d = 0; d < dim; d++) square += g[d] * g[d];
            float v = second[ids[i]] = owed * second[ids[i]] + (1 - beta2) * (square / dim);
            size = step_size / (std::sqrt(v) + eps);
        }
        for (i64 d = 0; d < dim; d++) {
            if (!by_row) {
                float v = second[ids[i] * dim + d] = owed * second[ids[i] * dim + d] + (1 - beta2) * g[d] * g[d];
                size = step_size / (std::sqrt(v) + eps);
            }
            float x = widen(row[d]), change = size * g[d];
            store(row + d, x - (change + (change * x > 0 ? decay * x : 0)));
        }
    }
}
