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
