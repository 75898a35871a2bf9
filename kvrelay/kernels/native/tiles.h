/* Products of float32 by the tiles of AMX, which multiply bfloat16 and sum in float32.
 *
 * A float is the sum of three numbers of 8 bits each, its parts: high, middle and low. Of the nine products of two floats' parts the
 * six largest are summed; the other three are about what float32 rounds away. So a product of floats takes six of bfloat16, and less
 * time than multiply-adds.
 *
 * A tile of an operand is 16 lines of 16 words, each word a pair of bfloat16 that follow each other in the sum: of the left operand
 * [rows][inputs / 2], of the right one [inputs / 2][columns]. */
#ifndef KVRELAY_TILES_H
#define KVRELAY_TILES_H

#include "common.h"

#ifdef HAS_TILES
#define TILE 16        /* rows, or columns */
#define TILE_INPUTS 32 /* that a product of two tiles sums over */
#define TILE_LINE 64   /* bytes */

enum { HIGH, MIDDLE, LOW, PARTS };

struct Tile32 {
    uint32_t line[TILE][TILE];
};

/* 16 x 32 numbers. */
struct Parts {
    struct Tile32 part[PARTS];
} __attribute__((aligned(64)));

INLINE vec upper_half(vec value) { return (vec)((ivec)value & (int32_t)0xffff0000); }

/* The inputs of pair `pair` for 16 columns. Parts are truncated, which is faster. Those of the left operand are rounded, so the
 * products that are left out have either sign. */
INLINE void split_columns(vec first, vec second, struct Parts *to, long pair) {
    const __m512i down = _mm512_set4_epi32(0x0f0e0f0e, 0x0b0a0b0a, 0x07060706, 0x03020302);
    UNROLL for (int part = 0; part < PARTS; part++) {
        __m512i words = _mm512_mask_shuffle_epi8((__m512i)second, 0x3333333333333333, (__m512i)first, down);
        _mm512_store_si512(to->part[part].line[pair], words);
        if (part < LOW) first -= upper_half(first), second -= upper_half(second);
    }
}

/* 32 inputs of row `row`, in rounded parts. */
INLINE void split_row(vec first, vec second, struct Parts *to, long row) {
    const __m512i uppers = _mm512_set_epi16(63, 61, 59, 57, 55, 53, 51, 49, 47, 45, 43, 41, 39, 37, 35, 33, 31, 29, 27, 25, 23, 21, 19,
                                            17, 15, 13, 11, 9, 7, 5, 3, 1);
    UNROLL for (int part = 0; part < PARTS; part++) {
        vec a = (vec)((ivec)first + 0x8000), b = (vec)((ivec)second + 0x8000);
        _mm512_store_si512(to->part[part].line[row], _mm512_permutex2var_epi16((__m512i)a, uppers, (__m512i)b));
        first -= upper_half(a), second -= upper_half(b);
    }
}

/* Tiles 0 to 3 are sums, 4 and 5 left operands, 6 and 7 right ones. A left operand has `rows` <= TILE rows. */
INLINE void begin_tiles(long rows) {
    struct {
        uint8_t palette, start, reserved[14];
        uint16_t line_bytes[16];
        uint8_t lines[16];
    } config = {.palette = 1};
    for (int t = 0; t < 8; t++) {
        config.line_bytes[t] = TILE_LINE;
        config.lines[t] = (uint8_t)(t < 6 ? rows : TILE);
    }
    __asm__ volatile("ldtilecfg %0" ::"m"(config));
}

INLINE void end_tiles(void) { __asm__ volatile("tilerelease"); }

/* Not the compiler's own functions: those do not tell it that they read and write memory. */
INLINE void tile_load(const int tile, const void *from) {
    __asm__ volatile("tileloadd (%1,%2,1), %%tmm%c0" ::"i"(tile), "r"(from), "r"((long)TILE_LINE), "m"(*(const struct Tile32 *)from));
}
INLINE void tile_store(const int tile, void *to) {
    __asm__ volatile("tilestored %%tmm%c1, (%2,%3,1)" : "=m"(*(struct Tile32 *)to) : "i"(tile), "r"(to), "r"((long)TILE_LINE));
}
INLINE void multiply(const int sum, const int left, const int right) {
    __asm__ volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(sum), "i"(left), "i"(right));
}

INLINE void clear_sums(void) {
    __asm__ volatile("tilezero %tmm0\n tilezero %tmm1\n tilezero %tmm2\n tilezero %tmm3");
}
INLINE void store_sums(float (*to)[TILE * TILE]) {
    tile_store(0, to[0]), tile_store(1, to[1]), tile_store(2, to[2]), tile_store(3, to[3]);
}

/* What is needed soon, and fetched piece by piece between products: lines to read, and rows of two lines to write. */
struct Coming {
    const char *lines;
    char *rows;
    long lines_a_piece, num_rows, row_bytes;
};
#define PIECES 6 /* of a `tile_square` */

INLINE void fetch_piece(struct Coming *fetch) {
    for (long line = 0; line < fetch->lines_a_piece; line++, fetch->lines += TILE_LINE) __builtin_prefetch(fetch->lines, 0, 2);
    for (int row = 0; row < 2 && fetch->num_rows > 0; row++, fetch->num_rows--, fetch->rows += fetch->row_bytes)
        __builtin_prefetch(fetch->rows, 1), __builtin_prefetch(fetch->rows + TILE_LINE, 1);
}

INLINE void load_lefts(const struct Parts *left, long stride, const int part) {
    tile_load(4, &left->part[part]), tile_load(5, &left[stride].part[part]);
}
INLINE void load_rights(const struct Parts *right, const int part) {
    tile_load(6, &right->part[part]), tile_load(7, &right[1].part[part]);
}
INLINE void multiply_four(struct Coming *fetch) {
    multiply(0, 4, 6), multiply(1, 4, 7), multiply(2, 5, 6), multiply(3, 5, 7);
    fetch_piece(fetch);
}

/* sums[2][2] += left[2] * right[2]. The order of the six decides the bits. */
INLINE void tile_square(const struct Parts *left, long stride, const struct Parts *right, struct Coming *fetch) {
    load_lefts(left, stride, LOW), load_rights(right, HIGH), multiply_four(fetch);
    load_lefts(left, stride, HIGH), multiply_four(fetch);
    load_lefts(left, stride, MIDDLE), multiply_four(fetch);
    load_rights(right, MIDDLE), multiply_four(fetch);
    load_lefts(left, stride, HIGH), multiply_four(fetch);
    load_rights(right, LOW), multiply_four(fetch);
}

#endif
#endif
