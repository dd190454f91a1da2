/* Attention within each sequence of a pack, with dropout, forward and backward.
 *
 * A task is one head of one sequence; its scores live in the near cache, some rows at a time,
 * and nothing of size length^2 ever reaches memory. Queries, keys and values are read where the
 * projection left them: rows of `query` and `key` are so many numbers apart, and a value lies
 * heads * width after its key. Some tokens may have no query, where nobody wants their context.
 */
#include "tile.h"

#define QUERY_ROWS 24 /* queries whose scores are held at once, forward */
#define KEY_ROWS 48   /* keys whose scores are held at once, backward; even */

INLINE i64 round_up(i64 n, i64 to) { return (n + to - 1) / to * to; }
INLINE i64 units_of(i64 n) { return (n + PER_UNIT - 1) / PER_UNIT; }

INLINE element element_of(real x) {
#if PAIRED
  return x;
#else
  return load(x);
#endif
}

INLINE element element_of_float(float x) {
#if PAIRED
  return store(x);
#else
  return x;
#endif
}

/* Two elements as one unit; with one element a unit, the first. */
INLINE unit join(element first, element second) {
#if PAIRED
  return (uint32_t)first | (uint32_t)second << 16;
#else
  (void)second;
  return first;
#endif
}

/* The unit whose elements lie side by side in memory. */
INLINE unit unit_at(const real *x) {
#if PAIRED
  unit value;
  memcpy(&value, x, sizeof value);
  return value;
#else
  return load(*x);
#endif
}

/* Rows of units along the width: a left-hand side. */
static void pack_rows(i64 rows, i64 width, const real *x, i64 x_stride, unit *out) {
  const i64 depth = units_of(width);
  for (i64 t = 0; t < rows; t++) {
    element *row = (element *)(out + t * depth);
    for (i64 d = 0; d < width; d++) row[d] = element_of(x[t * x_stride + d]);
    if (width % PER_UNIT) row[width] = 0;
  }
}

/* The same transposed: units along the width go down, rows of x across; a right-hand side of
 * panels. Columns are zero up to a multiple of PADDED. */
static right_side pack_across(i64 rows, i64 width, const real *x, i64 x_stride, unit *out) {
  const i64 depth = units_of(width), padded = round_up(rows, PADDED), whole = width / PER_UNIT;
  for (i64 t = 0; t < padded; t++) {
    unit *column = out + t / PANEL * (PANEL * depth) + t % PANEL;
    const real *row = x + t * x_stride;
    if (t >= rows) {
      for (i64 k = 0; k < depth; k++) column[k * PANEL] = 0;
      continue;
    }
    for (i64 k = 0; k < whole; k++) column[k * PANEL] = unit_at(row + k * PER_UNIT);
    if (whole < depth) column[whole * PANEL] = join(element_of(row[width - 1]), 0);
  }
  const right_side side = {out, PANEL, PANEL * depth};
  return side;
}

/* Units along the rows of x, which go down; the width across: a right-hand side. */
static right_side pack_down(i64 rows, i64 width, const real *x, i64 x_stride, unit *out) {
  const i64 padded = round_up(width, PADDED);
  for (i64 k = 0; k < units_of(rows); k++) {
    const real *first = x + k * PER_UNIT * x_stride, *second = first + x_stride;
    unit *row = out + k * padded;
    if (PER_UNIT == 1 || k * PER_UNIT + 1 < rows) {
#pragma omp simd
      for (i64 d = 0; d < width; d++)
        row[d] = join(element_of(first[d]), PER_UNIT == 1 ? 0 : element_of(second[d]));
    } else {
      for (i64 d = 0; d < width; d++) row[d] = join(element_of(first[d]), 0);
    }
    for (i64 d = width; d < padded; d++) row[d] = 0;
  }
  const right_side side = {out, padded, PANEL};
  return side;
}

