/* Wire formats of float32 values. Built on first use: see gossamer/native.py. wire.py and quantized.py compute the same
 * by torch operations.
 *
 * Quantized: blocks of 128 differences x - a with one scale each. Half: bf16 and fp16. A whole message is decoded and
 * applied in one call, because every return to Python waits for the interpreter's lock, which the training thread
 * holds. */

#include <math.h>
#include <stdint.h>
#include <string.h>
#ifdef __F16C__
#include <immintrin.h>
#endif

#pragma STDC FP_CONTRACT OFF

enum { BLOCK = 128, NOT_A_NUMBER = 0x7FC0 };

static inline uint32_t bits_of(float value) {
    uint32_t bits;
    memcpy(&bits, &value, 4);
    return bits;
}

static inline float float_of(uint32_t bits) {
    float value;
    memcpy(&value, &bits, 4);
    return value;
}

/* The scale of a block, rounded up to bfloat16. As integers, magnitudes are in order, and NaN is above infinity. */
static inline uint16_t scale_of(uint32_t largest, float inverse_levels, float smallest) {
    const float value = float_of(largest);
    if (value < smallest)
        return 0;
    const uint32_t rounded = (bits_of(value * inverse_levels) + 0xFFFF) >> 16;
    return rounded < 0x7F80 ? (uint16_t)rounded : NOT_A_NUMBER;
}

/* Differences of a block, and their largest magnitude. */
static inline uint32_t differences(const float *restrict x, const float *restrict a, float *restrict d, int64_t n) {
    int32_t largest = 0;
    if (a)
        for (int64_t i = 0; i < n; i++)
            d[i] = x[i] - a[i];
    else
        memcpy(d, x, 4 * n);
    for (int64_t i = 0; i < n; i++) {
        const int32_t magnitude = (int32_t)(bits_of(d[i]) & 0x7FFFFFFF);
        largest = magnitude > largest ? magnitude : largest;
    }
    return (uint32_t)largest;
}

static inline void round_block(const float *restrict d, uint16_t scale, int8_t *restrict q, int64_t n) {
    const float inverse = scale && scale != NOT_A_NUMBER ? 1.0f / float_of((uint32_t)scale << 16) : 0.0f;
    if (inverse == 0.0f) {  /* zeros, or values that are not finite */
        memset(q, 0, n);
        return;
    }
    for (int64_t i = 0; i < n; i++)
        q[i] = (int8_t)(int32_t)rintf(d[i] * inverse);
}

/* Two values per byte: those in the first half of a block, and those in the second. */
static inline void pack(const int8_t *restrict q, uint8_t *restrict body, int64_t n) {
    const int64_t half = (n + 1) / 2;
    for (int64_t i = 0; i < n - half; i++)
        body[i] = (uint8_t)((q[i] & 15) | (uint8_t)(q[half + i] << 4));
    if (n - half < half)
        body[half - 1] = (uint8_t)(q[half - 1] & 15);
}

static inline void unpack(const uint8_t *restrict body, int8_t *restrict q, int64_t n) {
    const int64_t half = (n + 1) / 2;
    for (int64_t i = 0; i < half; i++)
        q[i] = (int8_t)((int8_t)(body[i] << 4) >> 4);
    for (int64_t i = 0; i < n - half; i++)
        q[half + i] = (int8_t)((int8_t)body[i] >> 4);
}

static inline void encode_block(const float *x, const float *a, int64_t n, int bits, float inverse_levels,
                                float smallest, uint16_t *scale, uint8_t *body) {
    float d[BLOCK];
    int8_t q[BLOCK];
    *scale = scale_of(differences(x, a, d, n), inverse_levels, smallest);
    if (bits == 8) {
        round_block(d, *scale, (int8_t *)body, n);
        return;
    }
    round_block(d, *scale, q, n);
    pack(q, body, n);
}

/* `a` may be null. The last block may be shorter. */
void gossamer_encode(const float *x, const float *a, int64_t n, int64_t bits, float inverse_levels, float smallest,
                     uint16_t *scales, uint8_t *body) {
    const int64_t step = BLOCK * bits / 8;
    int64_t at = 0;
    for (; at + BLOCK <= n; at += BLOCK, scales++, body += step)  /* a constant length becomes vector instructions */
        encode_block(x + at, a ? a + at : 0, BLOCK, (int)bits, inverse_levels, smallest, scales, body);
    if (at < n)
        encode_block(x + at, a ? a + at : 0, n - at, (int)bits, inverse_levels, smallest, scales, body);
}

