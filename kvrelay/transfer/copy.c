#include <stdint.h>
#include <string.h>

/* Scattered small ranges wait for memory more than they copy: ask for the next one's pages ahead of time. */
static void expect(const char *range, int64_t size) {
    for (int64_t page = 0; page < size; page += 4096)
        for (int64_t line = 0; line < 1024 && page + line < size; line += 64)
            __builtin_prefetch(range + page + line, 0, 0);
}

/* Returns how many ranges were copied whole; fewer than count means that *stop was set. */
int64_t kvrelay_copy(char *to, const char *from, const int64_t *ranges, int64_t count, int64_t slice,
                     const volatile int32_t *stop) {
    for (int64_t i = 0; i < count; i++, ranges += 3) {
        if (i + 1 < count && ranges[5] <= 32768)
            expect(from + ranges[4], ranges[5]);
        for (int64_t done = 0; done < ranges[2]; done += slice) {
            if (*stop)
                return i;
            int64_t left = ranges[2] - done;
            memcpy(to + ranges[0] + done, from + ranges[1] + done, left < slice ? left : slice);
        }
    }
    return count;
}