/* Scores of one query to probabilities, unnormalised and dropped out; returns their sum before
 * dropout. Padded columns are overwritten with scores of no weight (e^-87 each), so that every loop
 * is whole vectors: a rest of 13 done one by one would cost more than the products. */
INLINE float probabilities(float *scores, i64 length, i64 padded, float scale, row_key key,
                           uint32_t threshold, element *out, float *highest) {
  for (i64 j = length; j < padded; j++) scores[j] = -1e30f;
  float most = scores[0], sum = 0.0f;
#pragma omp simd reduction(max : most)
  for (i64 j = 0; j < padded; j++) most = scores[j] > most ? scores[j] : most;
#pragma omp simd reduction(+ : sum)
  for (i64 j = 0; j < padded; j++) {
    scores[j] = exponential((scores[j] - most) * scale);
    sum += scores[j];
  }
  if (threshold == 0) {
#pragma omp simd
    for (i64 j = 0; j < padded; j++) out[j] = element_of_float(scores[j]);
  } else {
#pragma omp simd
    for (i64 j = 0; j < padded; j++) {
      const uint32_t bits = element_bits((uint32_t)j, key.first, key.second);
      out[j] = element_of_float(bits >= threshold ? scores[j] : 0.0f);
    }
  }
  if (length % PER_UNIT) out[length] = 0;
  *highest = most * scale;
  return sum;
}

/* What all tasks share. Sequence n has keys starts[n] to starts[n + 1], and queries likewise. */
typedef struct {
  i64 sequences, longest, heads, width;
  const int32_t *starts, *query_starts;
  const i64 *rows; /* the token of each query, by which its dropout goes; NULL: its own number */
  i64 query_stride, key_stride;
  float scale;
} shape;

/* Where a task reads and how long it is. */
typedef struct {
  i64 start, length, query_start, queries, head, heads, width;
} task;

/* Sequences are taken from the longer end, so that the last ones to finish are short. */
INLINE task task_of(i64 index, const shape *of) {
  const int32_t *starts = of->starts, *query_starts = of->query_starts;
  const i64 first = starts[1] - starts[0];
  const i64 last = starts[of->sequences] - starts[of->sequences - 1];
  i64 n = index / of->heads;
  if (last > first) n = of->sequences - 1 - n;
  const task out = {starts[n],
                    starts[n + 1] - starts[n],
                    query_starts[n],
                    query_starts[n + 1] - query_starts[n],
                    index % of->heads,
                    of->heads,
                    of->width};
  return out;
}

/* The dropout bits' key of a query. */
INLINE row_key key_of_query(const shape *of, const dropout *drop, i64 query, i64 head) {
  const i64 token = of->rows ? of->rows[query] : query;
  return key_of_row(drop->key, (uint64_t)(token * of->heads + head));
}

static void forward_task(task at, const shape *of, const real *query, const real *key,
                         const dropout *drop, real *context, float *log_sums, char *scratch) {
  const i64 all = at.heads * at.width, length = at.length, queries_here = at.queries;
  const i64 padded = round_up(length, PADDED), wide = round_up(at.width, PADDED);
  const i64 depth = units_of(at.width), down = units_of(length), row_units = units_of(padded);
  unit *queries = (unit *)scratch, *keys = queries + queries_here * depth;
  unit *values = keys + round_up(length, PANEL) * depth, *probs = values + down * wide;
  float *scores = (float *)(probs + QUERY_ROWS * row_units), *sums = scores + QUERY_ROWS * padded;
  float *out = sums + QUERY_ROWS;
  query += at.query_start * of->query_stride + at.head * at.width;
  key += at.start * of->key_stride + at.head * at.width;
  pack_rows(queries_here, at.width, query, of->query_stride, queries);
  const right_side key_side = pack_across(length, at.width, key, of->key_stride, keys);
  const right_side value_side = pack_down(length, at.width, key + all, of->key_stride, values);
  for (i64 i = 0; i < queries_here; i += QUERY_ROWS) {
    const i64 rows = queries_here - i < QUERY_ROWS ? queries_here - i : QUERY_ROWS;
    multiply(rows, padded, depth, queries + i * depth, depth, key_side, scores, padded, 0);
    for (i64 r = 0; r < rows; r++) {
      const i64 row = at.query_start + i + r;
      float highest;
      sums[r] = probabilities(scores + r * padded, length, padded, of->scale,
                              key_of_query(of, drop, row, at.head), drop->threshold,
                              (element *)(probs + r * row_units), &highest);
      log_sums[row * at.heads + at.head] = highest + logf(sums[r]);
    }
    multiply(rows, wide, down, probs, row_units, value_side, out, wide, 0);
    for (i64 r = 0; r < rows; r++) {
      real *to = context + (at.query_start + i + r) * all + at.head * at.width;
      const float factor = drop->scale / sums[r];
#pragma omp simd
      for (i64 d = 0; d < at.width; d++) to[d] = store(out[r * wide + d] * factor);
    }
  }
}

