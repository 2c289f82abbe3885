/* SPDX-License-Identifier: MIT */
/*
 * The device's part, played by a program in the same process: finding the
 * queues that a provider made on mlx5_standin.c, and writing completions.
 */
#ifndef RINGVERBS_BENCH_MLX5_DEVICE_H
#define RINGVERBS_BENCH_MLX5_DEVICE_H

#include <infiniband/mlx5dv.h>
#include <infiniband/verbs.h>
#include <stdint.h>

#include "mlx5_standin.h"

#define BLOCK 64

__attribute__((noreturn, format(printf, 1, 2))) void die(const char *fmt, ...);

/* Opens the first device, which must be the stand-in's. */
struct ibv_context *device_open(void);
/* The file of the provider: where the context's own poll_cq is. */
const char *device_provider(struct ibv_context *context);
/* A function that the provider exports. */
void *device_function(struct ibv_context *context, const char *name);

/* What the device knows of a completion queue. */
struct device_cq {
	const struct mlx5_object *object;
	uint32_t written; /* completions, ever */
};
struct device_cq device_cq(struct ibv_cq *cq);
/* Writes a completion: its owner bit is set here. */
void device_complete(struct device_cq *cq, struct mlx5_cqe64 cqe);
/* The same, with the 64 bytes that stand before the fields in a long entry. */
void device_complete_wide(struct device_cq *cq, const uint8_t *before,
			  struct mlx5_cqe64 cqe);
/* Writes completions as one compressed session of at least two: their slots and
 * byte counts, and opcodes of those sent, may differ, and nothing else. */
void device_complete_together(struct device_cq *cq,
			      const struct mlx5_cqe64 *cqes,
			      unsigned int count);
/* Raises an event of the queue. */
void device_event(const struct device_cq *cq);
/* Writes the next `count` entries alike, by their owner byte alone: the rest of
 * them is as it was written in the round before. */
static inline void device_turn(struct device_cq *cq, uint32_t count)
{
	uint32_t mask = cq->object->entries - 1;
	uint32_t log2 = __builtin_ctz(cq->object->entries);

	for (uint32_t i = 0; i < count; i++, cq->written++) {
		/* Of 64 bytes, as all that turn. */
		struct mlx5_cqe64 *cqe = (struct mlx5_cqe64 *)
			(cq->object->buffer +
			 (size_t)(cq->written & mask) * sizeof(*cqe));

		__atomic_store_n(&cqe->op_own,
				 (cqe->op_own & 0xf0) |
					 ((cq->written >> log2) & 1),
				 __ATOMIC_RELEASE);
	}
}

const struct mlx5_object *device_qp(struct ibv_qp *qp);
/* The queue pair that was made last, by the provider itself. */
const struct mlx5_object *device_newest_qp(void);
const struct mlx5_object *device_srq(struct ibv_srq *srq);
/* The queues of a queue pair; indices are counted by the device, and masked. */
uint8_t *device_send_block(const struct mlx5_object *qp, uint32_t index);
uint8_t *device_recv_entry(const struct mlx5_object *qp, uint32_t index);
/* An entry of a shared queue, and which one the device takes after it. */
uint8_t *device_shared_entry(const struct mlx5_object *srq, uint16_t slot);
uint16_t device_shared_next(const struct mlx5_object *srq, uint16_t slot);

/* A completion of the send work request that begins at a block. */
struct mlx5_cqe64 device_sent(const struct mlx5_object *qp, uint32_t index);
/* A completion of a receive, of `bytes` bytes. */
struct mlx5_cqe64 device_received(const struct mlx5_object *qp, uint16_t slot,
				  uint32_t bytes);
/* To a state in which a queue pair sends and receives. */
void device_ready(struct ibv_qp *qp, uint8_t port);

#endif
