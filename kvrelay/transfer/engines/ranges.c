#include <stdint.h>

/* Joins neighbours. Returns how many are left, -1 if one leaves its region, -2 where local offsets are not in order. */
int64_t kvrelay_join(const int64_t *range, int64_t count, int64_t local_bytes, int64_t remote_bytes, int64_t *out) {
    int64_t left = 0, before = 0, in_order = 1;
    for (int64_t i = 0; i < count; i++, range += 3) {
        const int64_t local = range[0], remote = range[1], size = range[2];
        int64_t *next = out + 3 * left;
        if (size < 0 || local < 0 || remote < 0 || local > local_bytes - size || remote > remote_bytes - size)
            return -1;
        if (size == 0)
            continue;
        in_order &= local >= before;
        before = local;
        if (left && next[-3] + next[-1] == local && next[-2] + next[-1] == remote) {
            next[-1] += size;
        } else {
            next[0] = local, next[1] = remote, next[2] = size;
            left++;
        }
    }
    return in_order ? left : -2;
}

/* Whether no range leaves its region. Then `found` has the bits of all numbers, the longest range, and all bytes. */
int32_t kvrelay_scan(const int64_t *range, int64_t count, int64_t local_bytes, int64_t remote_bytes, int64_t *found) {
    int64_t bits = 0, longest = 0, total = 0, outside = 0;
    for (int64_t i = 0; i < count; i++, range += 3) {
        const int64_t local = range[0], remote = range[1], size = range[2];
        bits |= local | remote | size;
        longest = size > longest ? size : longest;
        total += size;
        outside |= (local > local_bytes - size) | (remote > remote_bytes - size);
    }
    found[0] = bits, found[1] = longest, found[2] = total;
    return !outside && bits >= 0;
}

/* One side: its blocks hold the tokens from `first` on, `size` of them each. */
typedef struct {
    const int64_t *blocks;
    int64_t first, size;
} Side;

static int64_t place(Side side, int64_t token, int64_t *left_in_block) {
    const int64_t index = (token - side.first) / side.size, offset = (token - side.first) % side.size;
    *left_in_block = side.size - offset;
    return side.blocks[index] * side.size + offset;
}

/* Tokens [start, stop), cut at the block edges of both sides: rows of place here, place there, length. Returns how many. */
int64_t kvrelay_runs(const int64_t *local, int64_t local_first, int64_t local_size, const int64_t *remote, int64_t remote_first,
                     int64_t remote_size, int64_t start, int64_t stop, int64_t *out) {
    const Side here = {local, local_first, local_size}, there = {remote, remote_first, remote_size};
    int64_t count = 0, left_here, left_there;
    for (int64_t token = start; token < stop; token += out[3 * count++ + 2]) {
        int64_t *run = out + 3 * count, length = stop - token;
        run[0] = place(here, token, &left_here), run[1] = place(there, token, &left_there);
        length = length < left_here ? length : left_here;
        run[2] = length < left_there ? length : left_there;
    }
    return count;
}
