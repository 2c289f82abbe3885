/*
 * A program that drives the queues of a ConnectX itself (mlx5dv_init_obj), as UCX's
 * accelerated transports do. Exit status 0 if all was as it should be.
 */
#include <endian.h>
#include <errno.h>
#include <infiniband/mlx5dv.h>
#include <infiniband/verbs.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "check.h"
#include "loopback.h"

#define HALF 4096
#define SENDS 100

static struct ibv_context *context;
static struct ibv_pd *pd;
static struct ibv_mr *mr;
static char memory[2 * HALF] __attribute__((aligned(4096)));

static struct ibv_cq *create_cq(int cqe, int cqe_size)
{
	struct ibv_cq_init_attr_ex attr = { .cqe = cqe };
	struct mlx5dv_cq_init_attr own = {
		.comp_mask = MLX5DV_CQ_INIT_ATTR_MASK_CQE_SIZE,
		.cqe_size = cqe_size,
	};
	struct ibv_cq_ex *cq = mlx5dv_create_cq(context, &attr, &own);

	return cq ? ibv_cq_ex_to_cq(cq) : NULL;
}

/* A queue pair that is connected to itself. */
static struct ibv_qp *create_qp(struct ibv_cq *cq, struct ibv_srq *srq)
{
	struct ibv_qp_init_attr_ex init = {
		.send_cq = cq, .recv_cq = cq, .srq = srq, .qp_type = IBV_QPT_RC,
		.cap = { 8, srq ? 0 : 8, 1, 1, 0 },
		.comp_mask = IBV_QP_INIT_ATTR_PD, .pd = pd,
	};
	struct mlx5dv_qp_init_attr own = {
		.comp_mask = MLX5DV_QP_INIT_ATTR_MASK_QP_CREATE_FLAGS,
		.create_flags = MLX5DV_QP_CREATE_DISABLE_SCATTER_TO_CQE,
	};
	struct ibv_qp *qp = mlx5dv_create_qp(context, &init, &own);
	struct ibv_qp_attr attr = {
		.qp_access_flags = IBV_ACCESS_REMOTE_WRITE,
		.min_rnr_timer = 12, .timeout = 14, .retry_cnt = 7, .rnr_retry = 7,
	};

	CHECK(qp);
	connect_to_itself(qp, attr);
	return qp;
}

/* The next completion, in whichever size of CQE. */
static struct mlx5_cqe64 *next(struct mlx5dv_cq *cq, uint32_t *index)
{
	char *entry = (char *)cq->buf + (*index & (cq->cqe_cnt - 1)) * cq->cqe_size;
	struct mlx5_cqe64 *cqe = (void *)(entry + cq->cqe_size - 64);
	time_t end = time(NULL) + 60;

	while (mlx5dv_get_cqe_opcode(cqe) == MLX5_CQE_INVALID ||
	       mlx5dv_get_cqe_owner(cqe) != !!(*index & cq->cqe_cnt))
		CHECK(time(NULL) < end);
	__sync_synchronize();
	++*index;
	cq->dbrec[0] = htobe32(*index & 0xffffff);
	return cqe;
}

