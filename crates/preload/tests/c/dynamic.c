/*
 * Dynamic connections (DC): one initiator that sends to two targets, and one with
 * streams, by ibv_wr_*. Exit status 0 if all was as it should be.
 */
#include <errno.h>
#include <infiniband/mlx5dv.h>
#include <infiniband/verbs.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "check.h"

#define TARGETS 2
#define RECEIVES 64
#define ROUNDS 100
#define SIZE 512
#define KEY 0x0123456789abcdefULL

static struct ibv_context *context;
static struct ibv_pd *pd;
static struct ibv_mr *mr;
static struct ibv_ah *ah;
static struct ibv_ah_attr path;
/* What is sent, what the targets receive, what is written and read. */
static union {
	char bytes[4][RECEIVES * SIZE];
	uint64_t number;
} memory __attribute__((aligned(4096)));
#define OUT (memory.bytes[0])
#define IN (memory.bytes[1])
#define REMOTE (memory.bytes[2])
#define BACK (memory.bytes[3])

struct target {
	struct ibv_qp *qp;
	struct ibv_srq *srq;
	struct ibv_cq *cq;
	uint64_t key;
};

static struct ibv_qp *driver_qp(struct ibv_cq *cq, struct ibv_srq *srq, uint64_t ops,
				struct mlx5dv_qp_init_attr *own)
{
	struct ibv_qp_init_attr_ex init = {
		.send_cq = cq, .recv_cq = cq, .srq = srq, .qp_type = IBV_QPT_DRIVER,
		.comp_mask = IBV_QP_INIT_ATTR_PD, .pd = pd,
	};

	if (!srq)
		init.cap = (struct ibv_qp_cap){ .max_send_wr = 16, .max_send_sge = 2,
						.max_inline_data = 64 };
	if (ops) {
		init.comp_mask |= IBV_QP_INIT_ATTR_SEND_OPS_FLAGS;
		init.send_ops_flags = ops;
	}
	errno = 0;
	return mlx5dv_create_qp(context, &init, own);
}

static void receive(struct target *target, int slot)
{
	struct ibv_sge sge = { (uintptr_t)IN + slot * SIZE, SIZE, mr->lkey };
	struct ibv_recv_wr wr = { .wr_id = slot, .sg_list = &sge, .num_sge = 1 }, *bad;

	CHECK(!ibv_post_srq_recv(target->srq, &wr, &bad));
}

static void create_target(struct target *target, uint64_t key, int first)
{
	struct ibv_srq_init_attr srq = { .attr = { .max_wr = RECEIVES, .max_sge = 1 } };
	struct mlx5dv_qp_init_attr own = {
		.comp_mask = MLX5DV_QP_INIT_ATTR_MASK_DC,
		.dc_init_attr = { .dc_type = MLX5DV_DCTYPE_DCT, .dct_access_key = key },
	};
	struct ibv_qp_attr attr = {
		.qp_state = IBV_QPS_INIT, .port_num = 1, .path_mtu = IBV_MTU_1024,
		.min_rnr_timer = 12, .ah_attr = path,
		.qp_access_flags = IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_READ |
				   IBV_ACCESS_REMOTE_ATOMIC,
	};

	target->key = key;
	target->cq = ibv_create_cq(context, RECEIVES, NULL, NULL, 0);
	target->srq = ibv_create_srq(pd, &srq);
	CHECK(target->cq && target->srq);
	/* It sends nothing. */
	CHECK(!driver_qp(target->cq, target->srq, IBV_QP_EX_WITH_SEND, &own));
	CHECK(errno == EINVAL);
	target->qp = driver_qp(target->cq, target->srq, 0, &own);
	CHECK(target->qp);
	CHECK(!ibv_modify_qp(target->qp, &attr, IBV_QP_STATE | IBV_QP_PKEY_INDEX |
						IBV_QP_PORT | IBV_QP_ACCESS_FLAGS));
	attr.qp_state = IBV_QPS_RTR;
	CHECK(!ibv_modify_qp(target->qp, &attr, IBV_QP_STATE | IBV_QP_AV | IBV_QP_PATH_MTU |
						IBV_QP_MIN_RNR_TIMER));
	/* Only now it has a number. */
	CHECK(target->qp->qp_num);
	for (int slot = first; slot < first + RECEIVES / TARGETS; slot++)
		receive(target, slot);
}