/* Bytes a task may need, forward or backward, for the longest sequence. */
static size_t scratch_bytes(i64 longest, i64 width) {
  const i64 padded = round_up(longest, PANEL > PADDED ? PANEL : PADDED);
  const i64 wide = round_up(width, PADDED);
  const i64 floats = 8 * padded * wide + 6 * KEY_ROWS * padded + 2 * KEY_ROWS * wide + 6 * padded;
  return (size_t)(floats + 1024) * sizeof(float);
}

/* context = dropout(softmax(query key' * scale)) value, per sequence and head; log_sums (queries,
 * heads) is what the gradient needs to know of each softmax. */
EXPORT int attention_forward(const shape *of, const real *query, const real *key,
                              const dropout *drop, real *context, float *log_sums) {
  const size_t each = in_lines(scratch_bytes(of->longest, of->width));
  char *all = malloc((size_t)omp_get_max_threads() * each);
  if (all == NULL) return NO_MEMORY;
#pragma omp parallel
  {
    char *scratch = part_of_thread(all, each);
#pragma omp for schedule(dynamic, 1)
    for (i64 index = 0; index < of->sequences * of->heads; index++) {
      const task at = task_of(index, of);
      if (at.queries) forward_task(at, of, query, key, drop, context, log_sums, scratch);
    }
  }
  free(all);
  return DONE;
}

/* What backward needs to know of each query of a task; padded queries have probability 0. */
typedef struct {
  float *log_sum, *delta;
  uint32_t *first, *second;
} query_facts;

static void gather_facts(task at, const shape *of, const dropout *drop, const real *context,
                         const real *d_context, const float *log_sums, query_facts facts) {
  const i64 all = at.heads * at.width;
  for (i64 i = 0; i < round_up(at.queries, PADDED); i++) {
    facts.log_sum[i] = 1e30f;
    facts.delta[i] = 0.0f;
    facts.first[i] = facts.second[i] = 0;
    if (i >= at.queries) continue;
    const i64 row = at.query_start + i, from = row * all + at.head * at.width;
    const row_key key = key_of_query(of, drop, row, at.head);
    float sum = 0.0f;
#pragma omp simd reduction(+ : sum)
    for (i64 d = 0; d < at.width; d++) sum += load(context[from + d]) * load(d_context[from + d]);
    facts.log_sum[i] = log_sums[row * at.heads + at.head];
    facts.delta[i] = sum;
    facts.first[i] = key.first;
    facts.second[i] = key.second;
  }
}

