#include <limits.h>
#include <linux/futex.h>
#include <sched.h>
#include <stdint.h>
#include <string.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

enum { HEADER = 4096, FLOATS = 1 << 18, SPINS = 2000, YIELDS = 20000 };

struct Ranks {
    char *memory;
    int64_t rank, count, turn;
    int64_t spent_ns;  /* in sums and spreads, but for: */
    int64_t waited_ns; /* until the last rank had its share of a sum */
};

struct Counter { /* a cache line of its own */
    uint32_t turn, num_waiting;
    int64_t arrived_ns[2]; /* for a sum; by turn, as places are */
    char rest[40];
};

static struct Counter *counter(struct Ranks *ranks, int64_t rank) { return (struct Counter *)ranks->memory + rank; }

static float *place(struct Ranks *ranks, int64_t rank) {
    return (float *)(ranks->memory + HEADER) + (rank * 2 + (ranks->turn & 1)) * FLOATS;
}

static int is_behind(uint32_t turn, struct Ranks *ranks) { return (int32_t)(turn - (uint32_t)ranks->turn) < 0; }

/* Looks for a while, then lets others run between two looks, then sleeps until the other rank wakes it. Two ranks that sleep
 * in turns would stay on one processor, as neither is ever seen to wait for one. */
static void look_again_later(struct Ranks *ranks, struct Counter *other, long looks) {
    if (looks < SPINS) {
#if defined(__x86_64__)
        __builtin_ia32_pause();
#endif
        return;
    }
    if (looks < YIELDS) {
        sched_yield();
        return;
    }
    struct timespec limit = {0, 20000000}; /* a rank that has ended wakes no other */
    __atomic_fetch_add(&other->num_waiting, 1, __ATOMIC_SEQ_CST);
    uint32_t seen = __atomic_load_n(&other->turn, __ATOMIC_SEQ_CST);
    if (is_behind(seen, ranks)) syscall(SYS_futex, &other->turn, FUTEX_WAIT, seen, &limit, 0, 0);
    __atomic_fetch_sub(&other->num_waiting, 1, __ATOMIC_SEQ_CST);
}

/* -1 if a rank has ended: the line behind the counters says so. */
static int meet(struct Ranks *ranks) {
    struct Counter *own = counter(ranks, ranks->rank), *ended = counter(ranks, ranks->count);
    __atomic_store_n(&own->turn, (uint32_t)ranks->turn, __ATOMIC_SEQ_CST);
    if (__atomic_load_n(&own->num_waiting, __ATOMIC_SEQ_CST)) syscall(SYS_futex, &own->turn, FUTEX_WAKE, INT_MAX, 0, 0, 0);
    for (int64_t rank = 0; rank < ranks->count; rank++) {
        struct Counter *other = counter(ranks, rank);
        for (long looks = 0; is_behind(__atomic_load_n(&other->turn, __ATOMIC_ACQUIRE), ranks); looks++) {
            if (__atomic_load_n(&ended->turn, __ATOMIC_RELAXED)) return -1;
            look_again_later(ranks, other, looks);
        }
    }
    return 0;
}

static int64_t now_ns(void) { /* the same clock in every rank */
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec * INT64_C(1000000000) + now.tv_nsec;
}

static int64_t *arrived_ns(struct Ranks *ranks, int64_t rank) { return &counter(ranks, rank)->arrived_ns[ranks->turn & 1]; }

/* When the last rank came to this sum. Called once they have met, so that every rank's time is written. */
static int64_t all_arrived_ns(struct Ranks *ranks) {
    int64_t last = 0;
    for (int64_t rank = 0; rank < ranks->count; rank++)
        if (*arrived_ns(ranks, rank) > last) last = *arrived_ns(ranks, rank);
    return last;
}

/* x becomes the sum of every rank's x. */
int kvrelay_add_up(struct Ranks *ranks, float *x, int64_t count) {
    int64_t begun = now_ns(), waited = 0;
    for (int64_t first = 0; first < count; first += FLOATS) {
        int64_t size = count - first < FLOATS ? count - first : FLOATS;
        ranks->turn++;
        memcpy(place(ranks, ranks->rank), x + first, size * sizeof(float));
        int64_t arrived = *arrived_ns(ranks, ranks->rank) = now_ns();
        if (meet(ranks)) return -1;
        waited += all_arrived_ns(ranks) - arrived;
        memcpy(x + first, place(ranks, 0), size * sizeof(float));
        for (int64_t rank = 1; rank < ranks->count; rank++) {
            const float *theirs = place(ranks, rank);
            for (int64_t i = 0; i < size; i++) x[first + i] += theirs[i];
        }
    }
    ranks->waited_ns += waited;
    ranks->spent_ns += now_ns() - begun - waited;
    return 0;
}

/* Rank 0's bytes become everyone's. */
int kvrelay_spread(struct Ranks *ranks, char *bytes, int64_t count) {
    int64_t begun = now_ns();
    for (int64_t first = 0; first < count; first += FLOATS * sizeof(float)) {
        int64_t size = count - first < (int64_t)(FLOATS * sizeof(float)) ? count - first : (int64_t)(FLOATS * sizeof(float));
        ranks->turn++;
        if (ranks->rank == 0) memcpy(place(ranks, 0), bytes + first, size);
        if (meet(ranks)) return -1;
        if (ranks->rank != 0) memcpy(bytes + first, place(ranks, 0), size);
    }
    ranks->spent_ns += now_ns() - begun;
    return 0;
}

int kvrelay_meet(struct Ranks *ranks) {
    ranks->turn++;
    return meet(ranks);
}

void kvrelay_end(struct Ranks *ranks) { __atomic_store_n(&counter(ranks, ranks->count)->turn, 1, __ATOMIC_RELAXED); }