/* An initiator; with streams if its binary logarithm is given. */
static struct ibv_qp *create_initiator(struct ibv_cq *cq, int log_streams)
{
	struct mlx5dv_qp_init_attr own = {
		.comp_mask = MLX5DV_QP_INIT_ATTR_MASK_DC,
		.dc_init_attr = { .dc_type = MLX5DV_DCTYPE_DCI },
	};
	struct ibv_qp_attr attr = {
		.qp_state = IBV_QPS_INIT, .port_num = 1, .path_mtu = IBV_MTU_1024,
		.timeout = 14, .retry_cnt = 7, .rnr_retry = 7, .max_rd_atomic = 1,
	};
	struct ibv_qp *qp;

	if (log_streams) {
		own.comp_mask |= MLX5DV_QP_INIT_ATTR_MASK_DCI_STREAMS;
		own.dc_init_attr.dci_streams.log_num_concurent = log_streams;
		own.dc_init_attr.dci_streams.log_num_errored = log_streams;
	}
	qp = driver_qp(cq, NULL, IBV_QP_EX_WITH_SEND | IBV_QP_EX_WITH_SEND_WITH_IMM |
				 IBV_QP_EX_WITH_RDMA_WRITE | IBV_QP_EX_WITH_RDMA_READ |
				 IBV_QP_EX_WITH_ATOMIC_FETCH_AND_ADD, &own);
	CHECK(qp);
	CHECK(!ibv_modify_qp(qp, &attr, IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT));
	attr.qp_state = IBV_QPS_RTR;
	CHECK(!ibv_modify_qp(qp, &attr, IBV_QP_STATE | IBV_QP_PATH_MTU));
	attr.qp_state = IBV_QPS_RTS;
	CHECK(!ibv_modify_qp(qp, &attr, IBV_QP_STATE | IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT |
					IBV_QP_RNR_RETRY | IBV_QP_SQ_PSN |
					IBV_QP_MAX_QP_RD_ATOMIC));
	return qp;
}

/* The next completion, within a second. */
static struct ibv_wc next(struct ibv_cq *cq)
{
	struct ibv_wc wc;
	time_t end = time(NULL) + 10;
	int count;

	while (!(count = ibv_poll_cq(cq, 1, &wc)))
		CHECK(time(NULL) < end);
	CHECK(count == 1);
	return wc;
}

static struct ibv_wc completion(struct ibv_cq *cq, uint64_t wr_id, enum ibv_wc_opcode opcode)
{
	struct ibv_wc wc = next(cq);

	CHECK(wc.status == IBV_WC_SUCCESS);
	CHECK(wc.wr_id == wr_id);
	CHECK(wc.opcode == opcode);
	return wc;
}

/* Begins a batch of one signalled work request. */
static struct ibv_qp_ex *begin(struct ibv_qp *qp, uint64_t wr_id)
{
	struct ibv_qp_ex *ex = ibv_qp_to_qp_ex(qp);

	ibv_wr_start(ex);
	ex->wr_id = wr_id;
	ex->wr_flags = IBV_SEND_SIGNALED;
	return ex;
}

static void to(struct ibv_qp_ex *ex, struct target *target)
{
	mlx5dv_wr_set_dc_addr(mlx5dv_qp_ex_from_ibv_qp_ex(ex), ah, target->qp->qp_num,
			      target->key);
}

