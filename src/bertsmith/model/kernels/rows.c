/* Work on rows of the residual stream: embeddings, dropout + residual + LayerNorm, activation. */
#include "common.h"

/* Mean and 1/deviation of a row of `width` floats. */
INLINE void moments(const float *row, i64 width, float eps, float *mean, float *inverse) {
  float sum = 0.0f, squares = 0.0f;
#pragma omp simd reduction(+ : sum)
  for (i64 d = 0; d < width; d++) sum += row[d];
  const float centre = sum / (float)width;
#pragma omp simd reduction(+ : squares)
  for (i64 d = 0; d < width; d++) squares += (row[d] - centre) * (row[d] - centre);
  *mean = centre;
  *inverse = 1.0f / sqrtf(squares / (float)width + eps);
}

/* An element of a LayerNorm's output: one expression for the forward pass and for once more. */
INLINE float normalized(float value, float mean, float inverse, float gain, float shift) {
  return (value - mean) * inverse * gain + shift;
}

/* Sum of partial[thread][column] over threads, added to out: the order never changes. */
static void add_partials(const float *partial, int threads, i64 width, float *out) {
  for (int thread = 0; thread < threads; thread++)
#pragma omp simd
    for (i64 d = 0; d < width; d++) out[d] += partial[thread * width + d];
}

/* y = dropout(LayerNorm(token + position + segment)). Tables are fp32. */
EXPORT int embed_forward(i64 rows, i64 width, const i64 *ids, const i64 *positions,
                          const i64 *segments, const float *token, const float *position,
                          const float *segment, const float *gain, const float *shift, float eps,
                          const dropout *drop, real *y, float *mean, float *inverse) {
  const size_t each = in_lines((size_t)width * sizeof(float));
  float *all = malloc((size_t)omp_get_max_threads() * each);
  if (all == NULL) return NO_MEMORY;
#pragma omp parallel
  {
    float *sum = part_of_thread(all, each);
#pragma omp for schedule(static)
    for (i64 t = 0; t < rows; t++) {
      const float *a = token + ids[t] * width, *b = position + positions[t] * width;
      const float *c = segment + segments[t] * width;
#pragma omp simd
      for (i64 d = 0; d < width; d++) sum[d] = a[d] + b[d] + c[d];
      moments(sum, width, eps, &mean[t], &inverse[t]);
      const float m = mean[t], r = inverse[t], scale = drop->scale;
      const uint32_t threshold = drop->threshold;
      real *out = y + t * width;
      if (threshold == 0) {
#pragma omp simd
        for (i64 d = 0; d < width; d++) out[d] = store((sum[d] - m) * r * gain[d] + shift[d]);
      } else {
        const row_key k = key_of_row(drop->key, (uint64_t)t);
#pragma omp simd
        for (i64 d = 0; d < width; d++) {
          const float value = ((sum[d] - m) * r * gain[d] + shift[d]) * scale;
          const uint32_t bits = element_bits((uint32_t)d, k.first, k.second);
          out[d] = store(bits >= threshold ? value : 0.0f);
        }
      }
    }
  }
  free(all);
  return DONE;
}

/* Gradients of embed_forward, added to d_token, d_position, d_segment, d_gain, d_shift.
 * `scratch` holds rows * width floats. Tables are filled by columns, so threads never meet. */
