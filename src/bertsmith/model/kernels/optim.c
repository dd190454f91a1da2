/* AdamW in one pass over memory, and the gradient's norm in float64. Always fp32 storage. */
#include "common.h"

/* Sum of squares over all tensors, or -1 for lack of memory; the order of additions depends on the thread count alone. */
EXPORT double sum_of_squares(i64 tensors, const i64 *sizes, float *const *values) {
  const int most = omp_get_max_threads();
  double *partial = calloc((size_t)(most * 8), sizeof *partial); /* 8: a cache line each */
  if (partial == NULL) return -1.0;
#pragma omp parallel
  {
    double sum = 0.0;
    for (i64 n = 0; n < tensors; n++) {
      const float *value = values[n];
#pragma omp for schedule(static) nowait
      for (i64 block = 0; block < (sizes[n] + 4095) / 4096; block++) {
        const i64 from = block * 4096, to = from + 4096 < sizes[n] ? from + 4096 : sizes[n];
        double part = 0.0;
#pragma omp simd reduction(+ : part)
        for (i64 i = from; i < to; i++) part += (double)value[i] * (double)value[i];
        sum += part;
      }
    }
    partial[omp_get_thread_num() * 8] = sum;
  }
  double total = 0.0;
  for (int thread = 0; thread < most; thread++) total += partial[thread * 8];
  free(partial);
  return total;
}

/* Hyper-parameters of one step, all in the optimizer's own units. */
typedef struct {
  float rate;        /* learning rate over the first moment's bias correction */
  float shrink;      /* 1 - learning rate * weight decay */
  float beta1, beta2;
  float root;        /* 1 / sqrt of the second moment's bias correction */
  float eps;
  float factor;      /* what the gradient is multiplied with: clipping */
} adamw_step;

/* One AdamW update (Loshchilov and Hutter 2019) of every tensor. */
EXPORT void adamw(i64 tensors, const i64 *sizes, float *const *parameters, float *const *gradients,
                  float *const *first, float *const *second, const adamw_step *by) {
#pragma omp parallel
  for (i64 n = 0; n < tensors; n++) {
    float *p = parameters[n], *m = first[n], *v = second[n];
    const float *g = gradients[n];
    const float rate = by->rate, shrink = by->shrink, beta1 = by->beta1, beta2 = by->beta2;
    const float root = by->root, eps = by->eps, factor = by->factor;
#pragma omp for simd schedule(static) nowait
    for (i64 i = 0; i < sizes[n]; i++) {
      const float gradient = g[i] * factor;
      m[i] += (1.0f - beta1) * (gradient - m[i]);
      v[i] = beta2 * v[i] + (1.0f - beta2) * gradient * gradient;
      p[i] = p[i] * shrink - rate * m[i] / (sqrtf(v[i]) * root + eps);
    }
  }
}

INLINE uint32_t mixed(uint32_t x) { /* as train/optim.py: a two-multiplication mixer */
  x = (x ^ (x >> 16)) * 0x7feb352du;
  x = (x ^ (x >> 15)) * 0x846ca68bu;
  return x ^ (x >> 16);
}

/* bfloat16 at random one of the two neighbours, so that it is right on average; 16 random bits. */
INLINE uint16_t stochastic_bf16(float value, uint32_t random) {
  return (uint16_t)((bits_of_float(value) + random) >> 16);
}

/* The same update with moments kept in bfloat16; `keys` has a number for each tensor and step. */
EXPORT void adamw_bf16(i64 tensors, const i64 *sizes, float *const *parameters,
                       float *const *gradients, uint16_t *const *first, uint16_t *const *second,
                       const uint32_t *keys, const adamw_step *by) {
#pragma omp parallel
  for (i64 n = 0; n < tensors; n++) {
    float *p = parameters[n];
    const float *g = gradients[n];
    uint16_t *m_kept = first[n], *v_kept = second[n];
    const uint32_t key = keys[n];
    const float rate = by->rate, shrink = by->shrink, beta1 = by->beta1, beta2 = by->beta2;
    const float root = by->root, eps = by->eps, factor = by->factor;
#pragma omp for simd schedule(static) nowait
    for (i64 i = 0; i < sizes[n]; i++) {
      const float gradient = g[i] * factor;
      float m = float_of_bits((uint32_t)m_kept[i] << 16);
      float v = float_of_bits((uint32_t)v_kept[i] << 16);
      m += (1.0f - beta1) * (gradient - m);
      v = beta2 * v + (1.0f - beta2) * gradient * gradient;
      p[i] = p[i] * shrink - rate * m / (sqrtf(v) * root + eps);
      const uint32_t random = mixed((uint32_t)i * 0x9e3779b9u + key);
      m_kept[i] = stochastic_bf16(m, random & 0xffffu);
      v_kept[i] = stochastic_bf16(v, random >> 16);
    }
  }
}
