/* What the kernels are given at start-up: an OpenMP runtime, so that this library is linked to none, and AMX. */
#include <sys/syscall.h>
#include <unistd.h>

#include "common.h"

struct OpenMP openmp;

/* `parallel` is GOMP_parallel, which all OpenMP runtimes export; the others are omp_get_thread_num and omp_get_num_threads. */
EXPORT void use_openmp(void *parallel, void *thread, void *threads) {
    openmp.parallel = (void (*)(Body, void *, unsigned, unsigned))parallel;
    openmp.thread = (int (*)(void))thread;
    openmp.threads = (int (*)(void))threads;
}

/* Whether the bulk of prompts can be computed by tiles: Linux lets a process use them only if it asks, once for all its threads. */
EXPORT int has_bulk(void) {
#ifdef HAS_TILES
    enum { ASK_FOR_STATE = 0x1023, TILE_DATA = 18 }; /* ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA */
    return syscall(SYS_arch_prctl, ASK_FOR_STATE, TILE_DATA) == 0;
#else
    return 0;
#endif
}