EXPORT int embed_backward(i64 rows, i64 width, const i64 *ids, const i64 *positions,
                           const i64 *segments, const float *token, const float *position,
                           const float *segment, const float *gain, const dropout *drop,
                           const real *d_y, const float *mean, const float *inverse,
                           float *scratch, float *d_token, float *d_position, float *d_segment,
                           float *d_gain, float *d_shift) {
  const int most = omp_get_max_threads();
  float *partial = calloc((size_t)(2 * most * width), sizeof *partial);
  if (partial == NULL) return NO_MEMORY;
#pragma omp parallel
  {
    float *gains = partial + omp_get_thread_num() * width, *shifts = gains + most * width;
    const uint32_t threshold = drop->threshold;
#pragma omp for schedule(static)
    for (i64 t = 0; t < rows; t++) {
      const float *a = token + ids[t] * width, *b = position + positions[t] * width;
      const float *c = segment + segments[t] * width;
      const row_key k = key_of_row(drop->key, (uint64_t)t);
      const float m = mean[t], r = inverse[t], scale = drop->scale;
      const real *g_row = d_y + t * width;
      float *out = scratch + t * width;
      float sum = 0.0f, dot = 0.0f;
#pragma omp simd reduction(+ : sum, dot)
      for (i64 d = 0; d < width; d++) {
        const uint32_t bits = element_bits((uint32_t)d, k.first, k.second);
        const float g = bits >= threshold ? load(g_row[d]) * scale : 0.0f;
        const float normal = (a[d] + b[d] + c[d] - m) * r;
        gains[d] += g * normal;
        shifts[d] += g;
        out[d] = g * gain[d];
        sum += out[d];
        dot += out[d] * normal;
      }
      sum /= (float)width;
      dot /= (float)width;
#pragma omp simd
      for (i64 d = 0; d < width; d++) {
        const float normal = (a[d] + b[d] + c[d] - m) * r;
        out[d] = r * (out[d] - sum - normal * dot);
      }
    }
#pragma omp for schedule(static)
    for (i64 block = 0; block < (width + 63) / 64; block++) {
      const i64 from = block * 64, size = width - from < 64 ? width - from : 64;
      for (i64 t = 0; t < rows; t++) {
        const float *g = scratch + t * width + from;
        float *a = d_token + ids[t] * width + from, *b = d_position + positions[t] * width + from;
        float *c = d_segment + segments[t] * width + from;
#pragma omp simd
        for (i64 d = 0; d < size; d++) {
          a[d] += g[d];
          b[d] += g[d];
          c[d] += g[d];
        }
      }
    }
  }
  add_partials(partial, most, width, d_gain);
  add_partials(partial + most * width, most, width, d_shift);
  free(partial);
  return DONE;
}

/* z = x + dropout(added); y = LayerNorm(z). z, mean and inverse are kept for the gradient.
 * Row t is dropped as row numbers[t], or as row t where numbers is NULL. */
EXPORT int add_norm_forward(i64 rows, i64 width, const real *x, const real *added,
                             const float *gain, const float *shift, float eps, const dropout *drop,
                             const i64 *numbers, real *z, real *y, float *mean, float *inverse) {
  const size_t each = in_lines((size_t)width * sizeof(float));
  float *all = malloc((size_t)omp_get_max_threads() * each);
  if (all == NULL) return NO_MEMORY;
#pragma omp parallel
  {
    float *sum = part_of_thread(all, each);
#pragma omp for schedule(static)
    for (i64 t = 0; t < rows; t++) {
      const real *a = x + t * width, *f = added + t * width;
      real *kept = z + t * width, *out = y + t * width;
      const uint32_t threshold = drop->threshold;
      const float scale = drop->scale;
      if (threshold == 0) {
#pragma omp simd
        for (i64 d = 0; d < width; d++) {
          kept[d] = store(load(a[d]) + load(f[d]));
          sum[d] = load(kept[d]);
        }
      } else {
        const row_key k = key_of_row(drop->key, (uint64_t)(numbers ? numbers[t] : t));
#pragma omp simd
        for (i64 d = 0; d < width; d++) {
          const uint32_t bits = element_bits((uint32_t)d, k.first, k.second);
          kept[d] = store(load(a[d]) + (bits >= threshold ? load(f[d]) * scale : 0.0f));
          sum[d] = load(kept[d]);
        }
      }
      moments(sum, width, eps, &mean[t], &inverse[t]);
      const float m = mean[t], r = inverse[t];
#pragma omp simd
      for (i64 d = 0; d < width; d++) out[d] = store(normalized(sum[d], m, r, gain[d], shift[d]));
    }
  }
  free(all);
  return DONE;
}

/* y of add_norm_forward once more, to the bit, from what it kept. */
EXPORT void norm_again(i64 rows, i64 width, const real *z, const float *mean, const float *inverse,
                       const float *gain, const float *shift, real *y) {
#pragma omp parallel for schedule(static)
  for (i64 t = 0; t < rows; t++) {
    const real *in = z + t * width;
    real *out = y + t * width;
    const float m = mean[t], r = inverse[t];
#pragma omp simd
    for (i64 d = 0; d < width; d++) out[d] = store(normalized(load(in[d]), m, r, gain[d], shift[d]));
  }
}

