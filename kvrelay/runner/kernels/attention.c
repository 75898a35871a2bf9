/* Causal attention over a paged context, for decodes and prompt chunks alike.
 *
 * One task is one KV head and a block of queries of one row; its lines are the (query, head) pairs that share the KV head. Keys
 * come in tiles of TILE_KEYS, tiles in partitions of PARTITION, both counted from the start of the context. Within a partition
 * the softmax is kept up to date tile by tile; partitions are merged in order. So a line's result depends on its query and
 * context only - not on the batch, the chunk, the block size, or whether the partitions of a long context were shared out to
 * threads: keys that a line may not see weigh exactly 0. */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "common.h"

#define TILE_KEYS 64
#define PARTITION 256
#define MAX_LINES 64
#define CHUNK 16 /* of a head's dimensions */
#define CHUNK_VECTORS (CHUNK / LANES)
#define LINE_TILE 4
#define STRIDE (AT_ONCE * LANES) /* of the softmax */
#define NOTHING (-1e30f)        /* the largest score of no keys; finite, so that differences are no NaN */
#define WORTH_SHARING (1L << 16) /* multiply-adds */

struct Attention {
    const float *q, *keys, *values;
    const int32_t *query_start, *context_lens, *tables;
    float *out;
    long rows, table_stride, block_size, heads, kv_heads, dim;
    float scale;
    /* set here */
    long group, queries_per_task, num_tasks, next_task;
    struct Task *tasks;
    struct Part *parts; /* of a split context: [task][kv head][partition][group] */
    long max_parts;
};

struct Task {
    long row, first_query, queries;
};

/* Softmax so far: the largest score, the sum of weights, and the weighted values. */
struct Part {
    float largest, sum;
    float values[MAX_HEAD_DIM];
};

/* scores[lines][4] = q[lines] . key[4] */
INLINE void score_tile(const int lines, const float *q, const float *const *key, long dim, float *scores) {
    vec sum[LINE_TILE][4];
    UNROLL for (int l = 0; l < lines; l++) UNROLL for (int k = 0; k < 4; k++) sum[l][k] = splat(0.0f);
    for (long d = 0; d < dim; d += LANES) {
        vec keys[4];
        UNROLL for (int k = 0; k < 4; k++) keys[k] = load(key[k] + d);
        UNROLL for (int l = 0; l < lines; l++) {
            vec query = load(q + l * dim + d);
            UNROLL for (int k = 0; k < 4; k++) sum[l][k] = multiply_add(query, keys[k], sum[l][k]);
        }
    }
    UNROLL for (int l = 0; l < lines; l++) sums_of_four(sum[l][0], sum[l][1], sum[l][2], sum[l][3], scores + l * TILE_KEYS);
}

/* part[lines].values += weights[lines][keys] * value[keys], for one chunk of dimensions. A chunk is a cache line, so each step
 * also fetches one line of the next tile's keys. */
INLINE void weigh_tile(const int lines, const float *weights, const float *const *value, const float *const *next_key,
                       long keys, long from, struct Part *part) {
    vec sum[LINE_TILE][CHUNK_VECTORS];
    UNROLL for (int l = 0; l < lines; l++)
        UNROLL for (int v = 0; v < CHUNK_VECTORS; v++) sum[l][v] = load(part[l].values + from + v * LANES);
    for (long k = 0; k < keys; k++) {
        vec values[CHUNK_VECTORS];
        __builtin_prefetch(next_key[k] + from);
        UNROLL for (int v = 0; v < CHUNK_VECTORS; v++) values[v] = load(value[k] + from + v * LANES);
        UNROLL for (int l = 0; l < lines; l++) {
            vec weight = splat(weights[l * TILE_KEYS + k]);
            UNROLL for (int v = 0; v < CHUNK_VECTORS; v++) sum[l][v] = multiply_add(weight, values[v], sum[l][v]);
        }
    }
    UNROLL for (int l = 0; l < lines; l++)
        UNROLL for (int v = 0; v < CHUNK_VECTORS; v++) store(part[l].values + from + v * LANES, sum[l][v]);
}

