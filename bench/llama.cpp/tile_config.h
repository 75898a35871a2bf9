/* Included before every file of llama.cpp. GCC 12's `_tile_loadconfig` says that it reads 8 bytes, so what was stored to the other
 * 56 of a configuration is dropped: llama.cpp then ends with an illegal instruction on processors with AMX. */
#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
#include <immintrin.h>
#define _tile_loadconfig(config) __asm__ volatile("ldtilecfg %0" : : "m"(*(const char(*)[64])(config)))
#endif
