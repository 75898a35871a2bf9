/* A tile of attention for AVX2 and AVX-512: keys are turned to [dimensions][keys], so that a score is one chain of multiply-adds over
 * the head's dimensions in order, with the scores of many keys side by side. Some lines at a time go through scores, softmax and
 * values, with a few vectors of keys or of dimensions in registers: more of them the fewer the lines.
 *
 * A decode of few lines per head reads every key once, so turning keys first would only cost: they are turned in registers, and
 * keys and values are read in the order in which they lie, of all heads, each fetched some steps before its use. */
#include "transpose.h"

#define FEW_LINES (LINE_TILE / 2)

#define WIDTH (2 * LANES) /* keys or dimensions that lie side by side: as a panel of a linear layer */
#define STREAM_KEYS 16    /* of a decode: read at once, and fetched before those are */
#define FETCHED 16        /* floats of a cache line */

/* scores[lines][vectors * LANES] = q[dim][lines] * keys[dim][vectors * LANES] */
INLINE void score_keys(const int lines, const int vectors, const float *q, const float *keys, long dim, float *scores) {
    vec sum[LINE_TILE][4];
    UNROLL for (int l = 0; l < lines; l++) UNROLL for (int v = 0; v < vectors; v++) sum[l][v] = splat(0.0f);
    for (long d = 0; d < dim; d++) {
        vec key[4];
        UNROLL for (int v = 0; v < vectors; v++) key[v] = load(keys + d * WIDTH + v / 2 * dim * WIDTH + v % 2 * LANES);
        UNROLL for (int l = 0; l < lines; l++) {
            vec query = splat(q[d * lines + l]);
            UNROLL for (int v = 0; v < vectors; v++) sum[l][v] = multiply_add(query, key[v], sum[l][v]);
        }
    }
    UNROLL for (int l = 0; l < lines; l++)
        UNROLL for (int v = 0; v < vectors; v++) store(scores + l * TILE_KEYS + v * LANES, sum[l][v]);
}

/* Where the values of some keys are: a row for each key, and how far its next WIDTH dimensions are. */
struct Values {
    const float *const *row;
    long first, stride;
};

/* part[lines].values[d..] += weights[lines][keys] * values[keys][d..], for some vectors of dimensions. Fetches as much of the
 * keys that come next. */
INLINE void weigh_values(const int lines, const int vectors, const float *weights, const struct Values *values, long keys, long d,
                         const struct Fetch *next, struct Part *part) {
    const float *const *row = values->row;
    long from = values->first + d / WIDTH * values->stride + d % WIDTH, stride = values->stride;
    vec sum[LINE_TILE][4];
    UNROLL for (int l = 0; l < lines; l++)
        UNROLL for (int v = 0; v < vectors; v++) sum[l][v] = load(part[l].values + d + v * LANES);
    for (long k = 0; k < keys; k++) {
        vec value[4];
        UNROLL for (int v = 0; next && v < vectors; v += 16 / LANES)
            __builtin_prefetch(next->rows[k] + next->head + d + v * LANES);
        UNROLL for (int v = 0; v < vectors; v++) value[v] = load(row[k] + from + v / 2 * stride + v % 2 * LANES);
        UNROLL for (int l = 0; l < lines; l++) {
            vec weight = splat(weights[l * TILE_KEYS + k]);
            UNROLL for (int v = 0; v < vectors; v++) sum[l][v] = multiply_add(weight, value[v], sum[l][v]);
        }
    }
    UNROLL for (int l = 0; l < lines; l++)
        UNROLL for (int v = 0; v < vectors; v++) store(part[l].values + d + v * LANES, sum[l][v]);
}

