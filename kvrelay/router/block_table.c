#define _GNU_SOURCE
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

/* Open addressing, linear probing, at most half full. A slot is a hash and its mask; an empty one has no bit set. */
typedef struct {
    uint64_t *slots;
    int64_t capacity; /* a power of two */
    int64_t used;
    int64_t width; /* words of a mask */
} Table;

static uint64_t *slot_at(const Table *t, int64_t place) { return t->slots + place * (2 + t->width); }

static int64_t home_of(const Table *t, const uint64_t *slot) { return (int64_t)(slot[0] & (uint64_t)(t->capacity - 1)); }

static int is_empty(const Table *t, const uint64_t *slot) {
    for (int64_t word = 0; word < t->width; word++)
        if (slot[2 + word])
            return 0;
    return 1;
}

/* Where the hash is, or where it would be put. */
static uint64_t *find(const Table *t, const char *hash) {
    uint64_t key[2];
    memcpy(key, hash, 16);
    for (int64_t place = home_of(t, key);; place = (place + 1) & (t->capacity - 1)) {
        uint64_t *slot = slot_at(t, place);
        if ((slot[0] == key[0] && slot[1] == key[1]) || is_empty(t, slot))
            return slot;
    }
}

/* Zeroed. A large table lies on huge pages where the system has them: its slots are read in no order, and every small page
   would have to be looked up. */
static uint64_t *new_slots(size_t bytes) {
    const size_t huge = (size_t)2 << 20;
    if (bytes < 2 * huge)
        return calloc(1, bytes);
    size_t rounded = (bytes + huge - 1) & ~(huge - 1);
    uint64_t *slots = aligned_alloc(huge, rounded);
    if (slots) {
#ifdef MADV_HUGEPAGE
        madvise(slots, rounded, MADV_HUGEPAGE);
#endif
        memset(slots, 0, rounded);
    }
    return slots;
}

static int rebuild(Table *t, int64_t capacity, int64_t width) {
    Table fresh = {new_slots((size_t)capacity * (size_t)(2 + width) * 8), capacity, t->used, width};
    if (!fresh.slots)
        return -1;
    for (int64_t place = 0; place < t->capacity; place++) {
        const uint64_t *old = slot_at(t, place);
        if (!is_empty(t, old))
            memcpy(find(&fresh, (const char *)old), old, (size_t)(2 + t->width) * 8);
    }
    free(t->slots);
    *t = fresh;
    return 0;
}

/* Takes the entry out and moves those behind it up, so that no search stops too early. */
static void take_out(Table *t, int64_t hole) {
    int64_t last = t->capacity - 1;
    size_t size = (size_t)(2 + t->width) * 8;
    t->used--;
    for (int64_t place = (hole + 1) & last;; place = (place + 1) & last) {
        uint64_t *slot = slot_at(t, place);
        if (is_empty(t, slot))
            break;
        if (((place - home_of(t, slot)) & last) >= ((place - hole) & last)) {
            memcpy(slot_at(t, hole), slot, size);
            hole = place;
        }
    }
    memset(slot_at(t, hole), 0, size);
}

Table *kvrelay_table_new(void) {
    Table *t = calloc(1, sizeof(Table));
    if (t && rebuild(t, 1024, 1)) {
        free(t);
        return NULL;
    }
    return t;
}

void kvrelay_table_free(Table *t) {
    free(t->slots);
    free(t);
}

int64_t kvrelay_table_size(const Table *t) { return t->used; }

/* Each returns how many of the hashes changed for this bit; -1: no memory. */

int64_t kvrelay_table_add(Table *t, const char *hashes, int64_t count, int64_t bit) {
    int64_t changed = 0, capacity = t->capacity, width = bit / 64 + 1;
    while (2 * (t->used + count) > capacity)
        capacity *= 2;
    if ((capacity > t->capacity || width > t->width) && rebuild(t, capacity, width > t->width ? width : t->width))
        return -1;
    for (int64_t i = 0; i < count; i++, hashes += 16) {
        uint64_t *slot = find(t, hashes), one = 1ULL << (bit & 63);
        if (is_empty(t, slot)) {
            memcpy(slot, hashes, 16);
            t->used++;
        }
        changed += !(slot[2 + bit / 64] & one);
        slot[2 + bit / 64] |= one;
    }
    return changed;
}

int64_t kvrelay_table_remove(Table *t, const char *hashes, int64_t count, int64_t bit) {
    int64_t changed = 0;
    for (int64_t i = 0; i < count; i++, hashes += 16) {
        uint64_t *slot = find(t, hashes), one = 1ULL << (bit & 63);
        if (bit / 64 >= t->width || !(slot[2 + bit / 64] & one))
            continue;
        changed++;
        slot[2 + bit / 64] &= ~one;
        if (is_empty(t, slot))
            take_out(t, (slot - t->slots) / (2 + t->width));
    }
    return changed;
}

int64_t kvrelay_table_clear(Table *t, int64_t bit) {
    int64_t changed = 0, last = t->capacity - 1, start = 0;
    uint64_t one = 1ULL << (bit & 63);
    if (bit / 64 >= t->width)
        return 0;
    while (!is_empty(t, slot_at(t, start)))
        start++;
    /* From an empty slot once around: what `take_out` moves up comes from places that are still ahead. */
    for (int64_t step = 1; step <= last; step++) {
        int64_t place = (start + step) & last;
        uint64_t *slot = slot_at(t, place);
        while (slot[2 + bit / 64] & one) {
            changed++;
            slot[2 + bit / 64] &= ~one;
            if (is_empty(t, slot))
                take_out(t, place);
        }
    }
    return changed;
}

/* Writes the hashes that have the bit; `out` has room for them. */
int64_t kvrelay_table_list(const Table *t, int64_t bit, char *out) {
    int64_t count = 0;
    for (int64_t place = 0; place < t->capacity && bit / 64 < t->width; place++) {
        const uint64_t *slot = slot_at(t, place);
        if (slot[2 + bit / 64] >> (bit & 63) & 1)
            memcpy(out + 16 * count++, slot, 16);
    }
    return count;
}

/* Follows the hashes while any bit is in all of them so far. Writes pairs (bit, how many it has times unit) and returns their
   number; `out` has room for one pair per bit. The first pass has the memory on its way before the second needs it. */
int64_t kvrelay_table_match(const Table *t, const char *hashes, int64_t count, int64_t unit, int32_t *out) {
    int64_t pairs = 0;
    uint64_t alive[64];
    if (count == 0 || t->width > 64) /* more than 4096 workers */
        return 0;
    for (int64_t i = 0; i < count; i++) {
        uint64_t key[2];
        memcpy(key, hashes + 16 * i, 16);
        __builtin_prefetch(slot_at(t, home_of(t, key)));
    }
    memcpy(alive, find(t, hashes) + 2, (size_t)t->width * 8);
    for (int64_t i = 0; i <= count; i++, hashes += 16) {
        const uint64_t *mask = i < count ? find(t, hashes) + 2 : NULL;
        uint64_t left = 0;
        for (int64_t word = 0; word < t->width; word++) {
            uint64_t still = mask ? alive[word] & mask[word] : 0;
            for (uint64_t lost = alive[word] ^ still; lost; lost &= lost - 1, pairs++) {
                out[2 * pairs] = (int32_t)(64 * word + __builtin_ctzll(lost));
                out[2 * pairs + 1] = (int32_t)(i * unit);
            }
            alive[word] = still;
            left |= still;
        }
        if (!left)
            break;
    }
    return pairs;
}
