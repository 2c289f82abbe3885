/*
 * Allocators of a context (mlx5dv_set_context_attr), as DPDK has them, and those of a
 * parent domain beside them. Exit status 0 if all was as it should be.
 */
#include <infiniband/mlx5dv.h>
#include <infiniband/verbs.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdlib.h>

#include "check.h"
#include "loopback.h"

#define PAGE 4096
#define PIECES 64

/* What an allocator has given. */
struct source {
	struct piece {
		char *at;
		size_t size;
	} pieces[PIECES];
	int given, taken_back;
	bool fails, leaves_it;
};

static struct source of_context, of_domain;

static void *give(struct source *source, size_t size, int fill)
{
	struct piece *piece = source->pieces;

	if (source->fails)
		return NULL;
	while (piece->at)
		CHECK(++piece < source->pieces + PIECES);
	source->given++;
	piece->at = aligned_alloc(PAGE, (size + PAGE - 1) / PAGE * PAGE);
	CHECK(piece->at);
	memset(piece->at, fill, size);
	piece->size = size;
	return piece->at;
}

static void take_back(struct source *source, void *memory)
{
	struct piece *piece = source->pieces;

	while (piece->at != memory)
		CHECK(++piece < source->pieces + PIECES);
	piece->at = NULL;
	piece->size = 0;
	source->taken_back++;
	free(memory);
}

static bool has(struct source *source, void *memory)
{
	struct piece *piece;

	for (piece = source->pieces; piece < source->pieces + PIECES; piece++)
		if ((char *)memory >= piece->at && (char *)memory < piece->at + piece->size)
			return true;
	return false;
}

/* The provider clears queues and records of this memory. */
static void *context_alloc(size_t size, void *data)
{
	CHECK(data == &of_context && size > 0);
	return give(data, size, 0x5a);
}

static void context_free(void *memory, void *data)
{
	CHECK(data == &of_context);
	take_back(data, memory);
}

/*
 * ibv_alloc_parent_domain(3): the callback initializes the memory with zeros. libmlx5
 * relies on that for queues and for doorbell records; the device reads the record of
 * sends once the queue pair is ready to send, which may be before the first send.
 */
static void *domain_alloc(struct ibv_pd *pd, void *data, size_t size, size_t alignment,
			  uint64_t type)
{
	CHECK(data == &of_domain && pd && alignment <= PAGE);
	CHECK(type != MLX5DV_RES_TYPE_DBR || size == 8);
	return of_domain.leaves_it ? IBV_ALLOCATOR_USE_DEFAULT : give(data, size, 0);
}

static void domain_free(struct ibv_pd *pd, void *data, void *memory, uint64_t type)
{
	(void)pd;
	(void)type;
	take_back(data, memory);
}

/* Queues of a domain that is connected to itself, and their memory. */
struct queues {
	struct ibv_pd *pd;
	struct ibv_cq *cq;
	struct ibv_srq *srq;
	struct ibv_qp *qp;
	struct mlx5dv_cq c;
	struct mlx5dv_srq s;
	struct mlx5dv_qp q;
};

static void create(struct queues *queues, struct ibv_pd *pd, bool is_parent)
{
	struct ibv_cq_init_attr_ex cq_init = {
		.cqe = 15, .parent_domain = pd,
		.comp_mask = is_parent ? IBV_CQ_INIT_ATTR_MASK_PD : 0,
	};
	struct ibv_srq_init_attr srq_init = { .attr = { .max_wr = 15, .max_sge = 1 } };
	struct ibv_qp_init_attr init = {
		.qp_type = IBV_QPT_RC, .cap = { 15, 0, 1, 1, 0 }, .sq_sig_all = 1,
	};
	struct ibv_qp_attr attr = {
		.qp_access_flags = IBV_ACCESS_REMOTE_WRITE,
		.min_rnr_timer = 12, .timeout = 14, .retry_cnt = 7, .rnr_retry = 7,
	};
	struct mlx5dv_obj obj = { { 0 } };

	memset(queues, 0, sizeof(*queues));
	queues->pd = pd;
	queues->cq = ibv_cq_ex_to_cq(ibv_create_cq_ex(pd->context, &cq_init));
	CHECK(queues->cq);
	queues->srq = ibv_create_srq(pd, &srq_init);
	CHECK(queues->srq);
	init.send_cq = init.recv_cq = queues->cq;
	init.srq = queues->srq;
	queues->qp = ibv_create_qp(pd, &init);
	CHECK(queues->qp);
	connect_to_itself(queues->qp, attr);
	obj.cq.in = queues->cq;
	obj.cq.out = &queues->c;
	obj.srq.in = queues->srq;
	obj.srq.out = &queues->s;
	obj.qp.in = queues->qp;
	obj.qp.out = &queues->q;
	CHECK(!mlx5dv_init_obj(&obj, MLX5DV_OBJ_CQ | MLX5DV_OBJ_SRQ | MLX5DV_OBJ_QP));
}