/* scores[lines][keys] = q[dim][lines] * row[keys][dim], for STREAM_KEYS keys of one head. Fetches as much of `next`. */
INLINE void score_rows(const int lines, const float *q, const float *const *row, const float *const *next, long head, long dim,
                       float *scores) {
    for (long first = 0; first < STREAM_KEYS; first += LANES, next += LANES) {
        const float *key[LANES], *const *ahead = next;
        vec sum[LINE_TILE];
        long fetched = 0;
        for (long k = 0; k < LANES; k++) key[k] = row[first + k] + head;
        UNROLL for (int l = 0; l < lines; l++) sum[l] = splat(0.0f);
        for (long d = 0; d < dim; d += 4) {
            vec column[4];
            UNROLL for (int i = 0; i < 4 * LANES / FETCHED; i++) {
                __builtin_prefetch(*ahead + head + fetched);
                fetched += FETCHED;
                if (fetched == dim) fetched = 0, ahead++;
            }
            four_columns(key, d, column);
            UNROLL for (int i = 0; i < 4; i++)
                UNROLL for (int l = 0; l < lines; l++)
                    sum[l] = multiply_add(splat(q[(d + i) * lines + l]), column[i], sum[l]);
        }
        UNROLL for (int l = 0; l < lines; l++) store(scores + l * TILE_KEYS + first, sum[l]);
    }
}

/* One function per number of lines, so that each has the registers to itself. */
#define LINES(n)                                                                                                              \
    static __attribute__((noinline)) void scores_##n(const float *q, const float *keys, long count, long dim, float *scores) { \
        const int vectors = n <= FEW_LINES ? 4 : 2;                                                                           \
        for (long k = 0; k < count; k += vectors * LANES) score_keys(n, vectors, q, keys + k * dim, dim, scores + k);         \
    }                                                                                                                         \
    static __attribute__((noinline)) void rows_##n(const float *q, const float *const *row, const float *const *next,         \
                                                   long head, long dim, float *scores) {                                      \
        score_rows(n, q, row, next, head, dim, scores);                                                                       \
    }                                                                                                                         \
    static __attribute__((noinline)) void weigh_##n(const float *weights, const struct Values *values, long keys, long dim,   \
                                                    const struct Fetch *next, struct Part *part) {                            \
        const int vectors = n <= FEW_LINES ? 4 : 2;                                                                           \
        long d = 0;                                                                                                           \
        for (; d + vectors * LANES <= dim; d += vectors * LANES)                                                              \
            weigh_values(n, vectors, weights, values, keys, d, next, part);                                                   \
        for (; d < dim; d += LANES) weigh_values(n, 1, weights, values, keys, d, next, part);                                 \
    }
