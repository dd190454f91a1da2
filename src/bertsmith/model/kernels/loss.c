/* Cross-entropy over a wide vocabulary: loss and gradient in one visit of each row of logits. */
#include "common.h"

/* losses[m] = -log softmax(logits[m] + bias)[target[m]]; logits become the gradient of their
 * loss, softmax minus one at the target, whose column sums are added to d_bias. A row whose target
 * is below 0 has a loss and a gradient of 0. */
EXPORT int cross_entropy(i64 rows, i64 vocabulary, real *logits, const float *bias,
                         const i64 *targets, float *losses, float *d_bias) {
  const int most = omp_get_max_threads();
  const size_t each = in_lines((size_t)vocabulary * sizeof(float));
  float *partial = calloc((size_t)(most * vocabulary), sizeof *partial);
  float *all = malloc((size_t)most * each);
  if (partial == NULL || all == NULL) {
    free(partial);
    free(all);
    return NO_MEMORY;
  }
#pragma omp parallel
  {
    float *exponentials = part_of_thread(all, each);
    float *sums = partial + omp_get_thread_num() * vocabulary;
#pragma omp for schedule(static)
    for (i64 m = 0; m < rows; m++) {
      real *row = logits + m * vocabulary;
      const i64 target = targets[m];
      if (target < 0) {
        losses[m] = 0.0f;
        for (i64 v = 0; v < vocabulary; v++) row[v] = store(0.0f);
        continue;
      }
      float highest = -INFINITY, total = 0.0f;
#pragma omp simd reduction(max : highest)
      for (i64 v = 0; v < vocabulary; v++) {
        exponentials[v] = load(row[v]) + bias[v];
        highest = exponentials[v] > highest ? exponentials[v] : highest;
      }
      const float at_target = exponentials[target] - highest;
#pragma omp simd reduction(+ : total)
      for (i64 v = 0; v < vocabulary; v++) {
        exponentials[v] = exponential(exponentials[v] - highest);
        total += exponentials[v];
      }
      losses[m] = logf(total) - at_target;
      const float factor = 1.0f / total;
      exponentials[target] -= total;
#pragma omp simd
      for (i64 v = 0; v < vocabulary; v++) {
        const float gradient = exponentials[v] * factor;
        row[v] = store(gradient);
        sums[v] += gradient;
      }
    }
#pragma omp for schedule(static)
    for (i64 v = 0; v < vocabulary; v++)
      for (int thread = 0; thread < most; thread++) d_bias[v] += partial[thread * vocabulary + v];
  }
  free(all);
  free(partial);
  return DONE;
}