/* Writes of one block each, by hand, several times around both rings. */
static void write_by_hand(int cqe_size)
{
	struct ibv_cq *cq = create_cq(15, cqe_size);
	struct ibv_qp *qp;
	struct mlx5dv_qp q = { .comp_mask = MLX5DV_QP_MASK_UAR_MMAP_OFFSET };
	struct mlx5dv_cq c = { 0 };
	struct mlx5dv_obj obj;
	uint32_t read = 0;
	unsigned int i;

	CHECK(cq);
	qp = create_qp(cq, NULL);
	memset(&obj, 0, sizeof(obj));
	obj.qp.in = qp;
	obj.qp.out = &q;
	obj.cq.in = cq;
	obj.cq.out = &c;
	CHECK(!mlx5dv_init_obj(&obj, MLX5DV_OBJ_QP | MLX5DV_OBJ_CQ));
	CHECK(q.comp_mask == MLX5DV_QP_MASK_UAR_MMAP_OFFSET && c.comp_mask == 0);
	CHECK(q.sq.stride == 64 && q.sq.wqe_cnt >= 8 && q.rq.wqe_cnt >= 8);
	CHECK(c.cqe_cnt == 16 && c.cqe_size == (uint32_t)cqe_size && c.cq_uar);
	for (i = 0; i < SENDS; i++) {
		char *wqe = (char *)q.sq.buf + (i & (q.sq.wqe_cnt - 1)) * 64;
		struct mlx5_wqe_raddr_seg *to = (void *)(wqe + 16);
		struct mlx5_cqe64 *cqe;

		memset(memory, 'a' + i % 26, 64);
		mlx5dv_set_ctrl_seg((void *)wqe, i, MLX5_OPCODE_RDMA_WRITE, 0, qp->qp_num,
				    MLX5_WQE_CTRL_CQ_UPDATE, 3, 0, 0);
		to->raddr = htobe64((uintptr_t)memory + HALF);
		to->rkey = htobe32(mr->rkey);
		to->reserved = 0;
		mlx5dv_set_data_seg((void *)(wqe + 32), 64, mr->lkey, (uintptr_t)memory);
		__sync_synchronize();
		q.dbrec[MLX5_SND_DBR] = htobe32((i + 1) & 0xffff);
		__sync_synchronize();
		*(volatile uint64_t *)((char *)q.bf.reg + (i & 1) * q.bf.size) =
			*(uint64_t *)wqe;
		cqe = next(&c, &read);
		CHECK(mlx5dv_get_cqe_opcode(cqe) == MLX5_CQE_REQ);
		CHECK((be32toh(cqe->sop_drop_qpn) & 0xffffff) == qp->qp_num);
		CHECK(be16toh(cqe->wqe_counter) == (i & 0xffff));
		CHECK(!memcmp(memory, memory + HALF, 64));
	}
	/* What the queue still holds is the program's, also when a queue pair ends. */
	CHECK(!ibv_destroy_qp(qp));
	CHECK(!ibv_destroy_cq(cq));
}

/* The other objects: as a program needs them that posts or arms by itself. */
static void describe(void)
{
	struct ibv_srq_init_attr attr = { .attr = { .max_wr = 31, .max_sge = 2 } };
	struct ibv_srq *srq = ibv_create_srq(pd, &attr);
	struct ibv_ah_attr to = { .is_global = 1, .port_num = 1 };
	struct ibv_ah *ah;
	struct mlx5dv_srq s = { .comp_mask = MLX5DV_SRQ_MASK_SRQN };
	struct mlx5dv_ah a = { 0 };
	struct mlx5dv_pd p = { 0 };
	struct mlx5dv_obj obj;
	struct mlx5_wqe_srq_next_seg *first;

	CHECK(srq);
	CHECK(!ibv_query_gid(context, 1, 0, &to.grh.dgid));
	ah = ibv_create_ah(pd, &to);
	CHECK(ah);
	memset(&obj, 0, sizeof(obj));
	obj.srq.in = srq;
	obj.srq.out = &s;
	obj.ah.in = ah;
	obj.ah.out = &a;
	obj.pd.in = pd;
	obj.pd.out = &p;
	CHECK(!mlx5dv_init_obj(&obj, MLX5DV_OBJ_SRQ | MLX5DV_OBJ_AH | MLX5DV_OBJ_PD));
	first = s.buf;
	CHECK(s.head == 0 && s.tail == 31 && s.stride == 64 && s.srqn != 0 && s.dbrec);
	CHECK(be16toh(first->next_wqe_index) == 1);
	CHECK(a.av && !memcmp(a.av->rgid, &to.grh.dgid, 16) && a.av->dqp_dct == 0);
	CHECK(p.pdn != 0);
	CHECK(!ibv_destroy_ah(ah));
	CHECK(!ibv_destroy_srq(srq));
}