static inline void decode_block(uint16_t scale, const uint8_t *body, int bits, float *restrict out, int64_t n) {
    int8_t unpacked[BLOCK];
    const float by = float_of((uint32_t)scale << 16);
    const int8_t *q = (const int8_t *)body;
    if (bits == 4) {
        unpack(body, unpacked, n);
        q = unpacked;
    }
    for (int64_t i = 0; i < n; i++)
        out[i] = (float)q[i] * by;
}

void gossamer_decode(const uint16_t *scales, const uint8_t *body, int64_t bits, float *out, int64_t n) {
    const int64_t step = BLOCK * bits / 8;
    int64_t at = 0;
    for (; at + BLOCK <= n; at += BLOCK, scales++, body += step)
        decode_block(*scales, body, (int)bits, out + at, BLOCK);
    if (at < n)
        decode_block(*scales, body, (int)bits, out + at, n - at);
}

/* target + weight * difference, rounded once where the processor can, as torch does it. */
static inline void add_scaled(float *restrict target, const float *restrict theirs, const float *restrict mine,
                              float weight, int64_t n) {
    for (int64_t i = 0; i < n; i++) {
#if defined(__FMA__) || defined(__ARM_FEATURE_FMA)
        target[i] = fmaf(theirs[i] - mine[i], weight, target[i]);
#else
        target[i] = target[i] + weight * (theirs[i] - mine[i]);
#endif
    }
}

/* target += weight * (decoded `theirs` - decoded `mine`). */
void gossamer_correct_quantized(const uint16_t *their_scales, const uint8_t *theirs, const uint16_t *my_scales,
                                const uint8_t *mine, int64_t bits, float weight, float *target, int64_t n) {
    const int64_t step = BLOCK * bits / 8;
    float a[BLOCK], b[BLOCK];
    int64_t at = 0;
    for (; at + BLOCK <= n; at += BLOCK, their_scales++, my_scales++, theirs += step, mine += step) {
        decode_block(*their_scales, theirs, (int)bits, a, BLOCK);
        decode_block(*my_scales, mine, (int)bits, b, BLOCK);
        add_scaled(target + at, a, b, weight, BLOCK);
    }
    if (at < n) {
        decode_block(*their_scales, theirs, (int)bits, a, n - at);
        decode_block(*my_scales, mine, (int)bits, b, n - at);
        add_scaled(target + at, a, b, weight, n - at);
    }
}

void gossamer_correct_bf16(const uint16_t *theirs, const uint16_t *mine, float weight, float *target, int64_t n) {
    float a[BLOCK], b[BLOCK];
    for (int64_t at = 0; at < n; at += BLOCK) {
        const int64_t length = n - at < BLOCK ? n - at : BLOCK;
        for (int64_t i = 0; i < length; i++) {
            a[i] = float_of((uint32_t)theirs[at + i] << 16);
            b[i] = float_of((uint32_t)mine[at + i] << 16);
        }
        add_scaled(target + at, a, b, weight, length);
    }
}

#ifdef __F16C__

static inline void half_to_float(const uint16_t *restrict half, float *restrict out, int64_t n) {
    int64_t i = 0;
    for (; i + 8 <= n; i += 8)
        _mm256_storeu_ps(out + i, _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(half + i))));
    for (; i < n; i++)
        out[i] = _cvtsh_ss(half[i]);
}

/* Values that are too large travel as the largest one, infinities and NaN as they are. */
static inline float saturated(float value) {
    const float largest = 65504.0f, size = fabsf(value);
    return size > largest && size < INFINITY ? copysignf(largest, value) : value;
}

void gossamer_encode_fp16(const float *x, uint16_t *out, int64_t n) {
    float within[8];
    int64_t i = 0;
    for (; i + 8 <= n; i += 8) {
        for (int64_t j = 0; j < 8; j++)
            within[j] = saturated(x[i + j]);
        _mm_storeu_si128((__m128i *)(out + i), _mm256_cvtps_ph(_mm256_loadu_ps(within), _MM_FROUND_TO_NEAREST_INT));
    }
    for (; i < n; i++)
        out[i] = _cvtss_sh(saturated(x[i]), _MM_FROUND_TO_NEAREST_INT);
}

void gossamer_correct_fp16(const uint16_t *theirs, const uint16_t *mine, float weight, float *target, int64_t n) {
    float a[BLOCK], b[BLOCK];
    for (int64_t at = 0; at < n; at += BLOCK) {
        const int64_t length = n - at < BLOCK ? n - at : BLOCK;
        half_to_float(theirs + at, a, length);
        half_to_float(mine + at, b, length);
        add_scaled(target + at, a, b, weight, length);
    }
}

#endif
