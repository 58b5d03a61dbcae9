/* Quantized wires on float32: blocks of 128 differences x - a with one scale each. Built on first use: see quantized.py,
 * which computes the same bits by torch operations. */

#include <math.h>
#include <stdint.h>
#include <string.h>

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
