#include <stdint.h>
#include <string.h>

/* pairs: host block, block. A host block is `planes` pieces in a row; the pool has a plane of pieces for each. */
void kvrelay_copy_blocks(char *host, char *pool, const int64_t *pairs, int64_t count, int64_t planes, int64_t piece,
                         int64_t plane_bytes, int32_t to_host) {
    for (int64_t i = 0; i < count; i++, pairs += 2) {
        char *there = host + pairs[0] * planes * piece;
        char *here = pool + pairs[1] * piece;
        for (int64_t plane = 0; plane < planes; plane++, there += piece, here += plane_bytes)
            memcpy(to_host ? there : here, to_host ? here : there, piece);
    }
}
