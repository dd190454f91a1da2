/* Small matrix products out of the nearest cache: C (+)= A B for attention's blocks.
 *
 * The depth is counted in units: pairs of bf16 where the CPU multiplies such pairs (AVX512-BF16),
 * single floats elsewhere. A is rows of units; B has one row a unit, `lane` columns wide.
 */
#ifndef BERTSMITH_TILE_H
#define BERTSMITH_TILE_H

#include "common.h"

#if defined(STORE_BF16) && defined(__AVX512BF16__)
#include <immintrin.h>
#define PAIRED 1
#define PER_UNIT 2
typedef uint32_t unit;
typedef real element; /* what a row of units is made of */
#else
#define PAIRED 0
#define PER_UNIT 1
typedef float unit;
typedef float element;
#endif

#if defined(__AVX512F__)
#define LANES 16
#define ACROSS 4
#elif defined(__AVX__)
#define LANES 8
#define ACROSS 2
#else
#define LANES 4
#define ACROSS 4
#endif
#define DOWN 6                  /* rows of a tile: DOWN * ACROSS accumulators fit the registers */
#define PANEL (LANES * ACROSS)  /* columns of a tile */
#define PADDED 16               /* columns are padded to this, whatever the machine */

typedef float vec __attribute__((vector_size(LANES * 4), aligned(4), may_alias));

INLINE vec vec_load(const float *from) { return *(const vec *)from; }
INLINE void vec_store(float *to, vec value) { *(vec *)to = value; }

#if PAIRED
typedef __m512i operand;
INLINE operand unit_load(const unit *from) { return _mm512_loadu_si512(from); }
INLINE operand unit_spread(unit value) { return _mm512_set1_epi32((int)value); }
INLINE vec multiply_add(vec sum, operand a, operand b) {
  return (vec)_mm512_dpbf16_ps((__m512)sum, (__m512bh)a, (__m512bh)b);
}
#else
typedef vec operand;
INLINE operand unit_load(const unit *from) { return vec_load(from); }
INLINE operand unit_spread(unit value) { return value - (vec){0.0f}; }
INLINE vec multiply_add(vec sum, operand a, operand b) { return sum + a * b; }
#endif

INLINE void tile(const int down, const int across, i64 depth, const unit *a, i64 a_stride,
                 const unit *b, i64 b_stride, float *c, i64 c_stride, int add) {
  vec sum[DOWN][ACROSS];
#pragma GCC unroll 8
  for (int r = 0; r < down; r++)
#pragma GCC unroll 8
    for (int v = 0; v < across; v++)
      sum[r][v] = add ? vec_load(c + r * c_stride + v * LANES) : (vec){0.0f};
  for (i64 k = 0; k < depth; k++) {
    operand right[ACROSS];
#pragma GCC unroll 8
    for (int v = 0; v < across; v++) right[v] = unit_load(b + k * b_stride + v * LANES);
#pragma GCC unroll 8
    for (int r = 0; r < down; r++) {
      const operand left = unit_spread(a[r * a_stride + k]);
#pragma GCC unroll 8
      for (int v = 0; v < across; v++) sum[r][v] = multiply_add(sum[r][v], left, right[v]);
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < down; r++)
#pragma GCC unroll 8
    for (int v = 0; v < across; v++) vec_store(c + r * c_stride + v * LANES, sum[r][v]);
}

#define ROWS_OF(down)                                                                          \
  case down:                                                                                   \
    if (across == 1) tile(down, 1, depth, a, a_stride, b, b_stride, c, c_stride, add);         \
    else if (across == 2) tile(down, 2, depth, a, a_stride, b, b_stride, c, c_stride, add);    \
    else if (ACROSS > 2 && across == 3)                                                        \
      tile(down, ACROSS > 2 ? 3 : 1, depth, a, a_stride, b, b_stride, c, c_stride, add);       \
    else tile(down, ACROSS, depth, a, a_stride, b, b_stride, c, c_stride, add);                \
    break;

static void any_tile(int down, int across, i64 depth, const unit *a, i64 a_stride, const unit *b,
                     i64 b_stride, float *c, i64 c_stride, int add) {
  switch (down) {
    ROWS_OF(1)
    ROWS_OF(2)
    ROWS_OF(3)
    ROWS_OF(4)
    ROWS_OF(5)
    ROWS_OF(6)
  }
}

/* A right-hand side: panels of PANEL columns, `panel` units apart, rows `stride` units apart. */
typedef struct {
  const unit *units;
  i64 stride, panel;
} right_side;

/* C (rows x columns) = or += A B; columns is a multiple of LANES. */
static void multiply(i64 rows, i64 columns, i64 depth, const unit *a, i64 a_stride, right_side b,
                     float *c, i64 c_stride, int add) {
  for (i64 column = 0, p = 0; column < columns; column += PANEL, p++) {
    const i64 left = (columns - column) / LANES;
    const int across = (int)(left < ACROSS ? left : ACROSS);
    const unit *panel = b.units + p * b.panel;
    for (i64 row = 0; row < rows; row += DOWN) {
      const int down = (int)(rows - row < DOWN ? rows - row : DOWN);
      any_tile(down, across, depth, a + row * a_stride, a_stride, panel, b.stride,
               c + row * c_stride + column, c_stride, add);
    }
  }
}

#endif