/* Gradients of add_norm_forward for d_y + d_y2 (the second may be NULL).
 *
 * d_z is the gradient of x, d_added that of `added` (it may be d_z when nothing is dropped).
 * Column sums are added to d_gain, d_shift and, of d_added, to d_bias. */
EXPORT int add_norm_backward(i64 rows, i64 width, const real *d_y, const real *d_y2,
                              const real *z, const float *mean, const float *inverse,
                              const float *gain, const dropout *drop, const i64 *numbers,
                              real *d_z, real *d_added, float *d_gain, float *d_shift,
                              float *d_bias) {
  const int most = omp_get_max_threads();
  float *partial = calloc((size_t)(3 * most * width), sizeof *partial);
  const size_t each = in_lines((size_t)(2 * width) * sizeof(float));
  float *all = malloc((size_t)most * each);
  if (partial == NULL || all == NULL) {
    free(partial);
    free(all);
    return NO_MEMORY;
  }
#pragma omp parallel
  {
    float *gains = partial + omp_get_thread_num() * width;
    float *shifts = gains + most * width, *biases = shifts + most * width;
    float *g = part_of_thread(all, each), *normal = g + width;
    const uint32_t threshold = drop->threshold;
    const float scale = drop->scale;
#pragma omp for schedule(static)
    for (i64 t = 0; t < rows; t++) {
      const i64 at = t * width;
      const float m = mean[t], r = inverse[t];
      const row_key k = key_of_row(drop->key, (uint64_t)(numbers ? numbers[t] : t));
      if (d_y2 == NULL) {
#pragma omp simd
        for (i64 d = 0; d < width; d++) g[d] = load(d_y[at + d]);
      } else {
#pragma omp simd
        for (i64 d = 0; d < width; d++) g[d] = load(d_y[at + d]) + load(d_y2[at + d]);
      }
      float sum = 0.0f, dot = 0.0f;
#pragma omp simd reduction(+ : sum, dot)
      for (i64 d = 0; d < width; d++) {
        normal[d] = (load(z[at + d]) - m) * r;
        gains[d] += g[d] * normal[d];
        shifts[d] += g[d];
        g[d] *= gain[d];
        sum += g[d];
        dot += g[d] * normal[d];
      }
      sum /= (float)width;
      dot /= (float)width;
      if (threshold == 0) {
#pragma omp simd
        for (i64 d = 0; d < width; d++) {
          const float value = r * (g[d] - sum - normal[d] * dot);
          d_z[at + d] = store(value);
          biases[d] += value;
        }
      } else {
#pragma omp simd
        for (i64 d = 0; d < width; d++) {
          const float value = r * (g[d] - sum - normal[d] * dot);
          const uint32_t bits = element_bits((uint32_t)d, k.first, k.second);
          const float kept = bits >= threshold ? value * scale : 0.0f;
          d_z[at + d] = store(value);
          d_added[at + d] = store(kept);
          biases[d] += kept;
        }
      }
    }
  }
  add_partials(partial, most, width, d_gain);
  add_partials(partial + most * width, most, width, d_shift);
  add_partials(partial + 2 * most * width, most, width, d_bias);
  free(all);
  free(partial);
  return DONE;
}

/* out[column] += sum of a column of x. */
EXPORT int column_sums(i64 rows, i64 width, const real *x, float *out) {
  const int most = omp_get_max_threads();
  float *partial = calloc((size_t)(most * width), sizeof *partial);
  if (partial == NULL) return NO_MEMORY;
#pragma omp parallel
  {
    float *sums = partial + omp_get_thread_num() * width;
#pragma omp for schedule(static)
    for (i64 t = 0; t < rows; t++) {
#pragma omp simd
      for (i64 d = 0; d < width; d++) sums[d] += load(x[t * width + d]);
    }
  }
  add_partials(partial, most, width, out);
  free(partial);
  return DONE;
}

/* The normal distribution's mass below x and its density there, to the last digits of fp32.
 *
 * Near 0 an odd polynomial, beyond 1.6 density * polynomial(1 / (1 + 0.38 |x|)): both least-maximum
 * fits of ours in float64, off by 2e-9 and 3e-10 before rounding. */