/* Sends to both targets in turns, the data before and after the address. */
static void sends(struct ibv_qp *qp, struct target *targets)
{
	int slots[TARGETS] = { 0, RECEIVES / TARGETS };

	for (int round = 0; round < ROUNDS; round++) {
		int which = round % TARGETS, slot = slots[which];
		int first = which * RECEIVES / TARGETS, inlined = round % 5 == 0;
		struct target *target = &targets[which];
		struct ibv_qp_ex *ex = begin(qp, round);
		int length = inlined ? 50 : SIZE;
		struct ibv_wc wc;

		memset(OUT, round, length);
		ibv_wr_send_imm(ex, round);
		if (round % 3 == 0)
			to(ex, target);
		if (inlined)
			ibv_wr_set_inline_data(ex, OUT, length);
		else
			ibv_wr_set_sge(ex, mr->lkey, (uintptr_t)OUT, length);
		if (round % 3)
			to(ex, target);
		CHECK(!ibv_wr_complete(ex));
		completion(qp->send_cq, round, IBV_WC_SEND);
		wc = completion(target->cq, slot, IBV_WC_RECV);
		CHECK(wc.byte_len == (uint32_t)length);
		CHECK(wc.wc_flags & IBV_WC_WITH_IMM && wc.imm_data == (uint32_t)round);
		CHECK(!memcmp(IN + slot * SIZE, OUT, length));
		receive(target, slot);
		slots[which] = first + (slot - first + 1) % (RECEIVES / TARGETS);
	}
}

/* Writes, reads and adds; short reads may come in the CQE. */
static void remote_memory(struct ibv_qp *qp, struct target *target)
{
	const int lengths[] = { 1, 17, 32, SIZE };
	struct ibv_qp_ex *ex;

	for (int i = 0; i < 4; i++) {
		memset(OUT, 'a' + i, SIZE);
		memset(BACK, 0, SIZE);
		ex = begin(qp, 10 + i);
		ibv_wr_rdma_write(ex, mr->rkey, (uintptr_t)REMOTE);
		to(ex, target);
		ibv_wr_set_sge(ex, mr->lkey, (uintptr_t)OUT, lengths[i]);
		ex->wr_id = 20 + i;
		ibv_wr_rdma_read(ex, mr->rkey, (uintptr_t)REMOTE);
		to(ex, target);
		ibv_wr_set_sge(ex, mr->lkey, (uintptr_t)BACK, lengths[i]);
		CHECK(!ibv_wr_complete(ex));
		completion(qp->send_cq, 10 + i, IBV_WC_RDMA_WRITE);
		completion(qp->send_cq, 20 + i, IBV_WC_RDMA_READ);
		CHECK(!memcmp(BACK, OUT, lengths[i]));
	}
	memset(REMOTE, 0, 8);
	for (uint64_t i = 0; i < 3; i++) {
		ex = begin(qp, 30 + i);
		ibv_wr_atomic_fetch_add(ex, mr->rkey, (uintptr_t)REMOTE, 5);
		to(ex, target);
		ibv_wr_set_sge(ex, mr->lkey, (uintptr_t)BACK, 8);
		CHECK(!ibv_wr_complete(ex));
		completion(qp->send_cq, 30 + i, IBV_WC_FETCH_ADD);
		CHECK(*(uint64_t *)BACK == 5 * i);
	}
}

/* Streams: messages of each keep their order. */
static void streams(struct target *target)
{
	struct ibv_cq *cq = ibv_create_cq(context, 64, NULL, NULL, 0);
	struct ibv_qp *qp = create_initiator(cq, 2);
	struct ibv_qp_ex *ex = begin(qp, 0);

	for (int i = 0; i < 8; i++) {
		ex->wr_id = i;
		ibv_wr_rdma_write(ex, mr->rkey, (uintptr_t)REMOTE + i);
		mlx5dv_wr_set_dc_addr_stream(mlx5dv_qp_ex_from_ibv_qp_ex(ex), ah,
					     target->qp->qp_num, target->key, i % 4);
		ibv_wr_set_sge(ex, mr->lkey, (uintptr_t)OUT + i, 1);
	}
	CHECK(!ibv_wr_complete(ex));
	for (int i = 0; i < 8; i++)
		CHECK(next(cq).status == IBV_WC_SUCCESS);
	CHECK(!memcmp(REMOTE, OUT, 8));
	CHECK(!ibv_destroy_qp(qp));
	CHECK(!ibv_destroy_cq(cq));
}

