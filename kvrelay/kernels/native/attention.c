/* Causal attention over a paged context, for decodes and prompt chunks alike.
 *
 * One task is a block of queries of one row and some KV heads: all of them for a decode, whose time goes into reading keys and
 * values, which lie side by side for all heads; one for a prompt, whose time goes into arithmetic on keys that stay in the
 * first-level cache. A task's lines are its (KV head, query, head) triples. Keys come in tiles of TILE_KEYS, tiles in
 * partitions of PARTITION, both counted from the start of the context. Within a partition the softmax is kept up to date tile
 * by tile; partitions are merged in order. So a line's result depends on its query and context only - not on the batch, the
 * chunk, the block size, or whether the partitions of a long context were shared out to threads: keys that a line may not see
 * weigh exactly 0. How a tile is computed is in attention_wide.h (AVX2, AVX-512) and attention_narrow.h (all others). */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "common.h"

#if LANES >= 8
#define LINE_TILE (LANES == 16 ? 14 : 6)
#define MAX_LINES 128
#define TILE_KEYS 256
#define PARTITION 512
#define QUERIES(group) (MAX_LINES / (group)) /* of a task */
#else
#define LINE_TILE 4
#define MAX_LINES 64
#define TILE_KEYS 64
#define PARTITION 128
#define QUERIES(group) ((group) <= 4 ? 16 : MAX_LINES / (group))
#endif
#define STRIDE (AT_ONCE * LANES) /* of the softmax */
#define NOTHING (-1e30f)         /* the largest score of no keys; finite, so that differences are no NaN */
#define WORTH_SHARING (1L << 16) /* multiply-adds */

struct Attention {
    const float *q, *keys, *values;
    const int32_t *query_start, *context_lens, *tables;
    float *out;
    long rows, table_stride, block_size, heads, kv_heads, dim;
    float scale;
    /* set here */
    long group, queries_per_task, num_tasks, next_task, max_queries, max_parts, most_work;
    struct Task *tasks;
    struct Part *parts; /* of split contexts: [task][partition][MAX_LINES] */
};

struct Task {
    long row, first_query, queries, first_head, kv_heads;
};

/* Softmax so far: the largest score, the sum of weights, and the weighted values. */
struct Part {
    float values[MAX_HEAD_DIM];
    float largest, sum;
};

/* Where some consecutive keys and values are: of the first KV head, the others' follow. `head`: how many floats further those of
 * the task's first KV head are. */
struct Tile {
    long first, keys, head;
    const float *key[TILE_KEYS], *value[TILE_KEYS];
};

/* The keys that will be read next. */
struct Fetch {
    const float *const *rows;
    long head;
};

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
        exponentials(AT_ONCE, 1, weight);
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

/* Finds the tile that begins at key `first`. All places of it point to some key and value. */
static void find_tile(const struct Attention *job, const struct Task *task, long first, long end, struct Tile *tile) {
    const int32_t *table = job->tables + task->row * job->table_stride;
    long block = first / job->block_size, offset = first % job->block_size, width = job->kv_heads * job->dim, k = 0;
    tile->first = first, tile->keys = MINIMUM(TILE_KEYS, end - first), tile->head = task->first_head * job->dim;
    for (; k < tile->keys; block++, offset = 0) {
        long at = (table[block] * job->block_size + offset) * width;
        for (long last = MINIMUM(k + job->block_size - offset, tile->keys); k < last; k++, at += width)
            tile->key[k] = job->keys + at, tile->value[k] = job->values + at;
    }
    const float *key = k ? tile->key[k - 1] : job->keys, *value = k ? tile->value[k - 1] : job->values;
    for (; k < TILE_KEYS; k++) tile->key[k] = key, tile->value[k] = value;
}

/* A task's line: where its floats are in the queries, and in the output too. */
static long place_of(const struct Attention *job, const struct Task *task, long line) {
    long lines = task->queries * job->group, kv_head = task->first_head + line / lines;
    long token = job->query_start[task->row] + task->first_query + line % lines / job->group;
    return (token * job->heads + kv_head * job->group + line % job->group) * job->dim;
}

#if LANES >= 8
#include "attention_wide.h"
#else
#include "attention_narrow.h"
#endif

