/* SPDX-License-Identifier: MIT */
/*
 * What the programs that play a ConnectX ask of the stand-in for its kernel
 * driver (mlx5_standin.c). They find it through dlsym, as with standin.h.
 */
#ifndef RINGVERBS_BENCH_MLX5_STANDIN_H
#define RINGVERBS_BENCH_MLX5_STANDIN_H

#include <stdint.h>

enum mlx5_kind { MLX5_CQ, MLX5_QP, MLX5_SRQ };

/* What a provider said of a queue when it made it, and the register it got. */
struct mlx5_object {
	enum mlx5_kind kind;
	uint32_t handle;
	uint32_t number;      /* CQN, QPN or SRQN */
	uint8_t *buffer;      /* of a QP: its receive queue */
	volatile uint32_t *records; /* its two doorbell records */
	uint32_t entries;     /* of a CQ or SRQ, a power of two */
	uint32_t cqe_bytes;   /* of a CQ's entry, 64 or 128 */
	uint8_t compresses;   /* of a CQ: the device may tell several together */
	int channel;          /* of a CQ: where its events are written, or -1 */
	uint64_t user_handle; /* of a CQ: what they name it by */
	uint8_t *sends;       /* of a QP: its send queue, behind its receives unless
				 it is of raw packets */
	uint32_t send_blocks; /* of 64 bytes */
	uint32_t recv_entries, recv_shift;
	uint32_t srq_shift;
	uint32_t user_index;
	uint32_t flags;
	uint8_t *registers;   /* its page of them, at an address of our own */
	uint8_t *blue_flame;  /* of a QP: its register there */
};

/* NULL when there is no such object. `handle` is the public one; 0, which none
 * has, is the newest of the kind. */
typedef const struct mlx5_object *(*mlx5_object_fn)(enum mlx5_kind kind,
						    uint32_t handle);

/* The command that made the object of DevX of that index; NULL beyond the last. */
typedef const uint8_t *(*mlx5_command_fn)(unsigned int index, uint32_t *bytes);

struct ibv_context;
struct ibv_cq_ex;
struct ibv_qp_ex;
struct mlx5dv_qp_ex;
/* Sets what the bench's rows call to functions that return at once. */
typedef void (*mlx5_empty_fn)(struct ibv_context *context, struct ibv_cq_ex *cq,
			      struct ibv_qp_ex *qp,
			      struct mlx5dv_qp_ex *functions);

/* Bytes of half a BlueFlame register. */
#define MLX5_HALF 256
/* Ports: one of each link. */
#define MLX5_PORT_ETHERNET 1
#define MLX5_PORT_INFINIBAND 2
/* GIDs of the port on Ethernet. */
#define MLX5_GID_ROCE_V1 0
#define MLX5_GID_ROCE_V2 1

#endif