/* The keys of a tile, and where the next tile's keys are. */
struct Tile {
    long first, keys;
    const float *key[TILE_KEYS], *value[TILE_KEYS];
};

#define LINES(n)                                                                                                                \
    static __attribute__((noinline)) void scores_##n(const float *q, const struct Tile *tile, long dim, float *scores) {        \
        for (long k = 0; k < tile->keys; k += 4) {                                                                              \
            for (long d = 0; d < dim; d += CHUNK)                                                                               \
                UNROLL for (int i = 0; i < 4; i++) __builtin_prefetch(tile->value[k + i] + d);                                  \
            score_tile(n, q, tile->key + k, dim, scores + k);                                                                   \
        }                                                                                                                       \
    }                                                                                                                           \
    static __attribute__((noinline)) void weigh_##n(const float *weights, const struct Tile *tile, const struct Tile *next,     \
                                                    long keys, long dim, struct Part *part) {                                   \
        for (long from = 0; from < dim; from += CHUNK) weigh_tile(n, weights, tile->value, next->key, keys, from, part);        \
    }
LINES(1) LINES(2) LINES(3) LINES(4)
typedef void (*Scores)(const float *, const struct Tile *, long, float *);
typedef void (*Weigh)(const float *, const struct Tile *, const struct Tile *, long, long, struct Part *);
static const Scores SCORES[] = {NULL, scores_1, scores_2, scores_3, scores_4};
static const Weigh WEIGH[] = {NULL, weigh_1, weigh_2, weigh_3, weigh_4};

/* Turns a line's scores into weights, of which the first `seen` count, and makes room for them in its part. */
static void soften(float *scores, long seen, long keys, long dim, struct Part *part) {
    const int count = AT_ONCE;
    long width = (keys + STRIDE - 1) / STRIDE * STRIDE;
    vec top[AT_ONCE], sum[AT_ONCE];
    for (long k = seen; k < width; k++) scores[k] = -INFINITY;
    EACH top[i] = splat(part->largest);
    EACH sum[i] = splat(0.0f);
    for (long k = 0; k < width; k += STRIDE) EACH top[i] = maximum(top[i], load(scores + k + i * LANES));
    float largest = largest_lane(maximum(maximum(top[0], top[1]), maximum(top[2], top[3])));
    for (long k = 0; k < width; k += STRIDE) {
        vec weight[AT_ONCE];
        EACH weight[i] = load(scores + k + i * LANES) - splat(largest);
        exponentials(AT_ONCE, weight);
        EACH store(scores + k + i * LANES, weight[i]);
        EACH sum[i] += weight[i];
    }
    if (largest > part->largest) {
        float shrink = exponential(part->largest - largest);
        part->sum *= shrink;
        for (long d = 0; d < dim; d += LANES) store(part->values + d, load(part->values + d) * shrink);
        part->largest = largest;
    }
    part->sum += sum_lanes((sum[0] + sum[1]) + (sum[2] + sum[3]));
}

static void clear(struct Part *part, long dim) {
    part->largest = NOTHING;
    part->sum = 0.0f;
    memset(part->values, 0, (size_t)dim * sizeof(float));
}

static void merge(struct Part *total, const struct Part *part, long dim) {
    float largest = part->largest > total->largest ? part->largest : total->largest;
    float old = exponential(total->largest - largest), new = exponential(part->largest - largest);
    total->largest = largest;
    total->sum = total->sum * old + part->sum * new;
    for (long d = 0; d < dim; d += LANES) {
        vec kept = load(total->values + d) * old;
        store(total->values + d, multiply_add(load(part->values + d), splat(new), kept));
    }
}

/* Finds the tile that begins at key `first` for one KV head. All places of it point to some key of the row. */
static void find_tile(const struct Attention *job, long row, long kv_head, long first, long end, struct Tile *tile) {
    const int32_t *table = job->tables + row * job->table_stride;
    long block = first / job->block_size, offset = first % job->block_size, width = job->kv_heads * job->dim, at = 0;
    tile->first = first;
    tile->keys = MINIMUM(TILE_KEYS, end - first);
    for (long k = 0; k < TILE_KEYS; k++) {
        if (k < tile->keys) {
            at = (table[block] * job->block_size + offset) * width + kv_head * job->dim;
            if (++offset == job->block_size) offset = 0, block++;
        }
        tile->key[k] = job->keys + at;
        tile->value[k] = job->values + at;
    }
}

