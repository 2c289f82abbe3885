/*
 * A program that drives the queues of a ConnectX wrongly: work requests, indices and
 * doorbells of random bytes, and ibv_poll_cq on what comes of it. Its memory beyond the
 * registered part stays as it was, and another queue pair goes on. Exit status 0 if all
 * was as it should be.
 */
#include <endian.h>
#include <errno.h>
#include <infiniband/mlx5dv.h>
#include <infiniband/verbs.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "check.h"
#include "loopback.h"

#define PART 4096
#define SEEDS 300

static struct ibv_context *context;
static struct ibv_pd *pd;
static struct ibv_mr *mr;
/* The middle part is registered. */
static unsigned char memory[3 * PART] __attribute__((aligned(4096)));
static uint64_t state;

static uint64_t any(void)
{
	state ^= state << 13;
	state ^= state >> 7;
	state ^= state << 17;
	return state;
}

/* One of the numbers that a WQE may have by right, or any. */
static uint64_t likely(void)
{
	switch (any() % 6) {
	case 0:
		return (uintptr_t)memory + any() % sizeof(memory);
	case 1:
		return htobe64((uintptr_t)memory + PART + any() % PART);
	case 2:
		return (uint64_t)htobe32(mr->lkey) << 32 | htobe32(any() % PART);
	case 3:
		return (uint64_t)htobe32(any() % 8) << 32 | htobe32(mr->rkey);
	case 4:
		return 0;
	default:
		return any();
	}
}

static struct ibv_qp *create_qp(struct ibv_cq *cq)
{
	struct ibv_qp_init_attr init = {
		.send_cq = cq, .recv_cq = cq, .qp_type = IBV_QPT_RC,
		.cap = { 8, 8, 1, 1, 0 },
	};
	struct ibv_qp *qp = ibv_create_qp(pd, &init);
	struct ibv_qp_attr attr = {
		.qp_access_flags = IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_READ,
		.min_rnr_timer = 1, .timeout = 8, .retry_cnt = 1, .rnr_retry = 1,
	};

	CHECK(qp);
	connect_to_itself(qp, attr);
	return qp;
}

/* Drives one queue pair wrongly. */
static void misuse(void)
{
	struct ibv_cq *cq = ibv_create_cq(context, 15, NULL, NULL, 0);
	struct ibv_qp *qp;
	struct mlx5dv_qp q = { 0 };
	struct mlx5dv_cq c = { 0 };
	struct mlx5dv_obj obj;
	struct ibv_wc wc[4];
	uint64_t *words;
	unsigned int posted = any() % 4 ? 1 + any() % 8 : any();
	size_t i;

	CHECK(cq);
	qp = create_qp(cq);
	memset(&obj, 0, sizeof(obj));
	obj.qp.in = qp;
	obj.qp.out = &q;
	obj.cq.in = cq;
	obj.cq.out = &c;
	CHECK(!mlx5dv_init_obj(&obj, MLX5DV_OBJ_QP | MLX5DV_OBJ_CQ));
	words = q.sq.buf;
	for (i = 0; i < (size_t)q.sq.wqe_cnt * 8; i++)
		words[i] = likely();
	/* Of most blocks the control segment makes some sense. */
	for (i = 0; i < q.sq.wqe_cnt; i++)
		if (any() % 4)
			mlx5dv_set_ctrl_seg((void *)(words + i * 8), i, any() % 0x40, 0,
					    qp->qp_num, any(), 1 + any() % 16, 0, any());
	words = q.rq.buf;
	for (i = 0; i < (size_t)q.rq.wqe_cnt * q.rq.stride / 8; i++)
		words[i] = likely();
	q.dbrec[MLX5_RCV_DBR] = htobe32(any());
	q.dbrec[MLX5_SND_DBR] = htobe32(posted);
	__sync_synchronize();
	*(volatile uint64_t *)q.bf.reg = any() % 4 ? *(uint64_t *)q.sq.buf : any();
	if (any() % 4 == 0)
		c.dbrec[0] = any();
	if (any() % 4 == 0)
		((uint64_t *)c.buf)[any() % (c.cqe_cnt * 8)] = any();
	for (i = 0; i < 30; i++) {
		ibv_poll_cq(cq, 4, wc);
		usleep(i < 5 ? 0 : 100);
	}
	CHECK(!ibv_destroy_qp(qp));
	CHECK(!ibv_destroy_cq(cq));
}

/* A queue pair that is used as it should be. */
static void use(struct ibv_qp *qp)
{
	struct ibv_sge sge = { (uintptr_t)memory + PART, 64, mr->lkey };
	struct ibv_send_wr wr = {
		.wr_id = 7, .sg_list = &sge, .num_sge = 1, .opcode = IBV_WR_RDMA_WRITE,
		.send_flags = IBV_SEND_SIGNALED,
	}, *bad;
	time_t end = time(NULL) + 20;
	struct ibv_wc wc;
	int count;

	memset(memory + PART, 'x', 64);
	wr.wr.rdma.remote_addr = (uintptr_t)memory + PART + 1024;
	wr.wr.rdma.rkey = mr->rkey;
	CHECK(!ibv_post_send(qp, &wr, &bad));
	while (!(count = ibv_poll_cq(qp->send_cq, 1, &wc)))
		CHECK(time(NULL) < end);
	CHECK(count == 1 && wc.status == IBV_WC_SUCCESS && wc.wr_id == 7);
	CHECK(!memcmp(memory + PART, memory + PART + 1024, 64));
}

int main(void)
{
	struct ibv_device **list = ibv_get_device_list(NULL);
	struct ibv_cq *cq;
	struct ibv_qp *qp;

	CHECK(list && list[0]);
	context = ibv_open_device(list[0]);
	CHECK(context);
	pd = ibv_alloc_pd(context);
	CHECK(pd);
	memset(memory, 0x5a, sizeof(memory));
	mr = ibv_reg_mr(pd, memory + PART, PART,
			IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE |
			IBV_ACCESS_REMOTE_READ);
	CHECK(mr);
	cq = ibv_create_cq(context, 15, NULL, NULL, 0);
	CHECK(cq);
	qp = create_qp(cq);
	for (uint64_t seed = 1; seed <= SEEDS; seed++) {
		state = seed * 0x9e3779b97f4a7c15ull;
		misuse();
		if (seed % 16 == 0)
			use(qp);
		for (size_t i = 0; i < PART; i++)
			if (memory[i] != 0x5a || memory[2 * PART + i] != 0x5a) {
				fprintf(stderr, "seed %d: byte %zu\n", (int)seed, i);
				return 1;
			}
	}
	CHECK(!ibv_destroy_qp(qp));
	CHECK(!ibv_destroy_cq(cq));
	CHECK(!ibv_dereg_mr(mr));
	CHECK(!ibv_dealloc_pd(pd));
	CHECK(!ibv_close_device(context));
	puts("well");
	return 0;
}
