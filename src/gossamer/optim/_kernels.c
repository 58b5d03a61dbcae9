/* One pass over memory for a whole optimizer step on float32 tensors. Built on first use: see _native.py. */

#include <math.h>
#include <pthread.h>
#include <stdint.h>

/* x: parameter, g: gradient, m and v: moments, s: GossipAdam's q or AccumAdam's sum of gradients. */
typedef struct {
    float *x, *g, *m, *v, *s;
    int64_t n;
} Slot;

/* `gradient` is -1 to maximize; `l2` is coupled weight decay, `shrink` is 1 - lr * decoupled weight decay. */
typedef struct {
    float gradient, l2, shrink, beta1, beta2, rate1, rate2, step_size, eps;  /* rate = 1 - beta */
    float a, b, low, high;           /* GossipAdam: D = clamp(a v + b q, low v, high v) */
    float square_rate;               /* GossipAdam: m^2 times this enters q */
    float inverse_length;            /* AccumAdam */
} Scalars;

typedef void (*Kernel)(Slot slot, const Scalars *k);

static void gossip_adam(Slot slot, const Scalars *k) {
    float *restrict x = slot.x, *restrict m = slot.m, *restrict v = slot.v, *restrict q = slot.s;
    const float *restrict g = slot.g;
    const Scalars c = *k;
    for (int64_t i = 0; i < slot.n; i++) {
        const float gi = c.gradient * g[i] + c.l2 * x[i];
        const float mi = c.beta1 * m[i] + c.rate1 * gi;
        const float vi = c.beta2 * v[i] + c.rate2 * (gi * gi);
        const float qi = c.beta2 * q[i] + c.square_rate * (mi * mi);
        const float low = c.low * vi, high = c.high * vi;
        float d = c.a * vi + c.b * qi;
        d = d < low ? low : d;
        d = d > high ? high : d;
        x[i] = c.shrink * x[i] - c.step_size * mi / (sqrtf(d) + c.eps);
        m[i] = mi;
        v[i] = vi;
        q[i] = qi;
    }
}

enum { FIRST, MIDDLE, LAST };        /* gradient of an accumulation */

/* mi and vi serve this step only: m and v themselves move after the last gradient. Inlined with a constant phase. */
static inline void accum_adam(Slot slot, const Scalars *k, const int phase) {
    float *restrict x = slot.x, *restrict m = slot.m, *restrict v = slot.v, *restrict s = slot.s;
    const float *restrict g = slot.g;
    const Scalars c = *k;
    for (int64_t i = 0; i < slot.n; i++) {
        const float gi = c.gradient * g[i] + c.l2 * x[i];
        const float mi = c.beta1 * m[i] + c.rate1 * gi;
        const float vi = c.beta2 * v[i] + c.rate2 * (gi * gi);
        x[i] = c.shrink * x[i] - c.step_size * mi / (sqrtf(c.high * vi) + c.eps);
        if (phase == FIRST) {
            s[i] = gi;
        } else if (phase == MIDDLE) {
            s[i] += gi;
        } else {
            const float mean = (s[i] + gi) * c.inverse_length;
            m[i] = c.beta1 * m[i] + c.rate1 * mean;
            v[i] = c.beta2 * v[i] + c.rate2 * (mean * mean);
        }
    }
}

static void accum_adam_first(Slot slot, const Scalars *k) { accum_adam(slot, k, FIRST); }
static void accum_adam_middle(Slot slot, const Scalars *k) { accum_adam(slot, k, MIDDLE); }
static void accum_adam_last(Slot slot, const Scalars *k) { accum_adam(slot, k, LAST); }

typedef struct {
    Kernel kernel;
    const Slot *slots;
    int64_t count, begin, end;       /* a range of the elements of all slots, laid end to end */
    const Scalars *scalars;
} Share;

static void *run_share(void *argument) {
    const Share *share = argument;
    int64_t at = 0;
    for (int64_t i = 0; i < share->count && at < share->end; i++) {
        Slot slot = share->slots[i];
        const int64_t from = share->begin > at ? share->begin - at : 0;
        const int64_t to = share->end - at < slot.n ? share->end - at : slot.n;
        at += slot.n;
        if (from >= to) continue;
        slot.x += from, slot.g += from, slot.m += from, slot.v += from, slot.s += from;
        slot.n = to - from;
        share->kernel(slot, share->scalars);
    }
    return 0;
}

enum { MAX_THREADS = 64, LEAST_SHARE = 1 << 16 };

/* Threads live for one call only, so that a fork between two steps is harmless. */
static void run(Kernel kernel, const Slot *slots, int64_t count, const Scalars *scalars, int64_t threads) {
    Share shares[MAX_THREADS];
    pthread_t ids[MAX_THREADS];
    int started[MAX_THREADS] = {0};
    int64_t total = 0;
    for (int64_t i = 0; i < count; i++) total += slots[i].n;
    if (threads > total / LEAST_SHARE) threads = total / LEAST_SHARE;
    if (threads > MAX_THREADS) threads = MAX_THREADS;
    if (threads < 1) threads = 1;
    const int64_t each = (total / threads + 63) / 64 * 64;
    for (int64_t t = 0; t < threads; t++) {
        const int64_t end = t + 1 == threads ? total : (t + 1) * each;
        shares[t] = (Share){kernel, slots, count, t * each, end, scalars};
    }
    for (int64_t t = 1; t < threads; t++) started[t] = !pthread_create(&ids[t], 0, run_share, &shares[t]);
    for (int64_t t = 0; t < threads; t++)
        if (!started[t]) run_share(&shares[t]);
    for (int64_t t = 1; t < threads; t++)
        if (started[t]) pthread_join(ids[t], 0);
}

void gossamer_gossip_adam(const Slot *slots, int64_t count, const Scalars *scalars, int64_t threads) {
    run(gossip_adam, slots, count, scalars, threads);
}

void gossamer_accum_adam(const Slot *slots, int64_t count, const Scalars *scalars, int64_t threads, int64_t phase) {
    static const Kernel kernels[] = {accum_adam_first, accum_adam_middle, accum_adam_last};
    run(kernels[phase], slots, count, scalars, threads);
}
