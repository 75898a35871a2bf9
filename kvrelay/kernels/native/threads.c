/* Which OpenMP runtime runs the kernels: handed over at start-up, so that this library is linked to none. */
#include "common.h"

struct OpenMP openmp;

/* `parallel` is GOMP_parallel, which all OpenMP runtimes export; the others are omp_get_thread_num and omp_get_num_threads. */
EXPORT void use_openmp(void *parallel, void *thread, void *threads) {
    openmp.parallel = (void (*)(Body, void *, unsigned, unsigned))parallel;
    openmp.thread = (int (*)(void))thread;
    openmp.threads = (int (*)(void))threads;
}
