#define _GNU_SOURCE
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

/* Open addressing, linear probing, at most half full. A slot has three words: a hash, and who holds its block. Most blocks are
   held by very few of all workers, so the third word is

       0                  of an empty slot
       up to four bits    each plus one, in 16 of its bits, from the lowest on: FEW
       MANY | row         the number of a row of `rows`, which has one bit for each worker
*/
enum { SLOT = 3, FEW = 4, MOST_BITS = 4096, MOST_WORDS = MOST_BITS / 64 };

#define MANY (1ULL << 63)

typedef struct {
    uint64_t *slots;
    int64_t capacity; /* a power of two */
    int64_t used;
    uint64_t *rows;
    int64_t num_rows; /* that there is room for */
    int64_t free_row; /* the first of those that nothing uses, each with the number of the next in its first word; -1: none */
    int64_t width;    /* words of a row */
} Table;

static uint64_t *slot_at(const Table *t, int64_t place) { return t->slots + place * SLOT; }

static int64_t home_of(const Table *t, const uint64_t *slot) { return (int64_t)(slot[0] & (uint64_t)(t->capacity - 1)); }

static uint64_t *row_of(const Table *t, uint64_t holders) { return t->rows + (int64_t)(holders & ~MANY) * t->width; }

/* Where the hash is, or where it would be put. */
static uint64_t *find(const Table *t, const char *hash) {
    uint64_t key[2];
    memcpy(key, hash, 16);
    for (int64_t place = home_of(t, key);; place = (place + 1) & (t->capacity - 1)) {
        uint64_t *slot = slot_at(t, place);
        if ((slot[0] == key[0] && slot[1] == key[1]) || !slot[2])
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

static int grow(Table *t, int64_t capacity) {
    Table larger = *t;
    larger.capacity = capacity;
    larger.slots = new_slots((size_t)capacity * SLOT * 8);
    if (!larger.slots)
        return -1;
    for (int64_t place = 0; place < t->capacity; place++) {
        const uint64_t *old = slot_at(t, place);
        if (old[2])
            memcpy(find(&larger, (const char *)old), old, SLOT * 8);
    }
    free(t->slots);
    *t = larger;
    return 0;
}

/* Room for more rows, or for wider ones. */
static int grow_rows(Table *t, int64_t num_rows, int64_t width) {
    uint64_t *rows = calloc((size_t)(num_rows * width), 8);
    if (!rows)
        return -1;
    for (int64_t row = 0; row < t->num_rows; row++)
        memcpy(rows + row * width, t->rows + row * t->width, (size_t)t->width * 8);
    for (int64_t row = num_rows; row-- > t->num_rows; t->free_row = row)
        rows[row * width] = (uint64_t)t->free_row;
    free(t->rows);
    t->rows = rows, t->num_rows = num_rows, t->width = width;
    return 0;
}

static int holds(const Table *t, uint64_t holders, int64_t bit) {
    if (holders & MANY)
        return bit / 64 < t->width && row_of(t, holders)[bit / 64] >> (bit & 63) & 1;
    for (; holders; holders >>= 16)
        if ((int64_t)(holders & 0xffff) == bit + 1)
            return 1;
    return 0;
}

/* -1: no memory. */
static int add_holder(Table *t, uint64_t *holders, int64_t bit) {
    if (!(*holders & MANY) && *holders >> 16 * (FEW - 1)) {
        if (t->free_row < 0 && grow_rows(t, 2 * t->num_rows, t->width))
            return -1;
        uint64_t *row = t->rows + t->free_row * t->width, many = MANY | (uint64_t)t->free_row;
        t->free_row = (int64_t)row[0];
        memset(row, 0, (size_t)t->width * 8);
        for (uint64_t few = *holders; few; few >>= 16) {
            int64_t each = (int64_t)(few & 0xffff) - 1;
            row[each / 64] |= 1ULL << (each & 63);
        }
        *holders = many;
    }
    if (*holders & MANY) {
        row_of(t, *holders)[bit / 64] |= 1ULL << (bit & 63);
        return 0;
    }
    int used = 0;
    while (*holders >> 16 * used)
        used++;
    *holders |= (uint64_t)(bit + 1) << 16 * used;
    return 0;
}

/* It is one of them. A row whose block few hold again is given back. */
static void remove_holder(Table *t, uint64_t *holders, int64_t bit) {
    uint64_t few = 0;
    if (*holders & MANY) {
        uint64_t *row = row_of(t, *holders);
        int count = 0;
        row[bit / 64] &= ~(1ULL << (bit & 63));
        for (int64_t word = 0; word < t->width && count < FEW; word++)
            for (uint64_t left = row[word]; left && count < FEW; left &= left - 1, count++)
                few |= (uint64_t)(64 * word + __builtin_ctzll(left) + 1) << 16 * count;
        if (count == FEW)
            return;
        row[0] = (uint64_t)t->free_row;
        t->free_row = (int64_t)(*holders & ~MANY);
    } else {
        int count = 0;
        for (uint64_t left = *holders; left; left >>= 16)
            if ((int64_t)(left & 0xffff) != bit + 1)
                few |= (left & 0xffff) << 16 * count++;
    }
    *holders = few;
}

/* Takes the entry out and moves those behind it up, so that no search stops too early. */
static void take_out(Table *t, int64_t hole) {
    int64_t last = t->capacity - 1;
    t->used--;
    for (int64_t place = (hole + 1) & last;; place = (place + 1) & last) {
        uint64_t *slot = slot_at(t, place);
        if (!slot[2])
            break;
        if (((place - home_of(t, slot)) & last) >= ((place - hole) & last)) {
            memcpy(slot_at(t, hole), slot, SLOT * 8);
            hole = place;
        }
    }
    memset(slot_at(t, hole), 0, SLOT * 8);
}

void kvrelay_table_free(Table *t) {
    free(t->slots);
    free(t->rows);
    free(t);
}

Table *kvrelay_table_new(void) {
    Table *t = calloc(1, sizeof(Table));
    if (!t)
        return NULL;
    t->free_row = -1;
    if (grow(t, 1024) || grow_rows(t, 16, 1)) {
        kvrelay_table_free(t);
        return NULL;
    }
    return t;
}

int64_t kvrelay_table_size(const Table *t) { return t->used; }

int64_t kvrelay_table_bytes(const Table *t) { return 8 * (t->capacity * SLOT + t->num_rows * t->width); }

/* Each returns how many of the hashes changed for this bit; -1: no memory. */

int64_t kvrelay_table_add(Table *t, const char *hashes, int64_t count, int64_t bit) {
    int64_t changed = 0, capacity = t->capacity, width = bit / 64 + 1;
    if (bit >= MOST_BITS)
        return 0; /* nothing is known of this worker */
    while (2 * (t->used + count) > capacity)
        capacity *= 2;
    if ((capacity > t->capacity && grow(t, capacity)) || (width > t->width && grow_rows(t, t->num_rows, width)))
        return -1;
    for (int64_t i = 0; i < count; i++, hashes += 16) {
        uint64_t *slot = find(t, hashes);
        if (holds(t, slot[2], bit))
            continue;
        if (!slot[2]) {
            memcpy(slot, hashes, 16);
            t->used++;
        }
        changed++;
        if (add_holder(t, &slot[2], bit))
            return -1;
    }
    return changed;
}

int64_t kvrelay_table_remove(Table *t, const char *hashes, int64_t count, int64_t bit) {
    int64_t changed = 0;
    for (int64_t i = 0; i < count; i++, hashes += 16) {
        uint64_t *slot = find(t, hashes);
        if (!holds(t, slot[2], bit))
            continue;
        changed++;
        remove_holder(t, &slot[2], bit);
        if (!slot[2])
            take_out(t, (slot - t->slots) / SLOT);
    }
    return changed;
}

int64_t kvrelay_table_clear(Table *t, int64_t bit) {
    int64_t changed = 0, last = t->capacity - 1, start = 0;
    while (slot_at(t, start)[2])
        start++;
    /* From an empty slot once around: what `take_out` moves up comes from places that are still ahead. */
    for (int64_t step = 1; step <= last; step++) {
        int64_t place = (start + step) & last;
        uint64_t *slot = slot_at(t, place);
        while (holds(t, slot[2], bit)) {
            changed++;
            remove_holder(t, &slot[2], bit);
            if (!slot[2])
                take_out(t, place);
        }
    }
    return changed;
}

/* Writes the hashes that have the bit; `out` has room for them. */
int64_t kvrelay_table_list(const Table *t, int64_t bit, char *out) {
    int64_t count = 0;
    for (int64_t place = 0; place < t->capacity; place++) {
        const uint64_t *slot = slot_at(t, place);
        if (holds(t, slot[2], bit))
            memcpy(out + 16 * count++, slot, 16);
    }
    return count;
}

/* The holders as a row: theirs, or one that is written to `room`. */
static const uint64_t *as_row(const Table *t, uint64_t holders, uint64_t *room) {
    if (holders & MANY)
        return row_of(t, holders);
    memset(room, 0, (size_t)t->width * 8);
    for (; holders; holders >>= 16) {
        int64_t bit = (int64_t)(holders & 0xffff) - 1;
        room[bit / 64] |= 1ULL << (bit & 63);
    }
    return room;
}

/* Follows the hashes while any bit is in all of them so far. Writes pairs (bit, how many it has times unit) and returns their
   number; `out` has room for one pair per bit. The first pass has the memory on its way before the second needs it. */
int64_t kvrelay_table_match(const Table *t, const char *hashes, int64_t count, int64_t unit, int32_t *out) {
    int64_t pairs = 0;
    uint64_t alive[MOST_WORDS], room[MOST_WORDS];
    if (count == 0)
        return 0;
    for (int64_t i = 0; i < count; i++) {
        uint64_t key[2];
        memcpy(key, hashes + 16 * i, 16);
        __builtin_prefetch(slot_at(t, home_of(t, key)));
    }
    memcpy(alive, as_row(t, find(t, hashes)[2], room), (size_t)t->width * 8);
    for (int64_t i = 0; i <= count; i++, hashes += 16) {
        const uint64_t *row = i < count ? as_row(t, find(t, hashes)[2], room) : NULL;
        uint64_t left = 0;
        for (int64_t word = 0; word < t->width; word++) {
            uint64_t still = row ? alive[word] & row[word] : 0;
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