/* One key against all queries: its scores become dropped-out probabilities and d_scores. */
INLINE void gradient_row(i64 key, i64 padded, float scale, const dropout *drop, query_facts facts,
                         const float *scores, const float *d_probs, element *probs,
                         element *d_scores) {
  const uint32_t threshold = drop->threshold;
  const float kept = drop->scale;
  const float *log_sum = facts.log_sum, *delta = facts.delta;
  const uint32_t *first = facts.first, *second = facts.second;
  if (threshold == 0) {
#pragma omp simd
    for (i64 i = 0; i < padded; i++) {
      const float p = exponential(scores[i] * scale - log_sum[i]);
      probs[i] = element_of_float(p);
      d_scores[i] = element_of_float(p * (d_probs[i] - delta[i]) * scale);
    }
  } else {
#pragma omp simd
    for (i64 i = 0; i < padded; i++) {
      const float p = exponential(scores[i] * scale - log_sum[i]);
      const uint32_t bits = element_bits((uint32_t)key, first[i], second[i]);
      const float weight = bits >= threshold ? kept : 0.0f;
      probs[i] = element_of_float(p * weight);
      d_scores[i] = element_of_float(p * (weight * d_probs[i] - delta[i]) * scale);
    }
  }
}

/* Rows of d_scores, one a key, as a right-hand side with units along the keys. */
static right_side pack_d_scores(i64 rows, i64 padded, const element *x, unit *out) {
  const i64 depth = units_of(rows);
  for (i64 k = 0; k < depth; k++) {
    const element *first = x + k * PER_UNIT * padded;
    const int paired = PER_UNIT == 2 && k * PER_UNIT + 1 < rows;
    for (i64 from = 0; from < padded; from += PANEL) {
      const i64 size = padded - from < PANEL ? padded - from : PANEL;
      unit *row = out + from * depth + k * PANEL;
      if (paired) {
#pragma omp simd
        for (i64 i = 0; i < size; i++) row[i] = join(first[from + i], first[padded + from + i]);
      } else {
#pragma omp simd
        for (i64 i = 0; i < size; i++) row[i] = join(first[from + i], 0);
      }
    }
  }
  const right_side side = {out, PANEL, PANEL * depth};
  return side;
}

static void write_rows(i64 rows, i64 width, const float *x, i64 x_stride, real *out, i64 stride) {
  for (i64 r = 0; r < rows; r++)
#pragma omp simd
    for (i64 d = 0; d < width; d++) out[r * stride + d] = store(x[r * x_stride + d]);
}

