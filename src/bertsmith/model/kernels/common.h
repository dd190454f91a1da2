/* What every kernel shares: the storage type, exact-enough exp, and dropout bits.
 *
 * Each source file is compiled twice: plain for float storage, with -DSTORE_BF16 for bfloat16.
 * Arithmetic is fp32 in both. No kernel keeps state, allocates what it returns, or raises. Those
 * that need memory of their own ask for it before they do anything, and return `NO_MEMORY` if there
 * is none: only torch, which the caller belongs to, knows what to do then.
 */
#ifndef BERTSMITH_COMMON_H
#define BERTSMITH_COMMON_H

#include <math.h>
#include <omp.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#define INLINE static inline __attribute__((always_inline))
#define EXPORT __attribute__((visibility("default")))

enum { DONE = 0, NO_MEMORY = 1 };

typedef int64_t i64;

/* Bytes in whole cache lines, so that what two threads write never shares one. */
INLINE size_t in_lines(size_t bytes) { return (bytes + 63) & ~(size_t)63; }

/* The calling thread's part of memory for all threads. */
INLINE void *part_of_thread(void *all, size_t bytes_each) {
  return (char *)all + (size_t)omp_get_thread_num() * bytes_each;
}

INLINE float float_of_bits(uint32_t bits) {
  float value;
  memcpy(&value, &bits, sizeof value);
  return value;
}

INLINE uint32_t bits_of_float(float value) {
  uint32_t bits;
  memcpy(&bits, &value, sizeof bits);
  return bits;
}

#ifdef STORE_BF16
typedef uint16_t real;
INLINE float load(real stored) { return float_of_bits((uint32_t)stored << 16); }
/* Round to nearest even; the arithmetic of a NaN from the hardware survives it. */
INLINE real store(float value) {
  const uint32_t bits = bits_of_float(value);
  return (real)((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}
#else
typedef float real;
INLINE float load(real stored) { return stored; }
INLINE real store(float value) { return value; }
#endif

/* e^x, within 2 units in the last place for x in [-87, 88]; below that, e^-87; NaN stays NaN. */
INLINE float exponential(float x) {
  x = x < -87.0f ? -87.0f : x;
  x = x > 88.0f ? 88.0f : x;
  const float shifted = x * 1.44269504f + 12582912.0f; /* 1.5 * 2^23: rounds to an integer */
  const float whole = shifted - 12582912.0f;
  float rest = x - whole * 0.693145752f;
  rest -= whole * 1.42860677e-6f;
  float p = 1.38888889e-3f; /* Taylor to the sixth power: |rest| <= 0.347 */
  p = p * rest + 8.33333333e-3f;
  p = p * rest + 4.16666667e-2f;
  p = p * rest + 1.66666667e-1f;
  p = p * rest + 0.5f;
  p = p * rest + 1.0f;
  p = p * rest + 1.0f;
  const uint32_t scale = (bits_of_float(shifted) << 23) + 0x3f800000u;
  return p * float_of_bits(scale);
}

/* Dropout bits are a hash of (key, row, column): the same whichever body or order computes them,
 * and never in memory. `key` comes from (seed, site). Finalisers: splitmix64 (Steele, Lea, Flood
 * 2014) for a row; a two-multiplication 32-bit mixer, keyed twice, for an element. */
typedef struct {
  uint32_t first, second;
} row_key;

INLINE row_key key_of_row(uint64_t key, uint64_t row) {
  uint64_t x = key + (row + 1) * 0x9e3779b97f4a7c15ull;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9ull;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebull;
  x ^= x >> 31;
  const row_key out = {(uint32_t)x, (uint32_t)(x >> 32)};
  return out;
}

INLINE uint32_t element_bits(uint32_t column, uint32_t first, uint32_t second) {
  uint32_t x = (column ^ first) * 0x7feb352du;
  x = ((x ^ (x >> 15)) + second) * 0x846ca68bu;
  return x ^ (x >> 16);
}

/* What a dropout is, as it is handed to a kernel: `threshold` 0 drops nothing. */
typedef struct {
  uint64_t key;
  uint32_t threshold; /* an element is dropped where its bits are below: chance * 2^32 */
  float scale;        /* 1 / (1 - chance) */
} dropout;

#endif
