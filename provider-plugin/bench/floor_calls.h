/* SPDX-License-Identifier: MIT */
/*
 * The least that a provider's completion queue can do: the same calls through pointers,
 * into a library, with only the entry's fields behind them.
 */
#ifndef RINGVERBS_BENCH_FLOOR_CALLS_H
#define RINGVERBS_BENCH_FLOOR_CALLS_H

#include <infiniband/verbs.h>
#include <pthread.h>
#include <rdma/ib_user_verbs.h>
#include <rdma/rdma_user_rxe.h>
#include <stdint.h>

struct floor_cursor {
	struct rxe_queue_buf *ring;
	pthread_spinlock_t *lock; /* or NULL */
	const struct ib_uverbs_wc *entry;
	uint64_t wr_id;
	uint32_t at, producer, status;
	int (*start)(struct floor_cursor *cursor);
	int (*next)(struct floor_cursor *cursor);
	void (*end)(struct floor_cursor *cursor);
	uint32_t (*read[5])(struct floor_cursor *cursor);
};

/* A cursor of `ring`, which takes `lock` from start to end if there is one. */
void floor_cursor_init(struct floor_cursor *cursor, struct rxe_queue_buf *ring,
		       pthread_spinlock_t *lock);

/* Copies up to `entries` completions of `ring` and returns how many. */
typedef int (*floor_poll_fn)(struct rxe_queue_buf *ring, int entries,
			     struct ibv_wc *wc);
extern const floor_poll_fn floor_poll_call;

#endif
