/* SPDX-License-Identifier: MIT */
/*
 * What the parts of mlx5_bytes.c share.
 */
#ifndef RINGVERBS_BENCH_MLX5_BYTES_H
#define RINGVERBS_BENCH_MLX5_BYTES_H

#include <infiniband/verbs.h>
#include <stdbool.h>
#include <stdint.h>

#include "mlx5_corpus.h"
#include "mlx5_device.h"

struct subject {
	const struct kind *kind;
	struct ibv_qp *qp;
	struct ibv_cq *cq;
	struct ibv_srq *srq;
	const struct mlx5_object *object, *shared;
	struct device_cq completions;
	struct numbers numbers;
	uint32_t posted;   /* blocks, ever */
	uint32_t received; /* receives, ever */
	uint16_t next_slot; /* of the shared queue: what the device takes next */
	struct material material;
};

/* Fills the send queue and the register with the pattern. */
void before_post(const struct subject *s);
/* The send queue's doorbell record. */
uint32_t send_record(const struct subject *s);
/* Takes over what was posted, and prints it. How many work requests it was, and
 * where the last begins. */
unsigned int take_sends(struct subject *s, bool print, uint32_t *last);
/* The line of a case, without its end. */
void print_case(const struct subject *s, const char *what);

/* The same for a shared receive queue with tag matching (mlx5_tags.c). */
void run_tags(struct ibv_context *context, struct ibv_pd *pd);

#endif