/* Adds a tile to up to LINE_TILE lines, of which line `first_line` is the first. */
static void attend_tile(const struct Attention *job, const struct Tile *tile, const struct Tile *next, long position,
                        long first_line, long lines, const float *q, struct Part *parts) {
    float scores[LINE_TILE * TILE_KEYS] __attribute__((aligned(64)));
    long most = 0;
    SCORES[lines](q, tile, job->dim, scores);
    for (long l = 0; l < lines; l++) {
        long seen = position + (first_line + l) / job->group + 1 - tile->first;
        seen = seen < 0 ? 0 : MINIMUM(seen, tile->keys);
        most = seen > most ? seen : most;
        soften(scores + l * TILE_KEYS, seen, tile->keys, job->dim, parts + l);
    }
    WEIGH[lines](scores, tile, next, most, job->dim, parts);
}

/* One partition's part of every line of a task. `position` is the first query's; line l belongs to query l / group. */
static void attend_partition(const struct Attention *job, const struct Task *task, long kv_head, long position, long partition,
                             const float *q, struct Part *parts) {
    long lines = task->queries * job->group, end = position + task->queries;
    long last = MINIMUM((partition + 1) * PARTITION, end);
    struct Tile tiles[2], *tile = tiles, *next = tiles + 1;
    for (long l = 0; l < lines; l++) clear(parts + l, job->dim);
    find_tile(job, task->row, kv_head, partition * PARTITION, end, tile);
    for (long first = tile->first; first < last; first += TILE_KEYS) {
        find_tile(job, task->row, kv_head, first + TILE_KEYS < end ? first + TILE_KEYS : first, end, next);
        for (long l = 0; l < lines; l += LINE_TILE)
            attend_tile(job, tile, next, position, l, MINIMUM(LINE_TILE, lines - l), q + l * job->dim, parts + l);
        struct Tile *done = tile;
        tile = next, next = done;
    }
}

/* The lines' queries side by side, times the scale. */
static void copy_queries(const struct Attention *job, const struct Task *task, long kv_head, float *q) {
    for (long i = 0; i < task->queries; i++) {
        long token = job->query_start[task->row] + task->first_query + i;
        const float *from = job->q + (token * job->heads + kv_head * job->group) * job->dim;
        for (long d = 0; d < job->group * job->dim; d++) *q++ = from[d] * job->scale;
    }
}

static void write_lines(const struct Attention *job, const struct Task *task, long kv_head, const struct Part *parts) {
    for (long l = 0; l < task->queries * job->group; l++) {
        long token = job->query_start[task->row] + task->first_query + l / job->group;
        float *out = job->out + (token * job->heads + kv_head * job->group + l % job->group) * job->dim;
        for (long d = 0; d < job->dim; d++) out[d] = parts[l].values[d] / parts[l].sum;
    }
}

/* The place in the context of a task's first query. */
static long position_of(const struct Attention *job, const struct Task *task) {
    long queries = job->query_start[task->row + 1] - job->query_start[task->row];
    return job->context_lens[task->row] - queries + task->first_query;
}

static void attend_whole(const struct Attention *job, const struct Task *task, long kv_head) {
    float q[MAX_LINES * MAX_HEAD_DIM] __attribute__((aligned(64)));
    struct Part total[MAX_LINES], part[MAX_LINES];
    long position = position_of(job, task), lines = task->queries * job->group;
    copy_queries(job, task, kv_head, q);
    attend_partition(job, task, kv_head, position, 0, q, total);
    for (long p = 1; p * PARTITION < position + task->queries; p++) {
        attend_partition(job, task, kv_head, position, p, q, part);
        for (long l = 0; l < lines; l++) merge(total + l, part + l, job->dim);
    }
    write_lines(job, task, kv_head, total);
}

