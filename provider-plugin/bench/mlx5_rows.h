/* SPDX-License-Identifier: MIT */
/*
 * The rows of ConnectX's data-path bench, as rows.h for rdma_rxe.
 */
#ifndef RINGVERBS_BENCH_MLX5_ROWS_H
#define RINGVERBS_BENCH_MLX5_ROWS_H

#include <infiniband/mlx5dv.h>
#include <infiniband/verbs.h>
#include <stdbool.h>
#include <stdint.h>

#include "mlx5_device.h"

#define BATCH 16
#define LARGE_BATCH 64
#define REQUESTS LARGE_BATCH /* of the longest list */
#define CQ_ENTRIES 127 /* 128 of 64 bytes, 8 KiB */
#define SQ_ENTRIES 128
#define RQ_ENTRIES 128
#define SRQ_ENTRIES 127 /* 128 of 32 bytes: the list's last is never posted */
#define INLINE_LENGTH 32
/* Elements of a memory key's layout, of which an interleaved one's first says how
 * often its parts repeat. */
#define KEY_ELEMENTS 4
/* Queue pairs that take turns in one completion queue. */
#define MANY 32
#define THOUSAND 1000

/* A queue pair and the device's view of it. */
struct pair {
	struct ibv_qp *qp;
	const struct mlx5_object *object;
	struct device_cq *completions;
	struct ibv_cq *cq; /* where both of its queues complete */
	struct ibv_srq *srq; /* where it takes its receives from, if not its own */
	const struct mlx5_object *receives; /* the queue of its receives */
	struct mlx5dv_qp_ex *functions; /* of mlx5dv, if it has them */
	uint32_t blocks;   /* of each work request */
	uint32_t sent;     /* blocks that have completed */
	uint32_t received;
	uint16_t slot; /* of the shared queue: what the device takes next */
};

/* Queue pairs of one completion queue. */
struct turns {
	struct pair *pairs;
	unsigned int count;
	unsigned int next; /* whose receive completes next, ever counted on */
};

/* Who uses a set of queues, as in rows.h: any thread may, and one does; that
 * thread alone, as was said when they were made; any thread may, and several
 * have. */
enum users { ANY, SINGLE, SEVERAL, USERS };

/* One set of queues: see enum users. */
struct queues {
	struct ibv_cq *cq;     /* for ibv_poll_cq */
	struct ibv_cq_ex *cqx; /* for the cursor */
	struct device_cq device, devicex;
	struct pair pair;      /* for ibv_post_send, ibv_post_recv, ibv_poll_cq */
	struct pair extended;  /* for ibv_wr_* */
	struct pair cursor;    /* completes to `cqx` */
	struct pair shared;    /* for ibv_post_srq_recv, ibv_poll_cq */
	struct pair packets;   /* raw ones, for ibv_post_send, ibv_poll_cq */
	/* Of ANY alone: an initiator of dynamic connections, one that
	 * configures memory keys. */
	struct pair dynamic, keys;
	struct turns many, thousand; /* for ibv_poll_cq; the latter of ANY alone */
	struct ibv_pd *domain; /* of the queue pairs */
	bool thread_domain;
};

struct bench {
	struct ibv_context *context;
	struct ibv_pd *pd;
	struct ibv_mr *mr;
	uint8_t *buffer;
	struct ibv_ah *ah;      /* of a target of dynamic connections */
	struct mlx5dv_mkey *key;
	struct queues sets[USERS];
	struct ibv_sge sge[REQUESTS];
	struct ibv_send_wr send[REQUESTS], send_inline[REQUESTS];
	struct ibv_recv_wr recv[REQUESTS];
	struct mlx5dv_mr_interleaved parts[KEY_ELEMENTS - 1];
	struct ibv_wc wc[REQUESTS];
	uint64_t sink;
};

/* What is made ready before each round, and not measured. */
enum ready { NOTHING, RECEIVED, SENT, RECEIVED_CURSOR, SQ_EMPTY, SQX_EMPTY,
	     RQ_EMPTY, RECEIVED_SHARED, RECEIVED_MANY, RECEIVED_THOUSAND,
	     SRQ_EMPTY, PACKETS_EMPTY, RECEIVED_PACKETS, DYNAMIC_EMPTY,
	     KEYS_EMPTY };

struct row {
	const char *name;
	unsigned int batch; /* operations in one call */
	unsigned int calls; /* calls of a round */
	enum users users; /* of its queues */
	enum ready ready;
	void (*run)(struct bench *b, struct queues *q, unsigned int calls);
	/* NULL when one call did what it should, else what is wrong. */
	const char *(*check)(struct bench *b, struct queues *q,
			     const struct row *row);
};

extern const struct row rows[];
extern const unsigned int nrows;

void run_nothing(struct bench *b, struct queues *q, unsigned int calls);
/* Makes a round of `calls` calls ready. */
void make_ready(struct bench *b, const struct row *row, unsigned int calls);
/* Takes out of the completion queues what a check has left. */
void take_all(struct bench *b, struct queues *q);
/* Queues on which every function returns at once. */
struct queues *empty_queues(void);
struct queues *row_queues(struct bench *b, const struct row *row);
/* Blocks or receives that were handed over after the first `before`. */
uint32_t posted(const struct mlx5_object *queue, unsigned int record,
		uint32_t before);

/* ---- mlx5_dv_rows.c: what mlx5dv adds to ibv_wr_* ---- */

void make_dv_pairs(struct bench *b, struct queues *q);

#define DV_RUN(name)                                                     \
	void name(struct bench *b, struct queues *q, unsigned int calls)
DV_RUN(run_dynamic);
DV_RUN(run_dynamic_batch);
DV_RUN(run_dynamic_large);
DV_RUN(run_key_configure);
DV_RUN(run_key_configure_batch);
DV_RUN(run_key_list);
DV_RUN(run_key_list_batch);
DV_RUN(run_key_interleaved);
DV_RUN(run_key_interleaved_batch);
const char *check_dynamic(struct bench *b, struct queues *q,
			  const struct row *row);
const char *check_key(struct bench *b, struct queues *q,
		      const struct row *row);

#endif