INLINE void normal_of(float x, float *mass, float *density) {
  const float square = x * x, size = fabsf(x);
  const float bell = exponential(-0.5f * square);
  float near = 3.731007386e-7f;
  near = near * square - 8.439429695e-6f;
  near = near * square + 1.135810745e-4f;
  near = near * square - 1.185457752e-3f;
  near = near * square + 9.972578056e-3f;
  near = near * square - 6.649015299e-2f;
  near = near * square + 3.989422651e-1f;
  const float t = 1.0f / (1.0f + 0.38f * size);
  float far = -1.039167900e-1f;
  far = far * t + 2.185939812e-1f;
  far = far * t + 6.931118476e-2f;
  far = far * t + 1.651545176e-1f;
  far = far * t + 1.503802019e-1f;
  const float tail = far * t * bell;
  const float outer = x < 0.0f ? tail : 1.0f - tail;
  *mass = size < 1.6f ? 0.5f + x * near : outer;
  *density = 0.398942280f * bell;
}

INLINE float hyperbolic_tangent(float x) {
  const float e = exponential(-2.0f * fabsf(x));
  const float value = (1.0f - e) / (1.0f + e);
  return x < 0.0f ? -value : value;
}

INLINE float gelu(float x) {
  float mass, density;
  normal_of(x, &mass, &density);
  return x * mass;
}

INLINE float gelu_slope(float x, float *value) {
  float mass, density;
  normal_of(x, &mass, &density);
  *value = x * mass;
  return mass + x * density;
}

INLINE float gelu_new(float x) {
  const float inner = 0.79788456f * (x + 0.044715f * x * x * x);
  return 0.5f * x * (1.0f + hyperbolic_tangent(inner));
}

INLINE float gelu_new_slope(float x, float *value) {
  const float inner = 0.79788456f * (x + 0.044715f * x * x * x);
  const float tangent = hyperbolic_tangent(inner);
  *value = 0.5f * x * (1.0f + tangent);
  return 0.5f * (1.0f + tangent) +
         0.5f * x * (1.0f - tangent * tangent) * 0.79788456f * (1.0f + 0.134145f * x * x);
}

INLINE float relu(float x) { return x < 0.0f ? 0.0f : x; }

INLINE float relu_slope(float x, float *value) {
  *value = x < 0.0f ? 0.0f : x;
  return x > 0.0f ? 1.0f : 0.0f;
}

#define FORWARD(function)                                                      \
  _Pragma("omp parallel for schedule(static)") for (i64 t = 0; t < rows; t++) { \
    const real *in = x + t * width;                                            \
    real *out = y + t * width;                                                 \
    _Pragma("omp simd") for (i64 d = 0; d < width; d++)                        \
        out[d] = store(function(load(in[d])));                                 \
  }

/* y = activation(x); kind 0 gelu by erf, 1 gelu by tanh, 2 relu. */
EXPORT void activate_forward(i64 rows, i64 width, int kind, const real *x, real *y) {
  if (kind == 0) FORWARD(gelu) else if (kind == 1) FORWARD(gelu_new) else FORWARD(relu)
}

#define BACKWARD(slope)                                                      \
  _Pragma("omp for schedule(static)") for (i64 t = 0; t < rows; t++) {        \
    const i64 at = t * width;                                                \
    _Pragma("omp simd") for (i64 d = 0; d < width; d++) {                    \
      float value;                                                           \
      const float g = load(d_y[at + d]) * slope(load(x[at + d]), &value);    \
      y[at + d] = store(value);                                              \
      d_x[at + d] = store(g);                                                \
      sums[d] += g;                                                          \
    }                                                                        \
  }

/* d_x = d_y * activation'(x), in place over d_y if the two are one; y = activation(x) once more,
 * which is cheaper than having kept it; column sums of d_x are added to d_bias. */
EXPORT int activate_backward(i64 rows, i64 width, int kind, const real *x, const real *d_y,
                              real *y, real *d_x, float *d_bias) {
  const int most = omp_get_max_threads();
  float *partial = calloc((size_t)(most * width), sizeof *partial);
  if (partial == NULL) return NO_MEMORY;
#pragma omp parallel
  {
    float *sums = partial + omp_get_thread_num() * width;
    if (kind == 0) {
      BACKWARD(gelu_slope)
    } else if (kind == 1) {
      BACKWARD(gelu_new_slope)
    } else {
      BACKWARD(relu_slope)
    }
  }
  add_partials(partial, most, width, d_bias);
  free(partial);
  return DONE;
}