/* Adds a tile to every line of a task. */
static void attend_heads(const struct Attention *job, const struct Task *task, const struct Tile *tile, const struct Tile *next,
                         long position, const float *q, struct Part *parts) {
    long lines = task->queries * job->group;
#if LANES >= 8
    if (task->queries == 1 && lines <= LINE_TILE) {
        attend_tile_once(job, task, tile, next, position, q, parts);
        return;
    }
#endif
    for (long h = 0; h < task->kv_heads; h++) {
        long kv_head = task->first_head + h;
        struct Fetch fetch = h + 1 < task->kv_heads ? (struct Fetch){tile->key, (kv_head + 1) * job->dim}
                                                    : (struct Fetch){next->key, next->head};
        attend_tile(job, tile, &fetch, position, kv_head, lines, q + h * lines * job->dim, parts + h * lines);
    }
}

/* One partition's part of every line of a task. `after` is the task that comes next. */
static void attend_partition(const struct Attention *job, const struct Task *task, const struct Task *after, long position,
                             long partition, const float *q, struct Part *parts) {
    long lines = task->queries * job->group, end = position + task->queries, last = MINIMUM((partition + 1) * PARTITION, end);
    struct Tile tiles[2], *tile = tiles, *next = tiles + 1;
    for (long l = 0; l < lines * task->kv_heads; l++) clear(parts + l, job->dim);
    find_tile(job, task, partition * PARTITION, end, tile);
    for (long first = tile->first; first < last; first += TILE_KEYS) {
        if (first + TILE_KEYS < end)
            find_tile(job, task, first + TILE_KEYS, end, next);
        else
            find_tile(job, after, 0, job->context_lens[after->row], next);
        attend_heads(job, task, tile, next, position, q, parts);
        struct Tile *done = tile;
        tile = next, next = done;
    }
}

static void write_lines(const struct Attention *job, const struct Task *task, const struct Part *parts) {
    for (long l = 0; l < task->queries * job->group * task->kv_heads; l++) {
        float *out = job->out + place_of(job, task, l);
        for (long d = 0; d < job->dim; d++) out[d] = parts[l].values[d] / parts[l].sum;
    }
}

static void merge_lines(const struct Attention *job, const struct Task *task, struct Part *totals, const struct Part *parts) {
    for (long l = 0; l < task->queries * job->group * task->kv_heads; l++) merge(totals + l, parts + l, job->dim);
}

/* The place in the context of a task's first query. */
static long position_of(const struct Attention *job, const struct Task *task) {
    long queries = job->query_start[task->row + 1] - job->query_start[task->row];
    return job->context_lens[task->row] - queries + task->first_query;
}

static void attend_whole(const struct Attention *job, const struct Task *task, const struct Task *after) {
    float q[MAX_LINES * MAX_HEAD_DIM + LANES] __attribute__((aligned(64)));
    struct Part totals[MAX_LINES], parts[MAX_LINES];
    long position = position_of(job, task);
    copy_queries(job, task, q);
    attend_partition(job, task, after, position, 0, q, totals);
    for (long p = 1; p * PARTITION < position + task->queries; p++) {
        attend_partition(job, task, after, position, p, q, parts);
        merge_lines(job, task, totals, parts);
    }
    write_lines(job, task, totals);
}

/* Tasks are taken one by one, for their contexts differ; the last queries of a prompt, which see most, go first. While threads
 * keep step, a thread comes next to the task that is as many further as there are threads. */
static void whole_share(void *arguments) {
    struct Attention *job = arguments;
    const struct Task *last = job->tasks + job->num_tasks - 1;
    long taken, threads = openmp.threads();
    while ((taken = __atomic_fetch_add(&job->next_task, 1, __ATOMIC_RELAXED)) < job->num_tasks)
        attend_whole(job, last - taken, last - MINIMUM(taken + threads, job->num_tasks - 1));
}