LINES(1) LINES(2) LINES(3) LINES(4) LINES(5) LINES(6)
typedef void (*Scores)(const float *, const float *, long, long, float *);
typedef void (*Rows)(const float *, const float *const *, const float *const *, long, long, float *);
typedef void (*Weigh)(const float *, const struct Values *, long, long, const struct Fetch *, struct Part *);
#if LANES == 16
LINES(7) LINES(8) LINES(9) LINES(10) LINES(11) LINES(12) LINES(13) LINES(14)
#define LIST(name)                                                                                                            \
    {NULL,    name##1, name##2,  name##3,  name##4,  name##5,  name##6, name##7,                                              \
     name##8, name##9, name##10, name##11, name##12, name##13, name##14}
#else
#define LIST(name) {NULL, name##1, name##2, name##3, name##4, name##5, name##6}
#endif
static const Scores SCORES[] = LIST(scores_);
static const Rows ROWS[] = LIST(rows_);
static const Weigh WEIGH[] = LIST(weigh_);

/* The queries times the scale, LINE_TILE lines at a time as [dim][lines]. Writes a little behind them, too. */
static void copy_queries(const struct Attention *job, const struct Task *task, float *q) {
    long dim = job->dim, per_head = task->queries * job->group;
    for (long first = 0, lines; first < per_head * task->kv_heads; first += lines, q += lines * dim) {
        float scaled[LANES][MAX_HEAD_DIM];
        const float *row[LANES];
        lines = MINIMUM(LINE_TILE, per_head - first % per_head);
        for (long l = 0; l < LANES; l++) row[l] = scaled[MINIMUM(l, lines - 1)];
        for (long l = 0; l < lines; l++) {
            const float *from = job->q + place_of(job, task, first + l);
            for (long d = 0; d < dim; d++) scaled[l][d] = from[d] * job->scale;
        }
        transpose(row, dim, q, lines);
    }
}

/* The tile's keys of one KV head as [keys / WIDTH][dim][WIDTH]. Fetches the values that belong to them. */
static void turn_keys(const struct Tile *tile, long head, long dim, float *keys) {
    for (long first = 0; first < tile->keys; first += LANES) {
        const float *row[LANES];
        for (long k = 0; k < LANES; k++) {
            row[k] = tile->key[first + k] + head;
            for (long d = 0; d < dim; d += 16) __builtin_prefetch(tile->value[first + k] + head + d);
        }
        transpose(row, dim, keys + first / WIDTH * WIDTH * dim + first % WIDTH, WIDTH);
    }
}

/* The tile's values of one KV head as [dim / WIDTH][TILE_KEYS][WIDTH]. */
static void copy_values(const struct Tile *tile, long head, long dim, float *values, const float **row) {
    for (long k = 0; k < tile->keys; k++) {
        row[k] = values + k * WIDTH;
        for (long d = 0; d < dim; d += LANES)
            store(values + k * WIDTH + d / WIDTH * WIDTH * TILE_KEYS + d % WIDTH, load(tile->value[k] + head + d));
    }
}

/* Adds a tile to the lines of one KV head. `position` is the first query's; line l belongs to query l / group. */
static void attend_tile(const struct Attention *job, const struct Tile *tile, const struct Fetch *next, long position,
                        long kv_head, long num_lines, const float *q, struct Part *parts) {
    float keys[MAX_HEAD_DIM * TILE_KEYS] __attribute__((aligned(64)));
    float copy[MAX_HEAD_DIM * TILE_KEYS] __attribute__((aligned(64)));
    const float *row[TILE_KEYS];
    long dim = job->dim, head = kv_head * dim;
    struct Values values = {tile->value, head, WIDTH};
    turn_keys(tile, head, dim, keys);
    if (num_lines > 2 * LINE_TILE) { /* what many lines read is worth a copy */
        copy_values(tile, head, dim, copy, row);
        values = (struct Values){row, 0, WIDTH * TILE_KEYS};
    }
    for (long first = 0; first < num_lines; first += LINE_TILE) {
        float scores[LINE_TILE * TILE_KEYS] __attribute__((aligned(64)));
        long lines = MINIMUM(LINE_TILE, num_lines - first), most = position + (first + lines - 1) / job->group + 1 - tile->first;
        if (most <= 0) continue;
        most = MINIMUM(most, tile->keys);
        SCORES[lines](q + first * dim, keys, most, dim, scores);
        for (long l = 0; l < lines; l++) {
            long seen = position + (first + l) / job->group + 1 - tile->first;
            soften(scores + l * TILE_KEYS, seen < 0 ? 0 : MINIMUM(seen, most), most, dim, parts + first + l);
        }
        WEIGH[lines](scores, &values, most, dim, next, parts + first);
        next = NULL; /* the first lines have fetched it */
    }
}

/* Adds a tile to the lines of all KV heads of a task that has one query. */
static void attend_tile_once(const struct Attention *job, const struct Task *task, const struct Tile *tile,
                             const struct Tile *next, long position, const float *q, struct Part *parts) {
    float scores[MAX_LINES * TILE_KEYS] __attribute__((aligned(64)));
    const float *row[2 * (TILE_KEYS + STREAM_KEYS)]; /* in the order in which they are read: keys, values, what comes next */
    long dim = job->dim, lines = job->group, seen = MINIMUM(position + 1 - tile->first, tile->keys);
    memcpy(row, tile->key, (size_t)seen * sizeof *row);
    memcpy(row + seen, tile->value, (size_t)seen * sizeof *row);
    memcpy(row + 2 * seen, next->key, 2 * STREAM_KEYS * sizeof *row);
    for (long first = 0; first < seen; first += STREAM_KEYS)
        for (long h = 0; h < task->kv_heads; h++)
            ROWS[lines](q + h * lines * dim, row + first, row + first + STREAM_KEYS, (task->first_head + h) * dim, dim,
                        scores + h * lines * TILE_KEYS + first);
    for (long l = 0; l < lines * task->kv_heads; l++) soften(scores + l * TILE_KEYS, seen, seen, dim, parts + l);
    for (long first = 0; first < seen; first += STREAM_KEYS)
        for (long h = 0; h < task->kv_heads; h++) {
            long head = (task->first_head + h) * dim;
            struct Values values = {row + seen + first, head, WIDTH};
            struct Fetch fetch = {row + seen + first + STREAM_KEYS, head};
            WEIGH[lines](scores + h * lines * TILE_KEYS + first, &values, MINIMUM(STREAM_KEYS, seen - first), dim, &fetch,
                         parts + h * lines);
        }
}
