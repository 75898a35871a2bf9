#include <stdint.h>
#include <string.h>

/* Returns how many ranges were copied whole; fewer than count means that *stop was set. */
int64_t kvrelay_copy(char *to, const char *from, const int64_t *ranges, int64_t count, int64_t slice,
                     const volatile int32_t *stop) {
    for (int64_t i = 0; i < count; i++, ranges += 3) {
        for (int64_t done = 0; done < ranges[2]; done += slice) {
            if (*stop)
                return i;
            int64_t left = ranges[2] - done;
            memcpy(to + ranges[0] + done, from + ranges[1] + done, left < slice ? left : slice);
        }
    }
    return count;
}
