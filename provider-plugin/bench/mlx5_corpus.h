/* SPDX-License-Identifier: MIT */
/*
 * The corpus: queue pairs of every kind, and work requests made from numbers
 * that are the same in every run.
 */
#ifndef RINGVERBS_BENCH_MLX5_CORPUS_H
#define RINGVERBS_BENCH_MLX5_CORPUS_H

#include <infiniband/verbs.h>
#include <stdbool.h>
#include <stdint.h>

#define MOST_SGES 32
#define MOST_REQUESTS 5

/* The same address in every process: it is in the entries. */
#define DATA_AT 0x100000000000ull
#define DATA_BYTES (1u << 20)

/* Of a raw packet: the headers of Ethernet, with a VLAN, and a byte. Headers alone as
 * inline data libmlx5 writes twice, with ibv_wr_*. */
#define LEAST_FRAME 19
/* Of a datagram of IPoIB: its header, and a byte. */
#define LEAST_IPOIB 5

struct kind {
	const char *name;
	enum ibv_qp_type type;
	uint32_t sges, inline_bytes, requests; /* of the send queue */
	uint32_t recv_sges, receives;
	bool signal_all;
	bool extended;    /* by ibv_wr_*, not ibv_post_send */
	bool shared;      /* receives from a shared queue; of XRC, its own */
	bool keys;        /* changes of keys too: windows, invalidation */
	uint8_t port;
	uint32_t first;   /* blocks that are posted before the corpus begins */
	bool thread;      /* of a thread domain, with a register of its own */
	bool own;         /* operations of mlx5_own.h too */
	bool protects;    /* of those, signatures and encryption of keys */
	bool underlay;    /* of UD: in the name of another queue pair */
};

extern const struct kind kinds[];
extern const unsigned int nkinds;

/* One work request of either interface. */
struct request {
	uint64_t wr_id;
	enum ibv_wr_opcode opcode;
	unsigned int flags;
	unsigned int nsges;
	struct ibv_sge sges[MOST_SGES];
	__be32 immediate;
	uint32_t key;
	uint64_t remote_address;
	uint64_t compare_add, swap;
	struct ibv_ah *ah;
	uint32_t remote_qpn, remote_qkey;
	uint32_t remote_srqn;
	uint64_t access_key;
	struct ibv_mw *window;
	struct ibv_mw_bind_info bind;
};

/* What requests are made of, besides numbers. */
struct material {
	struct ibv_ah *ahs[8];
	unsigned int nahs;
	struct ibv_mr *region;
	struct ibv_mw *window;
};

struct numbers {
	uint64_t state;
};
uint64_t next_number(struct numbers *numbers);
/* At least `from`, less than `to`. */
uint32_t number_in(struct numbers *numbers, uint32_t from, uint32_t to);

/* A work request that a queue pair of the kind takes. */
struct request make_request(struct numbers *numbers, const struct kind *kind,
			    const struct material *material);
/* A scatter list of up to `most` elements; its length. */
unsigned int make_list(struct numbers *numbers, struct ibv_sge *sges,
		       unsigned int most);
/* The name of an operation. */
const char *opcode_name(enum ibv_wr_opcode opcode);
/* What ibv_create_qp_ex has to be told about the operations of a kind. */
uint64_t send_operations(const struct kind *kind);

/* Posts by one interface or the other. The index of the request that was
 * refused in `bad`, -1 if none was or the interface does not tell. */
int post_requests(struct ibv_qp *qp, const struct kind *kind,
		  struct request *requests, unsigned int count, int *bad);

#endif