/* Tasks are taken one by one, for their contexts differ; the last queries of a prompt, which see most, go first. */
static void whole_share(void *arguments) {
    struct Attention *job = arguments;
    long count = job->num_tasks * job->kv_heads, taken;
    while ((taken = __atomic_fetch_add(&job->next_task, 1, __ATOMIC_RELAXED)) < count)
        attend_whole(job, job->tasks + (job->num_tasks - 1 - taken / job->kv_heads), taken % job->kv_heads);
}

static void split_share(void *arguments) {
    struct Attention *job = arguments;
    long count = job->num_tasks * job->kv_heads * job->max_parts, taken;
    while ((taken = __atomic_fetch_add(&job->next_task, 1, __ATOMIC_RELAXED)) < count) {
        float q[MAX_LINES * MAX_HEAD_DIM] __attribute__((aligned(64)));
        long partition = taken % job->max_parts, kv_head = taken / job->max_parts % job->kv_heads;
        const struct Task *task = job->tasks + taken / job->max_parts / job->kv_heads;
        long position = position_of(job, task);
        if (partition * PARTITION > position) continue;
        copy_queries(job, task, kv_head, q);
        attend_partition(job, task, kv_head, position, partition, q, job->parts + taken * job->group);
    }
}

static void merge_split(struct Attention *job) {
    for (long t = 0; t < job->num_tasks; t++)
        for (long h = 0; h < job->kv_heads; h++) {
            struct Part *parts = job->parts + (t * job->kv_heads + h) * job->max_parts * job->group;
            for (long p = 1; p * PARTITION <= position_of(job, job->tasks + t); p++)
                for (long g = 0; g < job->group; g++) merge(parts + g, parts + p * job->group + g, job->dim);
            write_lines(job, job->tasks + t, h, parts);
        }
}

/* Cuts the rows' queries into tasks; returns the number of multiply-adds. */
static long make_tasks(struct Attention *job) {
    long work = 0;
    for (long row = 0; row < job->rows; row++) {
        long queries = job->query_start[row + 1] - job->query_start[row];
        work += queries * job->context_lens[row] * job->heads * job->dim * 2;
        for (long first = 0; first < queries; first += job->queries_per_task)
            job->tasks[job->num_tasks++] = (struct Task){row, first, MINIMUM(job->queries_per_task, queries - first)};
    }
    return work;
}

/* Returns 0, or -1 when there is no memory for the plan. */
EXPORT int attention(const float *q, const float *keys, const float *values, const int32_t *query_start,
                     const int32_t *context_lens, const int32_t *tables, float *out, long rows, long table_stride,
                     long block_size, long heads, long kv_heads, long dim, float scale, long max_query, long max_context,
                     int threads) {
    long group = heads / kv_heads, per_task = group <= 4 ? 16 : MAX_LINES / group;
    struct Attention job = {.q = q, .keys = keys, .values = values, .query_start = query_start, .context_lens = context_lens,
                            .tables = tables, .out = out, .rows = rows, .table_stride = table_stride, .block_size = block_size,
                            .heads = heads, .kv_heads = kv_heads, .dim = dim, .scale = scale, .group = group,
                            .queries_per_task = per_task, .max_parts = (max_context + PARTITION - 1) / PARTITION};
    job.tasks = malloc((size_t)(query_start[rows] / per_task + rows) * sizeof(struct Task));
    if (!job.tasks) return -1;
    long work = make_tasks(&job);
    if (work < WORTH_SHARING) threads = 1;
    int split = threads > 1 && max_query == 1 && job.max_parts > 1 && rows * kv_heads < 4L * threads;
    if (split) {
        job.parts = malloc((size_t)(job.num_tasks * kv_heads * job.max_parts * group) * sizeof(struct Part));
        split = job.parts != NULL;
    }
    on_threads(threads, split ? split_share : whole_share, &job);
    if (split) merge_split(&job);
    free(job.parts);
    free(job.tasks);
    return 0;
}