int main(void)
{
	struct mlx5dv_qp_init_attr none = { .comp_mask = 0 };
	struct mlx5dv_context caps = { .comp_mask = MLX5DV_CONTEXT_MASK_DCI_STREAMS };
	struct ibv_device **list = ibv_get_device_list(NULL);
	struct target targets[TARGETS], wrong;
	struct ibv_port_attr port;
	struct ibv_qp_ex *ex;
	struct ibv_qp *qp;
	struct ibv_cq *cq;

	CHECK(list && list[0]);
	context = ibv_open_device(list[0]);
	CHECK(context);
	pd = ibv_alloc_pd(context);
	mr = ibv_reg_mr(pd, &memory, sizeof(memory),
			IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE |
			IBV_ACCESS_REMOTE_READ | IBV_ACCESS_REMOTE_ATOMIC);
	cq = ibv_create_cq(context, 64, NULL, NULL, 0);
	CHECK(pd && mr && cq && !ibv_query_port(context, 1, &port));
	path.port_num = 1;
	path.dlid = port.lid;
	path.is_global = 1;
	CHECK(!ibv_query_gid(context, 1, 0, &path.grh.dgid));
	ah = ibv_create_ah(pd, &path);
	CHECK(ah);

	/* A queue pair of the driver's own type is one of the two halves. */
	CHECK(!driver_qp(cq, NULL, 0, &none) && errno == EINVAL);
	none.comp_mask = MLX5DV_QP_INIT_ATTR_MASK_DC;
	CHECK(!driver_qp(cq, NULL, 0, &none) && errno == EINVAL);

	for (int i = 0; i < TARGETS; i++)
		create_target(&targets[i], KEY + i, i * RECEIVES / TARGETS);
	CHECK(targets[0].qp->qp_num != targets[1].qp->qp_num);
	qp = create_initiator(cq, 0);
	sends(qp, targets);
	remote_memory(qp, &targets[1]);
	CHECK(!mlx5dv_query_device(context, &caps));
	if (caps.comp_mask & MLX5DV_CONTEXT_MASK_DCI_STREAMS &&
	    caps.dci_streams_caps.max_log_num_concurent >= 2)
		streams(&targets[0]);

	/* Without an address nothing is posted. */
	ex = begin(qp, 1);
	ibv_wr_send(ex);
	ibv_wr_set_sge(ex, mr->lkey, (uintptr_t)OUT, 8);
	ibv_wr_abort(ex);
	/* The key is checked. */
	wrong = targets[0];
	wrong.key++;
	ex = begin(qp, 2);
	ibv_wr_rdma_write(ex, mr->rkey, (uintptr_t)REMOTE);
	to(ex, &wrong);
	ibv_wr_set_sge(ex, mr->lkey, (uintptr_t)OUT, 8);
	CHECK(!ibv_wr_complete(ex));
	CHECK(next(cq).status != IBV_WC_SUCCESS);

	CHECK(!ibv_destroy_qp(qp));
	for (int i = 0; i < TARGETS; i++) {
		CHECK(!ibv_destroy_qp(targets[i].qp));
		CHECK(!ibv_destroy_srq(targets[i].srq));
		CHECK(!ibv_destroy_cq(targets[i].cq));
	}
	CHECK(!ibv_destroy_ah(ah));
	CHECK(!ibv_destroy_cq(cq));
	CHECK(!ibv_dereg_mr(mr));
	CHECK(!ibv_dealloc_pd(pd));
	CHECK(!ibv_close_device(context));
	ibv_free_device_list(list);
	puts("well");
	return 0;
}