static void backward_task(task at, const shape *of, const real *query, const real *key,
                          const real *context, const real *d_context, const float *log_sums,
                          const dropout *drop, real *d_query, real *d_key, char *scratch) {
  const i64 all = at.heads * at.width, length = at.length, queries = at.queries;
  const i64 query_stride = of->query_stride, key_stride = of->key_stride;
  const i64 padded = round_up(queries, PADDED), wide = round_up(at.width, PADDED);
  const i64 panels = round_up(queries, PANEL > PADDED ? PANEL : PADDED);
  const i64 depth = units_of(at.width), row = units_of(padded);
  const i64 down = units_of(queries), down_keys = units_of(length);
  const real *d_out = d_context + at.query_start * all + at.head * at.width;
  query += at.query_start * query_stride + at.head * at.width;
  d_query += at.query_start * query_stride + at.head * at.width;
  key += at.start * key_stride + at.head * at.width;
  d_key += at.start * key_stride + at.head * at.width;
  unit *space = (unit *)scratch;
  unit *keys = space, *values = keys + length * depth;
  unit *turned_keys = values + length * depth, *query_across = turned_keys + at.width * down_keys;
  unit *query_down = query_across + panels * depth, *out_across = query_down + down * wide;
  unit *out_down = out_across + panels * depth, *d_pairs = out_down + down * wide;
  unit *probs = d_pairs + units_of(KEY_ROWS) * panels, *d_scores = probs + KEY_ROWS * row;
  float *scores = (float *)(d_scores + KEY_ROWS * row), *d_probs = scores + KEY_ROWS * padded;
  float *small = d_probs + KEY_ROWS * padded, *turned = small + KEY_ROWS * wide;
  float *facts_at = turned + at.width * padded;
  const query_facts facts = {facts_at, facts_at + padded, (uint32_t *)(facts_at + 2 * padded),
                             (uint32_t *)(facts_at + 3 * padded)};
  gather_facts(at, of, drop, context, d_context, log_sums, facts);
  pack_rows(length, at.width, key, key_stride, keys);
  pack_rows(length, at.width, key + all, key_stride, values);
  const right_side q_across = pack_across(queries, at.width, query, query_stride, query_across);
  const right_side o_across = pack_across(queries, at.width, d_out, all, out_across);
  const right_side q_down = pack_down(queries, at.width, query, query_stride, query_down);
  const right_side o_down = pack_down(queries, at.width, d_out, all, out_down);
  for (i64 k = 0; k < down_keys; k++) { /* keys once more: width down, units along the keys */
    const real *first = key + k * PER_UNIT * key_stride;
    const int paired = PER_UNIT == 2 && k * PER_UNIT + 1 < length;
    for (i64 d = 0; d < at.width; d++)
      turned_keys[d * down_keys + k] =
          join(element_of(first[d]), paired ? element_of(first[key_stride + d]) : 0);
  }
  for (i64 j = 0; j < length; j += KEY_ROWS) {
    const i64 rows = length - j < KEY_ROWS ? length - j : KEY_ROWS;
    multiply(rows, padded, depth, keys + j * depth, depth, q_across, scores, padded, 0);
    multiply(rows, padded, depth, values + j * depth, depth, o_across, d_probs, padded, 0);
    for (i64 r = 0; r < rows; r++)
      gradient_row(j + r, padded, of->scale, drop, facts, scores + r * padded,
                   d_probs + r * padded, (element *)(probs + r * row),
                   (element *)(d_scores + r * row));
    multiply(rows, wide, down, probs, row, o_down, small, wide, 0);
    write_rows(rows, at.width, small, wide, d_key + all + j * key_stride, key_stride);
    multiply(rows, wide, down, d_scores, row, q_down, small, wide, 0);
    write_rows(rows, at.width, small, wide, d_key + j * key_stride, key_stride);
    const right_side pairs = pack_d_scores(rows, padded, (const element *)d_scores, d_pairs);
    multiply(at.width, padded, units_of(rows), turned_keys + j / PER_UNIT, down_keys, pairs,
             turned, padded, j > 0);
  }
  for (i64 i = 0; i < queries; i++)
    for (i64 d = 0; d < at.width; d++) d_query[i * query_stride + d] = store(turned[d * padded + i]);
}

/* Keys and values that no query looks at. */
static void no_gradient(task at, const shape *of, real *d_key) {
  const i64 all = at.heads * at.width;
  for (i64 i = 0; i < at.length; i++) {
    real *to = d_key + (at.start + i) * of->key_stride + at.head * at.width;
    memset(to, 0, (size_t)at.width * sizeof(real));
    memset(to + all, 0, (size_t)at.width * sizeof(real));
  }
}

/* d_query and d_key (d_value after it), laid out as query and key and wholly written. */
EXPORT int attention_backward(const shape *of, const real *query, const real *key,
                              const real *context, const real *d_context, const float *log_sums,
                              const dropout *drop, real *d_query, real *d_key) {
  const size_t each = in_lines(scratch_bytes(of->longest, of->width));
  char *all = malloc((size_t)omp_get_max_threads() * each);
  if (all == NULL) return NO_MEMORY;
#pragma omp parallel
  {
    char *scratch = part_of_thread(all, each);
#pragma omp for schedule(dynamic, 1)
    for (i64 index = 0; index < of->sequences * of->heads; index++) {
      const task at = task_of(index, of);
      if (at.queries)
        backward_task(at, of, query, key, context, d_context, log_sums, drop, d_query, d_key,
                      scratch);
      else
        no_gradient(at, of, d_key);
    }
  }
  free(all);
  return DONE;
}
