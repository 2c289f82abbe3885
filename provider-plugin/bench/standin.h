/* SPDX-License-Identifier: MIT */
/*
 * What the benches ask of the stand-in for the kernel (standin.c).
 *
 * They find these through dlsym, so that they can say clearly when the
 * stand-in was not preloaded.
 */
#ifndef RINGVERBS_BENCH_STANDIN_H
#define RINGVERBS_BENCH_STANDIN_H

#include <stdint.h>

struct rxe_queue_buf;

enum standin_queue_kind { STANDIN_CQ, STANDIN_SQ, STANDIN_RQ };

/*
 * The device's view of a queue: the same pages that the provider has mapped,
 * at another address. `handle` is the public handle of the CQ or QP; 0, which
 * none has, is the newest of the kind. NULL when there is no such queue.
 */
typedef struct rxe_queue_buf *(*standin_queue_fn)(enum standin_queue_kind kind,
						  uint32_t handle);

/* How many writes (doorbells) the device file has taken so far. */
typedef uint64_t (*standin_doorbells_fn)(void);

#endif
