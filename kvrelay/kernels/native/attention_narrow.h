/* A tile of attention for vectors of four floats: a score is a product of vectors over the head's dimensions, then a sum of their
 * lanes. */
#define CHUNK 16 /* of a head's dimensions */
#define CHUNK_VECTORS (CHUNK / LANES)

/* scores[lines][4] = q[lines] . key[4] */
INLINE void score_tile(const int lines, const float *q, const float *const *row, long head, long dim, float *scores) {
    const float *key[4] = {row[0] + head, row[1] + head, row[2] + head, row[3] + head};
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

/* part[lines].values[to..] += weights[lines][keys] * value[keys][from..], for one chunk of dimensions. A chunk is a cache line,
 * so each step also fetches one line of the keys that come next. */
INLINE void weigh_tile(const int lines, const float *weights, const float *const *value, long keys, long from,
                       const float *const *next_key, long next_from, struct Part *part, long to) {
    vec sum[LINE_TILE][CHUNK_VECTORS];
    UNROLL for (int l = 0; l < lines; l++)
        UNROLL for (int v = 0; v < CHUNK_VECTORS; v++) sum[l][v] = load(part[l].values + to + v * LANES);
    for (long k = 0; k < keys; k++) {
        vec values[CHUNK_VECTORS];
        __builtin_prefetch(next_key[k] + next_from);
        UNROLL for (int v = 0; v < CHUNK_VECTORS; v++) values[v] = load(value[k] + from + v * LANES);
        UNROLL for (int l = 0; l < lines; l++) {
            vec weight = splat(weights[l * TILE_KEYS + k]);
            UNROLL for (int v = 0; v < CHUNK_VECTORS; v++) sum[l][v] = multiply_add(weight, values[v], sum[l][v]);
        }
    }
    UNROLL for (int l = 0; l < lines; l++)
        UNROLL for (int v = 0; v < CHUNK_VECTORS; v++) store(part[l].values + to + v * LANES, sum[l][v]);
}

/* `head` is where a KV head's floats begin. The first lines to read a tile's keys fetch the values that belong to them. */
#define LINES(n)                                                                                                              \
    static __attribute__((noinline)) void scores_##n(const float *q, const struct Tile *tile, long head, long dim,            \
                                                     float *scores, int fetch_values) {                                       \
        for (long k = 0; k < tile->keys; k += 4) {                                                                            \
            for (long d = 0; fetch_values && d < dim; d += CHUNK)                                                             \
                UNROLL for (int i = 0; i < 4; i++) __builtin_prefetch(tile->value[k + i] + head + d);                         \
            score_tile(n, q, tile->key + k, head, dim, scores + k);                                                           \
        }                                                                                                                     \
    }                                                                                                                         \
    static __attribute__((noinline)) void weigh_##n(const float *weights, const struct Tile *tile, const struct Fetch *next,  \
                                                    long keys, long head, long dim, struct Part *part) {                      \
        for (long d = 0; d < dim; d += CHUNK)                                                                                 \
            weigh_tile(n, weights, tile->value, keys, head + d, next->rows, next->head + d, part, d);                         \
    }
LINES(1) LINES(2) LINES(3) LINES(4)
typedef void (*Scores)(const float *, const struct Tile *, long, long, float *, int);
typedef void (*Weigh)(const float *, const struct Tile *, const struct Fetch *, long, long, long, struct Part *);
static const Scores SCORES[] = {NULL, scores_1, scores_2, scores_3, scores_4};
static const Weigh WEIGH[] = {NULL, weigh_1, weigh_2, weigh_3, weigh_4};

/* The lines' queries side by side, times the scale. */
static void copy_queries(const struct Attention *job, const struct Task *task, float *q) {
    for (long l = 0; l < task->queries * job->group * task->kv_heads; l++) {
        const float *from = job->q + place_of(job, task, l);
        for (long d = 0; d < job->dim; d++) *q++ = from[d] * job->scale;
    }
}

/* Adds a tile to the lines of one KV head. `position` is the first query's; line l belongs to query l / group. */
static void attend_tile(const struct Attention *job, const struct Tile *tile, const struct Fetch *next, long position,
                        long kv_head, long num_lines, const float *q, struct Part *parts) {
    long dim = job->dim, head = kv_head * dim;
    for (long first = 0; first < num_lines; first += LINE_TILE) {
        float scores[LINE_TILE * TILE_KEYS] __attribute__((aligned(64)));
        long lines = MINIMUM(LINE_TILE, num_lines - first), most = 0;
        SCORES[lines](q + first * dim, tile, head, dim, scores, first == 0);
        for (long l = 0; l < lines; l++) {
            long seen = position + (first + l) / job->group + 1 - tile->first;
            seen = seen < 0 ? 0 : MINIMUM(seen, tile->keys);
            most = seen > most ? seen : most;
            soften(scores + l * TILE_KEYS, seen, tile->keys, dim, parts + first + l);
        }
        WEIGH[lines](scores, tile, next, most, head, dim, parts + first);
    }
}
