#include <stdint.h>

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