/* What nobody has: an error, and nothing else. */
static void refused(void)
{
	struct ibv_cq_init_attr_ex attr = { .cqe = 16 };
	struct mlx5dv_cq_init_attr own = {
		.comp_mask = MLX5DV_CQ_INIT_ATTR_MASK_CQE_SIZE, .cqe_size = 96,
	};
	struct ibv_qp_init_attr_ex init = { .comp_mask = IBV_QP_INIT_ATTR_PD, .pd = pd };
	struct mlx5dv_qp_init_attr later = { .comp_mask = 1ull << 40 };
	struct ibv_alloc_dm_attr size = { .length = 4096 };
	struct mlx5dv_alloc_dm_attr steering = { 0 };
	struct mlx5dv_steering_anchor_attr anchor = {
		.ft_type = MLX5DV_FLOW_TABLE_TYPE_NIC_RX,
	};
	struct ibv_cq *cq = create_cq(16, 64);
	struct ibv_qp_init_attr_ex underlay = {
		.qp_type = IBV_QPT_RC, .send_cq = cq, .recv_cq = cq, .cap = { 1, 1, 1, 1, 0 },
		.comp_mask = IBV_QP_INIT_ATTR_PD | IBV_QP_INIT_ATTR_CREATE_FLAGS, .pd = pd,
		.create_flags = IBV_QP_CREATE_SOURCE_QPN, .source_qpn = 7,
	};

	CHECK(!mlx5dv_create_cq(context, &attr, &own));
	own.comp_mask = 1ull << 40;
	CHECK(!mlx5dv_create_cq(context, &attr, &own));
	CHECK(!mlx5dv_create_qp(context, &init, &later));
	/* The device's steering is the driver's. */
	for (steering.type = MLX5DV_DM_TYPE_STEERING_SW_ICM; steering.type <= 3; steering.type++) {
		CHECK(!mlx5dv_alloc_dm(context, &size, &steering) && errno == EOPNOTSUPP);
		steering.comp_mask = 1;
		CHECK(!mlx5dv_alloc_dm(context, &size, &steering) && errno == EINVAL);
		steering.comp_mask = 0;
	}
	steering.type = 99;
	CHECK(!mlx5dv_alloc_dm(context, &size, &steering) && errno == EOPNOTSUPP);
	CHECK(!mlx5dv_create_steering_anchor(context, &anchor) && errno == EPROTONOSUPPORT);
	anchor.comp_mask = 1;
	CHECK(!mlx5dv_create_steering_anchor(context, &anchor) && errno == EOPNOTSUPP);
	/* Of IPoIB, which the device has not. */
	CHECK(!ibv_create_qp_ex(context, &underlay) && errno == EINVAL);
	underlay.qp_type = IBV_QPT_UD;
	CHECK(!ibv_create_qp_ex(context, &underlay) && errno == EOPNOTSUPP);
	underlay.comp_mask |= IBV_QP_INIT_ATTR_SEND_OPS_FLAGS;
	underlay.send_ops_flags = IBV_QP_EX_WITH_SEND;
	CHECK(!ibv_create_qp_ex(context, &underlay) && errno == EOPNOTSUPP);
	CHECK(!ibv_destroy_cq(cq));
}

int main(void)
{
	struct ibv_device **list = ibv_get_device_list(NULL);
	struct mlx5dv_context features = {
		.comp_mask = MLX5DV_CONTEXT_MASK_CQE_COMPRESION,
	};

	CHECK(list && list[0]);
	CHECK(mlx5dv_is_supported(list[0]));
	context = ibv_open_device(list[0]);
	CHECK(context);
	CHECK(!mlx5dv_query_device(context, &features));
	CHECK(features.flags & MLX5DV_CONTEXT_FLAGS_CQE_V1);
	CHECK(features.comp_mask == MLX5DV_CONTEXT_MASK_CQE_COMPRESION);
	pd = ibv_alloc_pd(context);
	CHECK(pd);
	mr = ibv_reg_mr(pd, memory, sizeof(memory),
			IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE);
	CHECK(mr);
	write_by_hand(64);
	write_by_hand(128);
	describe();
	refused();
	CHECK(!ibv_dereg_mr(mr));
	CHECK(!ibv_dealloc_pd(pd));
	CHECK(!ibv_close_device(context));
	puts("well");
	return 0;
}
