/* SPDX-License-Identifier: MIT */
/*
 * The rows of the data-path bench: what is called, on which queue, how often.
 */
#ifndef RINGVERBS_BENCH_ROWS_H
#define RINGVERBS_BENCH_ROWS_H

#include <infiniband/verbs.h>
#include <stdbool.h>
#include <stdint.h>

#define BATCH 16
#define REQUESTS BATCH /* of the longest list */
#define CQ_ENTRIES 127 /* ring of 128, 16 KiB */
#define SQ_ENTRIES 63  /* ring of 64, 32 KiB of which 20 KiB is touched */
#define RQ_ENTRIES 127 /* ring of 128, 8 KiB */
#define INLINE_LENGTH 32

struct rxe_queue_buf;

/* Who uses a set of queues: any thread may, and one does; that thread alone, as
 * was said when they were made; any thread may, and several have. */
enum users { ANY, SINGLE, SEVERAL, USERS };

/* One set of queues: see enum users. */
struct queues {
	struct ibv_cq *cq;	/* for ibv_poll_cq */
	struct ibv_cq_ex *cqx;	/* for the cursor */
	struct ibv_qp *qp;	/* for ibv_post_send, ibv_post_recv */
	struct ibv_qp_ex *qpx;	/* for ibv_wr_* */
	bool thread_domain;	/* the QPs are on a parent domain */
	/* The device's view of them. */
	struct rxe_queue_buf *cq_ring, *cqx_ring, *sq_ring, *sqx_ring, *rq_ring;
};

struct bench {
	struct ibv_context *context;
	struct ibv_pd *pd;
	struct ibv_mr *mr;
	uint8_t *buffer;
	struct queues sets[USERS];
	/* Work requests made once; the calls only read them. */
	struct ibv_sge sge[REQUESTS];
	struct ibv_send_wr send[REQUESTS], send_inline[REQUESTS];
	struct ibv_recv_wr recv[REQUESTS];
	struct ibv_wc wc[REQUESTS];
	uint64_t sink; /* what was read, so that it is not optimised away */
};

/* What the device does before each round of `calls` calls. */
enum device { DEVICE_NOTHING, DEVICE_FILLS_CQ, DEVICE_FILLS_CQX,
	      DEVICE_DRAINS_SQ, DEVICE_DRAINS_SQX, DEVICE_DRAINS_RQ };

struct row {
	const char *name;
	unsigned int batch;	/* operations in one call */
	unsigned int calls;	/* calls between two acts of the device */
	enum users users;	/* of its queues */
	enum device device;
	bool doorbell;		/* each call rings once: its cost is subtracted */
	void (*run)(struct bench *b, struct queues *q, unsigned int calls);
	/* NULL when the operation did what it should, else what is wrong. */
	const char *(*check)(struct bench *b, struct queues *q,
			     const struct row *row);
};

extern const struct row rows[];
extern const unsigned int nrows;

/* Once, before any row is run. */
void rows_init(void);

/* The same loop around nothing, and around the doorbell alone. */
void run_nothing(struct bench *b, struct queues *q, unsigned int calls);
void run_doorbell(struct bench *b, struct queues *q, unsigned int calls);

struct queues *row_queues(struct bench *b, const struct row *row);
/* Lets the device act: a round of row->calls calls will find what it needs. */
void device_act(struct queues *q, const struct row *row);
/* Fills every entry of a completion queue's ring with a receive completion. */
void fill_completions(struct rxe_queue_buf *ring);

#endif