/* Sends over the ends of all rings. */
static void use(struct queues *queues)
{
	static char memory[2][64];
	struct ibv_mr *mr = ibv_reg_mr(queues->pd, memory, sizeof(memory),
				       IBV_ACCESS_LOCAL_WRITE);
	struct ibv_sge from, to;
	struct ibv_recv_wr recv = { .sg_list = &to, .num_sge = 1 }, *bad_recv;
	struct ibv_send_wr send = {
		.sg_list = &from, .num_sge = 1, .opcode = IBV_WR_SEND,
	}, *bad_send;
	struct ibv_wc wc;
	int i, left;

	CHECK(mr);
	from = (struct ibv_sge){ (uintptr_t)memory[0], 64, mr->lkey };
	to = (struct ibv_sge){ (uintptr_t)memory[1], 64, mr->lkey };
	for (i = 0; i < 40; i++) {
		memset(memory[0], 'a' + i % 26, 64);
		CHECK(!ibv_post_srq_recv(queues->srq, &recv, &bad_recv));
		CHECK(!ibv_post_send(queues->qp, &send, &bad_send));
		for (left = 2; left; left--) {
			int n;

			do
				n = ibv_poll_cq(queues->cq, 1, &wc);
			while (!n);
			CHECK(n == 1 && wc.status == IBV_WC_SUCCESS);
		}
		CHECK(!memcmp(memory[0], memory[1], 64));
	}
	CHECK(!ibv_dereg_mr(mr));
}

static void destroy(struct queues *queues)
{
	CHECK(!ibv_destroy_qp(queues->qp));
	CHECK(!ibv_destroy_srq(queues->srq));
	CHECK(!ibv_destroy_cq(queues->cq));
}

static void *entries(struct queues *queues, int i)
{
	return i == 0 ? queues->c.buf : i == 1 ? queues->s.buf : queues->q.sq.buf;
}

static void *record(struct queues *queues, int i)
{
	return i == 0 ? queues->c.dbrec : i == 1 ? queues->s.dbrec : queues->q.dbrec;
}

/* All memory is the context's; records share pages. */
static void by_context(struct ibv_pd *pd)
{
	struct queues one, other;
	int i;

	create(&one, pd, false);
	for (i = 0; i < 3; i++)
		CHECK(has(&of_context, entries(&one, i)) && has(&of_context, record(&one, i)));
	CHECK(of_context.given == 4);
	use(&one);
	create(&other, pd, false);
	CHECK(of_context.given == 7 && of_context.taken_back == 0);
	CHECK(!ibv_resize_cq(one.cq, 63));
	CHECK(of_context.given == 8);
	use(&one);
	destroy(&one);
	use(&other);
	destroy(&other);
	CHECK(of_context.taken_back == of_context.given);
}

/* A domain's allocators come first; of what they leave, records are the context's. */
static void by_domain(struct ibv_pd *pd)
{
	struct ibv_parent_domain_init_attr init = {
		.pd = pd,
		.comp_mask = IBV_PARENT_DOMAIN_INIT_ATTR_ALLOCATORS |
			     IBV_PARENT_DOMAIN_INIT_ATTR_PD_CONTEXT,
		.alloc = domain_alloc, .free = domain_free, .pd_context = &of_domain,
	};
	struct ibv_pd *parent = ibv_alloc_parent_domain(pd->context, &init);
	int given = of_context.given, i;
	struct queues queues;

	CHECK(parent);
	create(&queues, parent, true);
	for (i = 0; i < 3; i++)
		CHECK(has(&of_domain, entries(&queues, i)) && has(&of_domain, record(&queues, i)));
	CHECK(of_domain.given == 6 && of_context.given == given);
	use(&queues);
	destroy(&queues);
	CHECK(of_domain.taken_back == 6);
	of_domain.leaves_it = true;
	create(&queues, parent, true);
	for (i = 0; i < 3; i++)
		CHECK(!has(&of_context, entries(&queues, i)) && has(&of_context, record(&queues, i)));
	CHECK(of_domain.given == 6 && of_context.given == given + 1);
	use(&queues);
	destroy(&queues);
	CHECK(of_context.taken_back == of_context.given);
	CHECK(!ibv_dealloc_pd(parent));
}

int main(void)
{
	struct mlx5dv_ctx_allocators allocators = { context_alloc, context_free, &of_context };
	struct ibv_device **list = ibv_get_device_list(NULL);
	struct ibv_context *context;
	struct ibv_pd *pd;
	struct queues queues;
	int given;

	CHECK(list && list[0]);
	context = ibv_open_device(list[0]);
	CHECK(context);
	pd = ibv_alloc_pd(context);
	CHECK(pd);
	CHECK(mlx5dv_set_context_attr(context, 7, &allocators) == EOPNOTSUPP);
	CHECK(!mlx5dv_set_context_attr(context, MLX5DV_CTX_ATTR_BUF_ALLOCATORS, &allocators));
	by_context(pd);
	by_domain(pd);
	of_context.fails = true;
	given = of_context.given;
	CHECK(!ibv_create_cq(context, 15, NULL, NULL, 0));
	of_context.fails = false;
	/* Without allocators it is the process's. */
	memset(&allocators, 0, sizeof(allocators));
	CHECK(!mlx5dv_set_context_attr(context, MLX5DV_CTX_ATTR_BUF_ALLOCATORS, &allocators));
	create(&queues, pd, false);
	use(&queues);
	destroy(&queues);
	CHECK(of_context.given == given);
	CHECK(!ibv_dealloc_pd(pd));
	CHECK(!ibv_close_device(context));
	puts("well");
	return 0;
}
