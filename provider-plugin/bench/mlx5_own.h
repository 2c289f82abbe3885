/* SPDX-License-Identifier: MIT */
/*
 * What mlx5dv adds to queue pairs and to ibv_wr_*: initiators of dynamic connections,
 * layouts of memory keys, WQEs that the program makes.
 */
#ifndef RINGVERBS_BENCH_MLX5_OWN_H
#define RINGVERBS_BENCH_MLX5_OWN_H

#include "mlx5_corpus.h"

/* Operations that verbs do not have. */
enum {
	OWN_LIST = 100,
	OWN_INTERLEAVED,
	OWN_CONFIGURE,
	OWN_RAW,
	OWN_END,
	/* On queue pairs of their own kind. */
	OWN_PROTECT = OWN_END,
};

/* Finds the provider's functions, and makes memory keys. */
void own_start(struct ibv_context *context, struct ibv_pd *pd);
/* A queue pair of such a kind. */
struct ibv_qp *own_queue_pair(struct ibv_context *context, const struct kind *kind,
			      struct ibv_qp_init_attr_ex *attr);
/* Where a work request of an initiator goes. */
void own_address(struct ibv_qp_ex *qp, const struct request *r);
/* One of the operations above; `r->compare_add` and `r->swap` are its numbers. */
void own_operation(struct ibv_qp_ex *qp, const struct request *r);
const char *own_name(unsigned int operation);
/* Configures the keys that have protection anew. */
int own_recover(struct ibv_qp *qp);
/* A report of a wrong signature of one of the keys that have any. */
struct mlx5_cqe64 own_wrong_signature(struct numbers *numbers);
/* Prints what the keys say of it. */
void own_print_errors(void);

#endif