/* Few decodes with long contexts: partitions are taken one by one, and merged when all are done. */
static void split_share(void *arguments) {
    struct Attention *job = arguments;
    long taken;
    while ((taken = __atomic_fetch_add(&job->next_task, 1, __ATOMIC_RELAXED)) < job->num_tasks * job->max_parts) {
        float q[MAX_LINES * MAX_HEAD_DIM + LANES] __attribute__((aligned(64)));
        const struct Task *task = job->tasks + taken / job->max_parts;
        long partition = taken % job->max_parts, position = position_of(job, task);
        if (partition * PARTITION > position) continue;
        copy_queries(job, task, q);
        attend_partition(job, task, task, position, partition, q, job->parts + taken * MAX_LINES);
    }
}

static void merge_split(const struct Attention *job) {
    for (long t = 0; t < job->num_tasks; t++) {
        const struct Task *task = job->tasks + t;
        struct Part *parts = job->parts + t * job->max_parts * MAX_LINES;
        for (long p = 1; p * PARTITION <= position_of(job, task); p++) merge_lines(job, task, parts, parts + p * MAX_LINES);
        write_lines(job, task, parts);
    }
}

/* Cuts the rows into tasks, or only counts and measures them. Returns the number of multiply-adds. */
static long make_tasks(struct Attention *job, struct Task *tasks) {
    long work = 0;
    job->num_tasks = job->max_queries = job->max_parts = job->most_work = 0;
    for (long row = 0; row < job->rows; row++) {
        long queries = job->query_start[row + 1] - job->query_start[row];
        long most_heads = queries == 1 ? MAX_LINES / job->group : 1, num_parts = (job->context_lens[row] - 1) / PARTITION + 1;
        job->max_queries = queries > job->max_queries ? queries : job->max_queries;
        job->max_parts = num_parts > job->max_parts ? num_parts : job->max_parts;
        long row_work = queries * job->context_lens[row] * job->heads * job->dim * 2;
        job->most_work = row_work > job->most_work ? row_work : job->most_work;
        work += row_work;
        for (long first = 0; first < queries; first += job->queries_per_task)
            for (long head = 0; head < job->kv_heads; head += most_heads) {
                if (tasks)
                    tasks[job->num_tasks] = (struct Task){row, first, MINIMUM(job->queries_per_task, queries - first), head,
                                                          MINIMUM(most_heads, job->kv_heads - head)};
                job->num_tasks++;
            }
    }
    return work;
}

/* Returns 0, or -1 when there is no memory for the plan. */
EXPORT int attention(const float *q, const float *keys, const float *values, const int32_t *query_start,
                     const int32_t *context_lens, const int32_t *tables, float *out, long rows, long table_stride,
                     long block_size, long heads, long kv_heads, long dim, float scale, int threads) {
    long group = heads / kv_heads, per_task = QUERIES(group);
    struct Attention job = {.q = q, .keys = keys, .values = values, .query_start = query_start, .context_lens = context_lens,
                            .tables = tables, .out = out, .rows = rows, .table_stride = table_stride, .block_size = block_size,
                            .heads = heads, .kv_heads = kv_heads, .dim = dim, .scale = scale, .group = group,
                            .queries_per_task = per_task};
    long work = make_tasks(&job, NULL);
    for (; job.queries_per_task > 16 && job.num_tasks < 4L * threads; make_tasks(&job, NULL)) job.queries_per_task /= 2;
    int worth_sharing = work >= WORTH_SHARING;
    /* Whole rows keep all threads busy unless there are too few of them, or one is longer than a thread's part of all. */
    int uneven = job.num_tasks % threads != 0 || job.most_work * threads > work + work / 4;
    int split = worth_sharing && threads > 1 && job.max_queries == 1 && job.max_parts > 1 && job.num_tasks < 4L * threads && uneven;
    job.tasks = malloc((size_t)(job.num_tasks + 1) * sizeof(struct Task));
    if (split) job.parts = malloc((size_t)(job.num_tasks * job.max_parts * MAX_LINES) * sizeof(struct Part));
    if (!job.tasks || (split && !job.parts)) {
        free(job.tasks), free(job.parts);
        return -1;
    }
    make_tasks(&job, job.tasks);
    on_threads(worth_sharing ? threads : 1, split ? split_share : whole_share, &job);
    if (split) merge_split(&job);
    free(job.tasks), free(job.parts);
    return 0;
}
